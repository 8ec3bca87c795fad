"""The doctor on a real deployment: sound, then joined by a worker that hashes otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.e2e.gates import min_avg_kv_hit_rate, require_full_overlap
from tests.pictures import data_uri, part, picture
from tests.stack import BLOCK, ROOT, FrontendSpec, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FRONTENDS = {"ours": FrontendSpec("vllm", "auto", module="dynamo_worker_ext.frontend")}


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("doctor")
    with Stack(tiny_model("qwen2_5_vl"), folder, FRONTENDS, workers=1) as stack:
        yield stack


def doctor(stack: Stack, *args: str) -> tuple[int, dict[str, Any]]:
    """Its exit status, and what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_worker_ext.doctor", "--discovery", "file", "--json", *args],
        env={**os.environ, **stack.env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["healthy"] == (done.returncode == 0)
    return done.returncode, found


def texts(found: dict[str, Any], area: str, level: str) -> list[str]:
    findings = found["findings"]
    return [one["text"] for one in findings if (one["area"], one["level"]) == (area, level)]


def problems(found: dict[str, Any]) -> list[str]:
    """All but the machine's, which are not this test's affair."""
    return [
        one["text"]
        for one in found["findings"]
        if one["level"] == "problem" and one["area"] != "environment"
    ]


def test_a_sound_deployment_has_no_problems_and_takes_an_image(stack: Stack) -> None:
    _, found = doctor(stack, "--probe", stack.frontend["ours"].url)
    assert problems(found) == []
    worker = stack.instance_id(stack.worker[0])
    assert any(f"{worker} is vllm" in one for one in texts(found, "workers", "ok"))
    assert f"from here to {worker} (this host): arena" in texts(found, "transports", "ok")
    image, outcome = texts(found, "probe", "ok")
    assert image.startswith("an image adds ")
    assert outcome.startswith("outcome 'received'")


def test_workers_that_disagree_are_reported_by_everyone(stack: Stack) -> None:
    """Last: it leaves the deployment with a worker whose images are never found again."""
    other = stack.add_worker("--mm-hash-mode", "block_mm_infos")
    stack.wait_ready()
    first, second = (stack.instance_id(worker) for worker in stack.worker)

    status, found = doctor(stack)
    assert status == 1
    assert any(
        "disagree on mm_hash_mode" in one
        and f"{first} says pad_value" in one
        and f"{second} says block_mm_infos" in one
        for one in problems(found)
    )

    def ask(image: Any) -> Any:
        return stack.ask("ours", [part(data_uri(image)), "Describe it"])

    for _ in range(30):
        image = picture()
        seen = ask(image)
        if stack.worker[seen.worker] is other:
            break
    else:
        raise AssertionError("no image came to the second worker")
    front = stack.frontend["ours"]
    wait_for(
        lambda: "workers of one model disagree on mm_hash_mode" in front.log.read_text(),
        "the frontend says so in its log",
    )
    before = front.metrics()
    again = ask(image)
    sizes: dict[str, Any] = {"prompt_tokens": [again.answer.prompt_tokens], "block_size": BLOCK}
    with pytest.raises(AssertionError, match="the repeats overlapped in"):
        require_full_overlap(before, front.metrics(), **sizes)
    with pytest.raises(AssertionError, match="mean KV hit rate"):
        min_avg_kv_hit_rate(before, front.metrics(), **sizes, minimum=0.9)
