"""A hybrid model, most of whose layers carry a state: what the router expects of a real engine.

One engine, started by hybrid_engine.py in a process of its own.
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

#: Prompts that part from a known one where the engine kept no state; see `kv_events.states`.
PART = {"another image": 1, "another question": 3}


@pytest.fixture(scope="module")
def report(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return report_of("hybrid_engine.py", tiny_model("qwen3_5"), tmp_path_factory.mktemp("hybrid"))


def test_the_router_expects_exactly_what_the_engine_reuses(report: dict[str, Any]) -> None:
    found = {one["name"]: (one["expected"], one["cached"]) for one in report["requests"]}
    assert {name: found.pop(name) for name in PART} == {
        n: (shared, 0) for n, shared in PART.items()
    }
    assert [name for name, (expected, cached) in found.items() if expected != cached] == []
    assert sum(cached for _, cached in found.values()) > 100
    # vLLM keeps a state where prompts were seen to part.
    assert found["one more question"] == (3, 3)


def test_answers_are_not_counted_on(report: dict[str, Any]) -> None:
    """Full attention keeps their blocks, but there is no state to go on from."""
    answer, after = (
        one for one in report["requests"] if one["name"] in ("answer", "after the answer")
    )
    assert after["full_blocks"] > answer["full_blocks"] + 3
    assert after["expected"] == after["cached"] == answer["full_blocks"]


def test_nothing_was_lost_or_misread(report: dict[str, Any]) -> None:
    assert report["failures"] == []
    assert report["dropped"] == {}
    assert report["removed"] > 10
