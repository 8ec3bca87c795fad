"""E/PD on vLLM behind Dynamo's real Rust frontend: one encode worker, one that takes embeddings.

What an aggregated worker of the same arguments answers is the measure. The tests that end an
encode worker come last and start the next one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.direct import Segments
from tests.disagg.deployment import (
    PROMPTS,
    ROLE,
    RUST,
    Deployment,
    ask,
    check_embeddings_of_a_client,
    check_processed_image_is_encoded,
    check_wrong_embeddings_are_refused,
    the,
)
from tests.pictures import data_uri, part, picture, video, video_part
from tests.stack import FrontendSpec, Process, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FRONTENDS = {
    "rust": RUST,
    "ours": FrontendSpec("vllm", "auto", module="dynamo_worker_ext.frontend"),
}


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Deployment(model, tmp_path_factory.mktemp("epd"), FRONTENDS, workers=0, grace_s=5)
    stack.add_worker(ROLE, "encode")
    stack.add_worker("--route-to-encoder")
    with stack:
        yield stack


def replace_encoder(stack: Stack, *args: str) -> Process:
    """Have another encode worker in place of the one that runs, if any does."""
    for worker in stack.worker:
        if worker.role == "encode" and worker.alive:
            worker.signal(signal.SIGTERM)
            assert worker.wait(90) == 0
            stack.ended(worker)
    encoder = stack.add_worker(ROLE, "encode", *args)
    stack.wait_ready()
    return encoder


@pytest.mark.parametrize("name", list(PROMPTS))
def test_answers_are_the_aggregated_workers(
    # In this order: no more engines at a time than are needed.
    expected: Mapping[str, str],
    stack: Stack,
    name: str,
) -> None:
    for _ in range(2):
        assert ask(stack, *PROMPTS[name]).text == expected[name]


def test_text_skips_the_encode_worker(stack: Stack) -> None:
    seen = ask(stack, "no image at all")
    assert seen.of("agg").outcome == "text"
    assert seen.of("encode").outcomes == {}


def test_an_image_is_processed_once_and_by_the_encode_worker(stack: Stack) -> None:
    new = part(data_uri(picture()))
    first = ask(stack, new, "Describe the image")
    encode, consumer = first.of("encode"), first.of("agg")
    assert (encode.outcome, encode.items, encode.processed_images) == (
        "encoded",
        {"encoded": 1},
        1,
    )
    assert (consumer.outcome, consumer.items, consumer.processed_images) == (
        "received",
        {"received": 1},
        0,
    )
    assert consumer.received_bytes > 0
    assert consumer.total("dynamo_worker_ext_mm_received_bytes_total", transport="arena") > 0
    assert first.answer.cached_tokens == first.predicted_tokens == 0

    again = ask(stack, new, "Describe the image")
    encode, consumer = again.of("encode"), again.of("agg")
    assert again.text == first.text
    assert (encode.outcome, encode.items) == ("hit", {"cached": 1})
    assert (consumer.outcome, consumer.items) == ("hit", {"hit": 1})
    assert again.processed_images == again.received_bytes == 0
    # The worker has all that can be had, and the router knew.
    assert again.predicted_tokens == again.answer.cached_tokens == again.answer.reusable_tokens > 0


def test_a_video_is_processed_once_and_by_the_encode_worker(stack: Stack) -> None:
    new, image = video_part(video()), part(data_uri(picture()))
    first = ask(stack, new, "Describe the video")
    encode, consumer = first.of("encode"), first.of("agg")
    assert (encode.items, encode.processed_images) == ({"encoded": 1}, 1)
    assert (consumer.items, consumer.processed_images) == ({"received": 1}, 0)
    again = ask(stack, new, "Describe the video")
    assert again.text == first.text
    assert (again.of("encode").items, again.of("agg").items) == ({"cached": 1}, {"hit": 1})
    assert again.processed_images == again.received_bytes == 0
    assert again.answer.cached_tokens == again.answer.reusable_tokens > 0

    both = ask(stack, image, new, "Compare them")
    assert both.of("encode").items == {"cached": 1, "encoded": 1}
    assert both.of("agg").items == {"hit": 1, "received": 1}
    assert both.processed_images == 1
    swapped = ask(stack, new, image, "Compare them")
    assert swapped.of("agg").items == {"hit": 2}


def test_our_frontend_leaves_images_to_the_encode_worker(
    stack: Stack, expected: Mapping[str, str]
) -> None:
    """By the card of the worker behind it, although that could read processed ones."""
    for name, content in PROMPTS.items():
        assert stack.ask("ours", list(content)).text == expected[name], name
    new = part(data_uri(picture()))
    first = stack.ask("ours", [new, "Describe the image"])
    assert first.of("encode").items == {"encoded": 1}
    assert first.of("encode").processed_images == first.processed_images == 1
    assert first.of("agg").outcome == "received"
    again = stack.ask("ours", [new, "Describe the image"])
    assert again.text == first.text
    assert again.of("encode").items == {"cached": 1}
    assert (again.of("agg").outcome, again.processed_images, again.received_bytes) == ("hit", 0, 0)
    assert again.predicted_tokens == again.answer.cached_tokens == again.answer.reusable_tokens > 0


def test_an_image_that_was_processed_is_encoded_from_what_was_sent(
    stack: Stack, model: Path
) -> None:
    with Segments() as segments:
        check_processed_image_is_encoded(stack, model, segments)


def test_embeddings_that_a_client_sends_are_those_of_the_picture(stack: Stack) -> None:
    check_embeddings_of_a_client(stack)


def test_wrong_embeddings_are_refused_and_harm_nobody(stack: Stack) -> None:
    check_wrong_embeddings_are_refused(stack)


def test_only_the_new_one_of_two_images_is_encoded_and_read(stack: Stack) -> None:
    known, unknown = part(data_uri(picture())), part(data_uri(picture()))
    first = ask(stack, known, "Describe the image")
    both = ask(stack, known, unknown, "Describe the image")
    assert both.of("encode").items == {"cached": 1, "encoded": 1}
    assert both.of("agg").items == {"hit": 1, "received": 1}
    assert both.received_bytes == first.received_bytes
    assert both.predicted_tokens == both.answer.cached_tokens > 0
    swapped = ask(stack, unknown, known, "Describe the image")
    assert swapped.predicted_tokens == swapped.answer.cached_tokens == 0
    assert swapped.of("agg").items == {"hit": 2}


def test_what_cannot_be_encoded_is_the_clients_to_mend(stack: Stack) -> None:
    broken = part("data:image/png;base64,AAAA")
    answer = stack.chat("rust", [broken, "Describe the image"])
    assert 400 <= answer.status < 500, answer.body
    several = [part(data_uri(picture())) for _ in range(4)]
    answer = stack.chat("rust", [*several, "Describe the images"])
    assert answer.status == 400, answer.body


# Faults.


def test_a_handle_that_has_expired(stack: Stack) -> None:
    """The embedding is taken back before it can be read: raw media answers."""
    known = ask(stack, *PROMPTS["one image"]).text
    replace_encoder(stack, "--embedding-cache-mb", "0", "--embedding-lease", "0.001")
    new = part(data_uri(picture()))
    outcomes = []
    for _ in range(3):
        seen = ask(stack, part(data_uri(picture())), "Describe the image")
        outcomes.append(seen.of("agg").outcome)
        assert seen.of("encode").outcome == "encoded"
    assert set(outcomes) <= {"reprocessed", "received"}
    assert "reprocessed" in outcomes
    # Nothing has spoiled anything.
    first, again = ask(stack, new, "Describe"), ask(stack, new, "Describe")
    assert first.text == again.text
    assert ask(stack, *PROMPTS["one image"]).text == known


def test_an_encode_worker_that_is_killed(stack: Stack) -> None:
    """The frontend (Dynamo 1.6.1) goes on without it, and the next worker processes the image;
    once discovery has forgotten the last encode worker, the model is not ready until one comes."""
    known = ask(stack, *PROMPTS["two images"]).text
    killed = the(stack, "encode")
    forget = stack.kill(killed)
    stack.ended(killed)
    assert ask(stack, *PROMPTS["two images"]).text == known
    new = part(data_uri(picture()))
    alone = ask(stack, new, "Describe the image")
    assert (alone.of("agg").outcome, alone.processed_images) == ("raw", 1)
    forget()
    wait_for(lambda: stack.chat("rust", [new, "Describe"]).status == 503, "an honest answer", 60)

    replace_encoder(stack)
    again = ask(stack, new, "Describe the image")
    assert again.text == alone.text
    assert again.of("encode").outcome == "encoded"
    assert again.of("agg").outcome == "hit", "what it has as pixels is no other item as embeddings"
    seen = ask(stack, part(data_uri(picture())), "Describe the image")
    assert seen.of("agg").outcome == "received"


def test_an_encode_worker_that_is_told_to_stop_under_load(stack: Stack) -> None:
    """Requests are answered, by way of it or without; later ones may be told to come again."""
    encoder = the(stack, "encode")

    def encoded() -> float:
        return encoder.metrics().total("dynamo_worker_ext_mm_items_total", source="encoded")

    before = encoded()
    streams = [
        stack.stream("rust", [part(data_uri(picture())), "Describe the image"]) for _ in range(6)
    ]
    wait_for(lambda: encoded() > before, "something was encoded")
    encoder.signal(signal.SIGTERM)
    for stream in streams:
        stream.wait_ended()
        assert stream.error is None or stream.status == 503, (stream.status, stream.error)
    assert any(stream.error is None for stream in streams)
    assert encoder.wait(90) == 0
    stack.ended(encoder)
