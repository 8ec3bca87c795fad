"""What the vLLM worker makes of its engine's refusals, and how it leaves, without an engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from dynamo.llm import exceptions as dynamo_errors
from vllm import SamplingParams
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import EngineBusyError
from dynamo_worker_ext.ingest import Outcome, Resolution
from dynamo_worker_ext.vllm import handler
from dynamo_worker_ext.vllm.args import parse_args
from dynamo_worker_ext.vllm.handler import EnginePrompt, VllmWorker
from dynamo_worker_ext.vllm.sampling import EngineCall
from tests.context import Context


class Engine:
    """Raises `error` for each request, where it has one."""

    errored = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    async def generate(self, *given: Any, **named: Any) -> AsyncGenerator[Any, None]:
        self.given, self.named = given, named
        if self.error is not None:
            raise self.error
        yield

    def shutdown(self, timeout: float) -> None:
        pass


def worker(engine: Engine, *argv: str) -> Any:
    one: Any = VllmWorker(parse_args(["--model", "some/model", *argv]))
    one._llm = engine
    return one


@pytest.mark.parametrize("error", [QueueOverflowError(), MaxQueuedTokensError()])
async def test_a_full_queue_is_an_error_that_another_worker_may_make_good(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(Engine(error))
    call = EngineCall(SamplingParams())
    with pytest.raises(EngineBusyError, match="on a different instance"):
        async for _ in one.run(EnginePrompt({}), call, Context(), may_resend=True):
            pass

    monkeypatch.setattr(
        one, "_stream", lambda *_: one.run(EnginePrompt({}), call, Context(), may_resend=True)
    )
    with pytest.raises(dynamo_errors.StreamIncomplete, match='"code": 503'):
        async for _ in one.generate({}, Context()):
            pass


async def test_all_of_a_call_is_given_to_the_engine(tmp_path: Path) -> None:
    engine = Engine(QueueOverflowError())
    one = worker(engine, "--enable-lora", "--lora-modules", f"adapter={tmp_path}")
    one._media = SimpleNamespace(from_text=lambda _: {"prompt_token_ids": [1]})
    params, parser, trace = SamplingParams(seed=7), {"a": 1}, {"traceparent": "00-1-2-01"}
    call = EngineCall(
        params, priority=-6, cache_salt="salt", data_parallel_rank=1, lora_name="adapter",
        reasoning_ended=True, reasoning_parser_kwargs=parser, trace_headers=trace,
    )  # fmt: skip
    media = wire.MediaRequest(token_ids=[1])
    prompt = await one.engine_input(media, Resolution(Outcome.TEXT), call, resend=False)
    with pytest.raises(EngineBusyError):
        async for _ in one.run(prompt, call, Context(), may_resend=False):
            pass
    given, sampling, _ = engine.given
    assert given == {"prompt_token_ids": [1], "cache_salt": "salt"}
    assert sampling is params
    lora = engine.named.pop("lora_request")
    assert (lora.lora_name, lora.lora_path) == ("adapter", str(tmp_path))
    assert engine.named == {
        "priority": -6,
        "data_parallel_rank": 1,
        "trace_headers": trace,
        "reasoning_ended": True,
        "reasoning_parser_kwargs": parser,
    }


async def test_the_cards_of_adapters_leave_discovery_before_the_drain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = worker(Engine(), "--enable-lora", "--lora-modules", f"adapter={tmp_path}")
    order: list[str] = []

    async def unregister(endpoint: Any, adapters: Any) -> None:
        order.extend(adapter.name for adapter in adapters)

    async def drain() -> None:
        order.append("drain")

    monkeypatch.setattr(handler, "unregister_adapters", unregister)
    monkeypatch.setattr(one, "_drain", drain)
    one._endpoint = object()
    await one.cleanup()
    assert order == ["adapter", "drain"]
    await one.cleanup()
    assert order == ["adapter", "drain", "drain"]


def test_the_line_about_a_requests_media_has_its_id(caplog: pytest.LogCaptureFixture) -> None:
    one = worker(Engine())
    with caplog.at_level(logging.DEBUG):
        one._count(wire.MediaRequest(token_ids=[1]), Resolution(Outcome.TEXT), "the-id")
    assert "request the-id: media text over none" in caplog.text
