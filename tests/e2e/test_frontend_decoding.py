"""Pixels that the Rust frontend decoded (``--frontend-decoding``), handed over by NIXL; and the
canary, which takes the way of an image when nobody else does."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pictures import data_uri, part, picture
from tests.stack import FrontendSpec, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def nixl_libraries() -> dict[str, str]:
    """Where Dynamo's Rust side finds NIXL: inside of the wheel, where no loader looks."""
    spec = importlib.util.find_spec("nixl_cu13")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    own, bundled = packages / ".nixl_cu13.mesonpy.libs", packages / "nixl_cu13.libs"
    known = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": ":".join([str(own), str(bundled), *([known] if known else [])]),
        "NIXL_PLUGIN_DIR": str(own / "plugins"),
    }


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    wrap = ["env", *(f"{name}={value}" for name, value in nixl_libraries().items())]
    with Stack(
        model=tiny_model("qwen2_5_vl"),
        folder=tmp_path_factory.mktemp("decoding"),
        frontends={"rust": FrontendSpec("rust", wrap=wrap)},
        workers=1,
        worker_args=("--frontend-decoding",),
        worker_env={
            **nixl_libraries(),
            "DYN_HEALTH_CHECK_ENABLED": "true",
            "DYN_CANARY_WAIT_TIME": "1",
        },
    ) as running:
        yield running


def test_decoded_pixels_are_processed_and_repeats_move_nothing(stack: Stack) -> None:
    one, other = (part(data_uri(picture())) for _ in range(2))
    first = stack.ask("rust", [one, "Describe the image"])
    again = stack.ask("rust", [one, "Describe the image"])
    different = stack.ask("rust", [other, "Describe the image"])
    assert (first.outcome, again.outcome, different.outcome) == ("raw", "hit", "raw")
    assert first.text == again.text
    assert first.text != different.text
    assert again.answer.cached_tokens == again.answer.reusable_tokens


def test_the_canary_takes_an_image_the_whole_way_and_counts_as_no_request(stack: Stack) -> None:
    worker = stack.worker[0]
    requests = worker.metrics().total("dynamo_worker_ext_requests_total")

    def loaded() -> float:
        return worker.metrics().total("dynamo_worker_ext_mm_stage_seconds_count", stage="load")

    before = loaded()
    wait_for(lambda: loaded() > before, "the canary to send its image")
    assert worker.get("/health")[0] == 200
    assert worker.metrics().total("dynamo_worker_ext_requests_total") == requests
