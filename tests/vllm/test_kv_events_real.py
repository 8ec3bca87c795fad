"""What the router expects of a real vLLM engine is what the engine then has.

One engine, started by kv_events_engine.py in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.vllm.script import report_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def report(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("kv-events")
    return report_of("kv_events_engine.py", tiny_model("qwen2_5_vl"), out)


def test_the_router_expects_exactly_what_the_engine_has_cached(report: dict[str, Any]) -> None:
    wrong = {
        request["name"]: (request["expected"], request["cached"])
        for request in report["requests"]
        if request["expected"] != request["cached"]
    }
    assert wrong == {}


def test_after_a_request_the_router_knows_all_its_full_blocks(report: dict[str, Any]) -> None:
    short = {
        request["name"]: (request["overlap_after"], request["full_blocks"])
        for request in report["requests"]
        if request["overlap_after"] != request["full_blocks"]
    }
    assert short == {}


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("one image, repeated", 2),
        ("another image", 0),
        ("two images, repeated", 3),
        ("two images, swapped", 0),
        ("two images, the second another", 1),
        ("two small images, repeated", 1),
        ("two small images, swapped", 0),
        ("adjacent images, repeated", 3),
        ("a large image, repeated", 5),
        ("salted", 0),
        ("salted, repeated", 2),
        ("adapter", 0),
        ("adapter, repeated", 2),
        ("adapter and salt, repeated", 2),
        ("after the cache was cleared", 0),
        ("evicted, a", 0),
    ],
)
def test_blocks_that_are_cached(report: dict[str, Any], name: str, blocks: int) -> None:
    (request,) = (r for r in report["requests"] if r["name"] == name)
    assert (request["expected"], request["cached"]) == (blocks, blocks)


def test_routing_tokens_equal_those_of_dynamo(report: dict[str, Any]) -> None:
    assert all(request["equals_upstream"] for request in report["requests"])


def test_nothing_was_lost_or_misread(report: dict[str, Any]) -> None:
    assert report["failures"] == []
    assert report["gaps"] == 0
    assert report["dropped"] == {}
    kinds = report["kinds"]
    assert kinds["malformed"] == kinds["ignored"] == 0
    assert kinds["cleared"] == 1
    assert kinds["removed"] > 10
