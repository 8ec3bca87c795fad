"""E/P/D on vLLM behind Dynamo's real Rust frontend: an encode, a prefill and a decode worker.

What an aggregated worker of the same arguments answers is the measure. Media is processed on the
encode worker alone; prefill reads its embeddings, decode goes on with the KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.disagg.deployment import (
    PROMPTS,
    ROLE,
    RUST,
    Deployment,
    ask,
    check_embeddings_of_a_client,
)
from tests.pictures import data_uri, part, picture
from tests.stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: Mapping[str, str]
) -> Iterator[Stack]:
    # After `expected`: no more engines at a time than are needed.
    stack = Deployment(model, tmp_path_factory.mktemp("epd"), {"rust": RUST}, workers=0)
    stack.add_worker(ROLE, "encode")
    stack.add_worker(ROLE, "prefill", "--route-to-encoder")
    stack.add_worker(ROLE, "decode")
    with stack:
        yield stack


@pytest.mark.parametrize("name", list(PROMPTS))
def test_answers_are_the_aggregated_workers(
    stack: Stack, expected: Mapping[str, str], name: str
) -> None:
    for _ in range(2):
        assert ask(stack, *PROMPTS[name]).text == expected[name]


def test_an_image_is_processed_once_and_by_the_encode_worker(stack: Stack) -> None:
    new = part(data_uri(picture()))
    first = ask(stack, new, "Describe the image")
    assert first.processed_images == 1
    assert first.of("encode").items == {"encoded": 1}
    assert first.of("encode").processed_images == 1
    assert first.of("prefill").items == {"received": 1}
    assert first.of("decode").outcome == "continued"
    assert first.answer.cached_tokens == first.predicted_tokens == 0

    again = ask(stack, new, "Describe the image")
    assert again.text == first.text
    assert again.processed_images == again.received_bytes == 0
    assert again.of("encode").items == {"cached": 1}
    assert again.of("prefill").items == {"hit": 1}
    assert again.of("decode").outcome == "continued"
    assert again.predicted_tokens == again.answer.reusable_tokens > 0


def test_embeddings_that_a_client_sends_are_those_of_the_picture(stack: Stack) -> None:
    check_embeddings_of_a_client(stack)


def test_text_skips_the_encode_worker(stack: Stack) -> None:
    seen = ask(stack, "no image at all")
    assert seen.of("encode").outcomes == {}
    assert seen.of("prefill").outcome == seen.of("decode").outcome == "text"
