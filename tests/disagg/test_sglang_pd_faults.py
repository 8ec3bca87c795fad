"""A prefill or decode worker that dies or is stopped: an error or an answer, and nothing hangs.

The tests build on each other: each ends a worker and starts the next in its place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.disagg.sglang_deployment import DECODE_ARGS, prefill_args
from tests.engines import SGLANG
from tests.pictures import data_uri, part, picture
from tests.stack import FrontendSpec, Process, Stack, Stream, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

#: Tokens that take seconds, but not as long as a drain may.
BUSY = 300
#: A random model that is greedy may have no text to say for thousands of tokens.
TALKING: dict[str, Any] = {"temperature": 1.0}


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder, model = tmp_path_factory.mktemp("faults"), tiny_model("qwen2_5_vl")
    with Stack(model, folder, {}, workers=0, engine=SGLANG, grace_s=5) as stack:
        stack.add_worker(*prefill_args())
        stack.add_worker(*DECODE_ARGS)
        stack.add_frontend("rust", FrontendSpec("rust", "off"))
        stack.wait_ready()
        yield stack
        log = stack.frontend["rust"].log.read_text(errors="replace")
    assert "incompatible" not in log.lower()


@pytest.fixture(scope="module")
def question(stack: Stack) -> tuple[Any, str]:
    """What is asked after each fault, and its answer before any."""
    content = [part(data_uri(picture())), "Describe the image"]
    return content, stack.chat("rust", content).text


def of_role(stack: Stack, role: str) -> Process:
    (worker,) = [worker for worker in stack.worker if worker.alive and worker.role == role]
    return worker


def idle(stack: Stack) -> None:
    """Nothing is in flight, at prefill and at decode; KV caches have all been taken."""
    wait_for(
        lambda: stack.total("dynamo_worker_ext_requests_in_flight") == 0, "nothing in flight", 60
    )


def load(stack: Stack, count: int = 4) -> list[Stream]:
    contents = [[part(data_uri(picture())), "Go on"] for _ in range(count)]
    return [stack.stream("rust", one, max_tokens=BUSY, **TALKING) for one in contents]


def replace(stack: Stack, gone: Process, *args: str) -> None:
    """Start another worker in the place of one that has ended."""
    wait_for(lambda: not gone.members(), "no process left behind", 30)
    assert not list(Path("/dev/shm").glob(f"sgl_shm_*_{gone.pid}_*"))
    stack.ended(gone)
    stack.add_worker(*args)
    stack.wait_ready()


def kill_engine(worker: Process) -> None:
    (scheduler,) = [
        pid for pid, name in worker.members().items() if name.startswith("sglang::schedul")
    ]
    os.kill(scheduler, signal.SIGKILL)


def test_prefill_dies_under_load(stack: Stack, question: tuple[Any, str]) -> None:
    content, answer = question
    victim = of_role(stack, "prefill")
    instance = stack.instance_id(victim)
    running = [one.wait_begun() for one in load(stack, 2)]
    waiting = load(stack, 3)
    kill_engine(victim)
    assert victim.wait(60) == 1
    assert not stack.is_discovered(instance)
    for one in running:  # decode has all that it needs
        assert (one.wait_ended().status, one.error) == (200, None)
    for one in waiting:  # an error or an answer, whichever was first
        one.wait_ended()
        assert one.status == 200 or one.status >= 500, (one.status, one.error)
        assert one.error is None or not one.text
    refused = stack.chat("rust", content)
    assert refused.status == 503, refused.body
    replace(stack, victim, *prefill_args())
    assert stack.chat("rust", content).text == answer
    idle(stack)


def test_decode_dies_under_load(stack: Stack, question: tuple[Any, str]) -> None:
    content, answer = question
    victim = of_role(stack, "decode")
    streams = [one.wait_begun() for one in load(stack, 3)]
    kill_engine(victim)
    assert victim.wait(60) == 1
    for one in streams:
        assert one.wait_ended().error is not None
    replace(stack, victim, *DECODE_ARGS)
    assert stack.chat("rust", content).text == answer
    idle(stack)


def test_sigterm_of_decode_under_load(stack: Stack, question: tuple[Any, str]) -> None:
    content, answer = question
    leaving = of_role(stack, "decode")
    streams = [one.wait_begun() for one in load(stack, 3)]
    leaving.signal(signal.SIGTERM)
    for one in streams:
        assert (one.wait_ended().status, one.error) == (200, None)
    assert leaving.wait(90) == 0
    replace(stack, leaving, *DECODE_ARGS)
    assert stack.chat("rust", content).text == answer
    idle(stack)


def test_sigterm_of_prefill_under_load(stack: Stack, question: tuple[Any, str]) -> None:
    """It leaves when what it has begun was taken, and not before."""
    content, answer = question
    leaving = of_role(stack, "prefill")
    streams = load(stack, 4)
    in_flight = "dynamo_worker_ext_requests_in_flight"
    wait_for(lambda: leaving.metrics().total(in_flight) > 0, "prefill has begun", 30)
    leaving.signal(signal.SIGTERM)
    for one in streams:
        one.wait_ended()
        assert one.status in (200, 503), (one.status, one.error)
        assert one.status == 503 or one.error is None
    assert any(one.status == 200 for one in streams)
    assert leaving.wait(90) == 0
    replace(stack, leaving, *prefill_args())
    assert stack.chat("rust", content).text == answer
    idle(stack)
