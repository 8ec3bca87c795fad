"""Our frontend: what it sends, to whom, and what it leaves in the request.

Worker 0 lives in a mount namespace with a ``/dev/shm`` of its own, as one in another container.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.apart import prefix_held_by, private_shm
from tests.counted_worker import PROCESSED, WITH_RAW
from tests.pictures import data_uri, part, picture, video, video_part
from tests.stack import BASE_ENV, ROOT, FrontendSpec, Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

OURS = "dynamo_worker_ext.frontend"
OUTCOMES = "dynamo_worker_ext_requests_total"


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    frontends = {
        "auto": FrontendSpec("vllm", "auto", module=OURS),
        "shm": FrontendSpec("vllm", "shm", module=OURS),
        "nixl": FrontendSpec("vllm", "nixl", module=OURS),
        "upstream-nixl": FrontendSpec("vllm", "nixl"),
        "off": FrontendSpec("vllm", "off", module=OURS),
        "rust": FrontendSpec("rust", "off"),
    }
    folder = tmp_path_factory.mktemp("frontend")
    stack = Stack(tiny_model("qwen2_5_vl"), folder, frontends, workers=0)
    stack.add_worker(wrap=private_shm("256m"))
    stack.add_worker()
    with stack:
        yield stack


@pytest.mark.parametrize(("worker", "transport"), [(0, "nixl"), (1, "arena")])
def test_each_worker_is_sent_what_it_can_read(stack: Stack, worker: int, transport: str) -> None:
    text, uri = prefix_held_by(stack, worker), part(data_uri(picture()))
    seen = stack.ask("auto", [text, uri])
    assert (seen.answer.status, seen.worker) == (200, worker)
    assert seen.workers[worker].by("outcome", OUTCOMES) == {"received": 1}
    assert seen.workers[worker].by("transport", OUTCOMES) == {transport: 1}
    assert seen.workers[worker].total("vllm" + PROCESSED) == 0
    # Every card says that it can read, so the picture is in the request once.
    assert seen.workers[worker].total("vllm" + WITH_RAW) == 0
    assert seen.answer.text == stack.ask("rust", [text, uri]).answer.text


@pytest.mark.parametrize("frontend", ["nixl", "upstream-nixl"])
def test_nixl_is_read_whoever_sends_it(stack: Stack, frontend: str) -> None:
    text, uri = prefix_held_by(stack, 1), part(data_uri(picture()))
    seen = stack.ask(frontend, [text, uri])
    assert seen.workers[1].by("transport", OUTCOMES) == {"nixl": 1}
    start = time.monotonic()
    again = stack.ask(frontend, [text, uri])
    # Upstream's sender offers it anew, and waits up to a minute to hear that it was read.
    assert time.monotonic() - start < 20
    assert again.workers[1].by("outcome", OUTCOMES) == {"hit": 1}
    assert seen.answer.text == again.answer.text == stack.ask("rust", [text, uri]).answer.text


def test_a_repeated_picture_moves_no_bytes(stack: Stack) -> None:
    text, uri = prefix_held_by(stack, 1), part(data_uri(picture()))
    assert stack.ask("auto", [text, uri]).workers[1].by("outcome", OUTCOMES) == {"received": 1}
    again = stack.ask("auto", [text, uri])
    assert again.workers[1].by("outcome", OUTCOMES) == {"hit": 1}
    assert again.workers[1].total("dynamo_worker_ext_mm_received_bytes_total") == 0


def test_a_transport_may_be_asked_for_by_name(stack: Stack) -> None:
    seen = stack.ask("shm", [prefix_held_by(stack, 1), part(data_uri(picture()))])
    assert seen.workers[1].by("transport", OUTCOMES) == {"shm": 1}


def test_a_picture_and_a_video_travel_together(stack: Stack) -> None:
    """Where upstream's sender gives up and has the worker process both."""
    content = [prefix_held_by(stack, 1), part(data_uri(picture())), video_part(video())]
    seen = stack.ask("auto", content)
    assert seen.workers[1].by("outcome", OUTCOMES) == {"received": 1}
    received = {"image": 1, "video": 1}
    assert seen.workers[1].by("modality", "dynamo_worker_ext_mm_items_total") == received
    assert seen.workers[1].total("vllm" + PROCESSED) == 0
    assert seen.answer.text == stack.ask("off", content).answer.text


def test_off_sends_nothing(stack: Stack) -> None:
    seen = stack.ask("off", [prefix_held_by(stack, 1), part(data_uri(picture()))])
    assert seen.workers[1].by("outcome", OUTCOMES) == {"raw": 1}


def test_segments_are_withdrawn(stack: Stack) -> None:
    stack.ask("shm", [prefix_held_by(stack, 1), part(data_uri(picture()))])
    prefix = f"dwe_{stack.frontend['shm'].pid}_"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def test_who_cannot_read_what_was_sent_still_has_the_raw_media(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """No error and no retry, where upstream's frontend sends nothing else to that worker."""
    frontends = {"shm": FrontendSpec("vllm", "shm", module=OURS)}
    one = Stack(tiny_model("qwen2_5_vl"), tmp_path / "s", frontends, workers=0)
    one.add_worker("--mm-transfer", "shm", wrap=private_shm("256m"))
    with one:
        seen = one.ask("shm", ["Describe", part(data_uri(picture()))])
        assert seen.answer.status == 200, seen.answer.body
        assert seen.workers[0].by("outcome", OUTCOMES) == {"reprocessed": 1}
        assert seen.workers[0].total("vllm" + WITH_RAW) == 1


@pytest.mark.parametrize("mode", ["rdma", ""])
def test_a_mode_that_does_not_exist_ends_the_start(mode: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", OURS, "--http-port", "1"],
        env={**os.environ, **BASE_ENV, "DYNAMO_MM_TRANSFER": mode or "x"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "is one of auto, arena, shm, nixl, off" in ended.stderr


def test_help_names_our_variable_and_upstreams_flags() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", OURS, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "DYNAMO_MM_TRANSFER" in shown
    assert "--router-mode" in shown
