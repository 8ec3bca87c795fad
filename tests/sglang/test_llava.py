"""A real SGLang worker of LLaVA behind Dynamo's Rust frontend: raw images, and what comes again in
LLaVA's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.disagg.deployment import RUST, ask
from tests.engines import SGLANG
from tests.llava_model import make_llava
from tests.pictures import data_uri, part, picture
from tests.stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("llava")
    model = make_llava(tiny_model("qwen2_vl"), folder / "llava-1.5-tiny")
    with Stack(
        model,
        folder,
        {"rust": RUST},
        workers=1,
        engine=SGLANG,
        block=16,
        worker_args=("--dtype", "float16"),  # as SGLang has the tower
    ) as running:
        yield running


def test_a_repeated_image_is_not_processed_again(stack: Stack) -> None:
    image, other = (part(data_uri(picture())) for _ in range(2))
    first = ask(stack, image, "Describe the image")
    assert (first.outcome, first.processed_images) == ("raw", 1)
    assert ask(stack, other, "Describe the image").text != first.text
    again = ask(stack, image, "Describe the image")
    assert (again.text, again.outcome, again.processed_images) == (first.text, "hit", 0)
    assert again.predicted_tokens == again.answer.cached_tokens == again.answer.reusable_tokens > 0
    # Under another text nothing of the image is in the KV cache: the form itself is put to use.
    elsewhere = ask(stack, "In other words:", image, "What is it?")
    assert (elsewhere.outcome, elsewhere.processed_images) == ("hit", 0)
    salt = {"nvext": {"cache_salt": "of somebody else"}}
    raw = ask(stack, "In other words:", image, "What is it?", **salt)
    assert (raw.text, raw.outcome, raw.processed_images) == (elsewhere.text, "raw", 1)


def test_what_sglang_would_not_look_at_is_refused(stack: Stack) -> None:
    images = [part(data_uri(picture())) for _ in range(2)]
    answer = stack.chat("rust", [*images, "Compare the images"])
    assert answer.status == 400, answer.body
    assert "at most 1" in str(answer.body)
