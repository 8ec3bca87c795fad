"""What the vLLM worker makes of its engine's refusals, and how it leaves, without an engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from pathlib import Path
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

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
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
