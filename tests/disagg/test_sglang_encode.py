"""Encode workers on SGLang, through the real frontends: the answers of a worker that encodes by
itself, and a picture is processed and encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.disagg.test_sglang_pd import DECODE_ARGS, prefill_args, questions
from tests.engines import SGLANG
from tests.stack import FrontendSpec, Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RUST = {"rust": FrontendSpec("rust", "off")}
ENCODE_ARGS = ("--disaggregation-mode", "encode")
TO_ENCODER = "--route-to-encoder"


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def model(tiny_model: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def asked() -> Mapping[str, Any]:
    return questions("rust")


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory, asked: Mapping[str, Any]
) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("aggregated")
    with Stack(model, folder, RUST, workers=1, engine=SGLANG) as stack:
        return {name: stack.chat("rust", content).text for name, content in asked.items()}


@pytest.fixture(scope="module", params=["aggregated", "prefill and decode"])
def stack(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    expected: Mapping[str, str],  # its worker is gone before these are started
    request: pytest.FixtureRequest,
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("roles")
    with Stack(model, folder, {}, workers=0, engine=SGLANG) as stack:
        stack.add_worker(*ENCODE_ARGS)
        if request.param == "aggregated":
            stack.add_worker(TO_ENCODER)
        else:
            stack.add_worker(*prefill_args(), TO_ENCODER)
            stack.add_worker(*DECODE_ARGS)
        for name, spec in RUST.items():
            stack.add_frontend(name, spec)
        stack.wait_ready()
        yield stack


def test_answers_are_those_of_a_worker_that_encodes_by_itself(
    stack: Stack, asked: Mapping[str, Any], expected: Mapping[str, str]
) -> None:
    first_role = "prefill" if len(stack.worker) == 3 else "agg"
    # A picture that was seen is not encoded again, in whatever company it comes.
    new = {"text": 0, "one image": 1, "two images": 1, "two images swapped": 0}
    for name, content in asked.items():
        first, again = stack.ask("rust", content), stack.ask("rust", content)
        assert (first.text, again.text) == (expected[name],) * 2, name
        assert first.of("encode").processed_images == new[name], name
        assert again.processed_images == 0, name
        assert first.processed_images == new[name], name
        taken = first.of(first_role)
        if name == "text":
            assert taken.outcome == "text"
        elif name == "two images swapped":
            assert taken.outcome == "hit"
        else:
            assert taken.outcome == "received", name
            assert again.of(first_role).outcome == "hit", name
        assert again.answer.cached_tokens == again.answer.reusable_tokens > 0, name
