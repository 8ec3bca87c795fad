"""LoRA adapters and data-parallel ranks of a real SGLang worker, behind Dynamo's Rust frontend: an
image that comes again is found where it is, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("dynamo.llm")

from tests.adapters import make_adapter
from tests.disagg.deployment import RUST, ask
from tests.engines import SGLANG
from tests.pictures import data_uri, part, picture
from tests.stack import Stack, free_port, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def adapted(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    model, folder = tiny_model("qwen2_5_vl"), tmp_path_factory.mktemp("adapter")
    make_adapter(model, folder / "adapter")
    with Stack(
        model,
        folder,
        {"rust": RUST},
        workers=1,
        engine=SGLANG,
        worker_args=(
            "--lora-paths", f"my-lora={folder / 'adapter'}", "--lora-backend", "torch_native",
        ),
        worker_env={"DWE_TESTS_UNPINNED": "1"},
    ) as running:  # fmt: skip
        yield running


def test_an_adapter_answers_as_itself_and_shares_no_image_with_the_base_model(
    adapted: Stack,
) -> None:
    def is_known() -> bool:
        return adapted.chat("rust", "Hello", model="my-lora").status == 200

    wait_for(is_known, "the adapter to be known", 60)
    image = part(data_uri(picture()))
    texts = {}
    for model in ("tiny", "my-lora"):
        first = ask(adapted, image, "Describe the image", model=model)
        assert (first.outcome, first.processed_images) == ("raw", 1)
        assert first.answer.cached_tokens == 0
        again = ask(adapted, image, "Describe the image", model=model)
        assert (again.outcome, again.processed_images) == ("hit", 0)
        assert again.answer.cached_tokens == again.answer.reusable_tokens > 0
        assert again.text == first.text
        texts[model] = first.text
    assert texts["tiny"] != texts["my-lora"]


def test_an_adapter_that_is_not_there_is_not_found(adapted: Stack) -> None:
    assert adapted.chat("rust", "Hello", model="no-such-adapter").status == 404


@pytest.fixture(scope="module")
def ranks(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    cores = sorted(os.sched_getaffinity(0))
    # The second rank takes the next port. SGLang (0.5.21) does not listen on a named address.
    events = f'{{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:{free_port()}"}}'
    with Stack(
        tiny_model("qwen2_5_vl"),
        tmp_path_factory.mktemp("ranks"),
        {"rust": RUST},
        workers=1,
        engine=SGLANG,
        ranks=2,
        worker_args=("--dp-size", "2", "--kv-events-config", events),
        worker_env={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    ) as running:
        yield running


def test_a_repeated_image_goes_to_the_rank_that_has_it(ranks: Stack) -> None:
    images = [part(data_uri(picture())) for _ in range(4)]
    texts = []
    for image in images:
        first = ask(ranks, image, "Describe the image")
        assert first.answer.cached_tokens == 0
        texts.append(first.text)
    # Each twice, so that no fixed order of ranks finds them all.
    for image, text in zip(images, texts, strict=True):
        for _ in range(2):
            again = ask(ranks, image, "Describe the image")
            assert (again.text, again.outcome) == (text, "hit")
            assert again.predicted_tokens == again.answer.cached_tokens
            assert again.answer.cached_tokens == again.answer.reusable_tokens > 0
