"""Encode workers on SGLang, through the real frontends: the answers of a worker that encodes by
itself, and a picture is processed and encoded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.direct import Segments
from tests.disagg.deployment import (
    RUST,
    check_embeddings_of_a_client,
    check_processed_image_is_encoded,
    check_wrong_embeddings_are_refused,
)
from tests.disagg.sglang_deployment import DECODE_ARGS, prefill_args
from tests.engines import SGLANG
from tests.pictures import video_part
from tests.stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ENCODE_ARGS = ("--disaggregation-mode", "encode")
TO_ENCODER = "--route-to-encoder"


@pytest.fixture(scope="module", params=["aggregated", "prefill and decode"])
def stack(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    sglang_expected: Mapping[str, Any],  # its worker is gone before these are started
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
        stack.add_frontend("rust", RUST)
        stack.wait_ready()
        yield stack


def test_answers_are_those_of_a_worker_that_encodes_by_itself(
    stack: Stack,
    asked: Mapping[str, Mapping[str, Any]],
    sglang_expected: Mapping[str, Mapping[str, str]],
) -> None:
    first_role = "prefill" if len(stack.worker) == 3 else "agg"
    # A picture that was seen is not encoded again, in whatever company it comes.
    new = {"text": 0, "one image": 1, "two images": 1, "two images swapped": 0, "a video": 1}
    for name, content in asked["rust"].items():
        first, again = stack.ask("rust", content), stack.ask("rust", content)
        assert (first.text, again.text) == (sglang_expected["rust"][name],) * 2, name
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


def test_a_broken_video_is_the_clients_to_mend(stack: Stack) -> None:
    """It is SGLang that finds out; nobody waits for its KV then."""
    answer = stack.chat("rust", [video_part(b"no video" * 99), "Describe it"], timeout=60)
    assert answer.status == 400, answer.body
    assert stack.chat("rust", "hello").status == 200


def test_an_image_that_was_processed_is_encoded_from_what_was_sent(
    stack: Stack, model: Path
) -> None:
    if len(stack.worker) == 2:
        with Segments() as segments:
            check_processed_image_is_encoded(stack, model, segments)


def test_embeddings_that_a_client_sends_are_those_of_the_picture(stack: Stack) -> None:
    check_embeddings_of_a_client(stack)


def test_wrong_embeddings_are_refused_and_harm_nobody(stack: Stack) -> None:
    if len(stack.worker) == 2:
        check_wrong_embeddings_are_refused(stack)
