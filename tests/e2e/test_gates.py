"""Each gate passes on a sound deployment, and fails on one that was broken on purpose."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.broken_worker import BREAKS
from tests.e2e.gates import (
    ROUTING_LOG,
    min_avg_kv_hit_rate,
    min_routing_total_blocks,
    require_full_overlap,
    require_mm_routing_init,
    require_transfer_outcome,
)
from tests.engines import SGLANG, VLLM
from tests.pictures import PictureServer, data_uri, part, picture
from tests.snapshot import Snapshot
from tests.stack import FrontendSpec, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FRONTENDS = {
    "vllm-shm": FrontendSpec("vllm", "shm", log=ROUTING_LOG),
    "rust": FrontendSpec("rust", "off", log=ROUTING_LOG),
}


@dataclass
class Deployment:
    """One worker behind two frontends, and the switch that breaks its normaliser."""

    stack: Stack
    switch: Path

    @property
    def is_silent(self) -> bool:
        return self.switch.exists() and self.switch.read_text() == "silent"

    def workers(self) -> list[Snapshot]:
        return [worker.metrics() for worker in self.stack.worker]

    def send(self, frontend: str, images: Sequence[Image.Image]) -> list[int]:
        """Ask about each picture; the length of each prompt."""
        answers = []
        for image in images:
            answers.append(self.stack.chat(frontend, [part(data_uri(image)), "Describe it"]))
            assert answers[-1].status == 200, answers[-1].body
        return [answer.prompt_tokens for answer in answers]

    def told(self) -> float:
        return self.stack.total("dynamo_worker_ext_kv_events_total", kind="stored")

    def repeat(self, frontend: str) -> tuple[Snapshot, Snapshot, list[int]]:
        """Send pictures, and again: the frontend's metrics around the repeats."""
        images = [picture(size=size) for size in (168, 224, 280, 336)]
        front = self.stack.frontend[frontend]
        # Each picture's blocks are an event, unless the worker was made to say nothing of them.
        least = self.told() + (0 if self.is_silent else len(images))
        self.send(frontend, images)

        def known() -> bool:
            applied = "dynamo_component_kv_cache_events_applied_total"
            told = self.told()
            return least <= told == front.metrics().total(applied, event_type="stored")

        wait_for(known, "the router knows what the worker has said")
        before = front.metrics()
        prompt_tokens = self.send(frontend, images)
        return before, front.metrics(), prompt_tokens


#: Engine and tokens of a block.
BACKENDS = {"vllm": (VLLM, 32), "sglang-1": (SGLANG, 1), "sglang-16": (SGLANG, 16)}


@pytest.fixture(scope="module", params=list(BACKENDS))
def deployment(
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Deployment]:
    engine, block = BACKENDS[request.param]
    folder = tmp_path_factory.mktemp("gates")
    switch = folder / "broken"
    stack = Stack(
        tiny_model("qwen2_5_vl"),
        folder,
        FRONTENDS,
        workers=1,
        engine=engine,
        block=block,
        module="tests.broken_worker",
        worker_env={"BROKEN_NORMALIZER": str(switch)},
    )
    with stack:
        yield Deployment(stack, switch)


@pytest.fixture
def broken(deployment: Deployment, request: pytest.FixtureRequest) -> Iterator[None]:
    deployment.switch.write_text(request.param)
    yield
    deployment.switch.unlink()


@pytest.mark.parametrize("frontend", list(FRONTENDS))
def test_a_sound_deployment_passes(deployment: Deployment, frontend: str) -> None:
    front = deployment.stack.frontend[frontend]
    require_mm_routing_init(front.metrics(), front.log.read_text(), workers=1)
    workers, logged = deployment.workers(), len(front.log.read_text())
    before, after, prompt_tokens = deployment.repeat(frontend)
    sizes = {"prompt_tokens": prompt_tokens, "block_size": deployment.stack.block}
    require_full_overlap(before, after, **sizes)
    assert min_avg_kv_hit_rate(before, after, **sizes, minimum=0.9) == pytest.approx(1)
    totals = min_routing_total_blocks(front.log.read_text()[logged:], minimum=2)
    assert totals == [-(-tokens // deployment.stack.block) for tokens in prompt_tokens] * 2
    new = "received" if frontend == "vllm-shm" else "raw"
    require_transfer_outcome(workers, deployment.workers(), {new: 4, "hit": 4})


@pytest.mark.parametrize("broken", BREAKS, indirect=True)
@pytest.mark.parametrize("frontend", list(FRONTENDS))
def test_a_broken_normaliser_is_noticed(
    deployment: Deployment, frontend: str, broken: None
) -> None:
    before, after, prompt_tokens = deployment.repeat(frontend)
    sizes: dict[str, Any] = {"prompt_tokens": prompt_tokens, "block_size": deployment.stack.block}
    with pytest.raises(AssertionError, match="the repeats overlapped in"):
        require_full_overlap(before, after, **sizes)
    with pytest.raises(AssertionError, match="mean KV hit rate"):
        min_avg_kv_hit_rate(before, after, **sizes, minimum=0.9)


def test_a_transfer_that_did_not_happen_is_noticed(deployment: Deployment) -> None:
    workers = deployment.workers()
    deployment.send("rust", [picture()])
    with pytest.raises(AssertionError, match=re.escape("{'raw': 1.0}, want {'received': 1}")):
        require_transfer_outcome(workers, deployment.workers(), {"received": 1})


def test_missing_workers_and_events_are_noticed(deployment: Deployment) -> None:
    front = deployment.stack.frontend["rust"]
    with pytest.raises(AssertionError, match="1 of 2 workers are registered"):
        require_mm_routing_init(front.metrics(), front.log.read_text(), workers=2)


def test_a_frontend_that_never_began_to_route_by_pictures_is_noticed(
    deployment: Deployment,
) -> None:
    stack = deployment.stack
    process = stack.add_frontend("round-robin", FrontendSpec("rust", "off", mode="round-robin"))
    wait_for(lambda: stack.served_name in process.get("/v1/models")[1], "the model is listed")
    assert stack.chat("round-robin", [part(data_uri(picture())), "Describe it"]).status == 200
    with pytest.raises(AssertionError, match="0 of 1 workers are registered"):
        require_mm_routing_init(process.metrics(), process.log.read_text(), workers=1)


def test_a_frontend_that_fell_back_to_text_is_noticed(deployment: Deployment) -> None:
    """Last on this frontend: its log keeps the line."""
    front = deployment.stack.frontend["rust"]
    require_mm_routing_init(front.metrics(), front.log.read_text(), workers=1)
    with PictureServer(ranges=False) as server:
        logged = len(front.log.read_text())
        url = part(server.url(picture()))
        answer = deployment.stack.chat("rust", [url, "Describe it"])
        assert answer.status == 200
    said = front.log.read_text()[logged:]
    with pytest.raises(AssertionError, match="it does not know what images become"):
        min_routing_total_blocks(said, minimum=answer.prompt_tokens // deployment.stack.block)
    with pytest.raises(AssertionError, match="does not say what it routed"):
        min_routing_total_blocks("", minimum=1)
    with pytest.raises(AssertionError, match="routes by text prefix"):
        require_mm_routing_init(front.metrics(), front.log.read_text(), workers=1)


@pytest.mark.parametrize("how", BREAKS[:1])
def test_a_broken_normaliser_is_noticed_at_the_start(deployment: Deployment, how: str) -> None:
    """It would advertise an identity that its events do not carry. Ends the deployment."""
    stack = deployment.stack
    stack.stop()
    deployment.switch.write_text(how)
    refused = stack.add_worker()
    if stack.engine is SGLANG:  # which serves on, and says so
        try:
            wait_for(lambda: refused.get("/health")[0] == 200, "it serves", 180)
            assert "text_prefix routing of media" in refused.log.read_text()
        finally:
            refused.signal(signal.SIGTERM)
            refused.end(time.monotonic() + 60)
        return
    try:
        assert refused.wait(120) == 2
        assert "does not identify media as pad_value" in refused.tail()
        wait_for(lambda: not refused.members(), "no process left behind", 15)
    finally:
        refused.end(0)


def test_one_worker_that_cannot_say_what_it_has_is_noticed(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """It serves as well as the other one, and images sent to it are cold for ever."""
    frontends = {"rust": FrontendSpec("rust", "off")}
    with Stack(tiny_model("qwen2_5_vl"), tmp_path / "stack", frontends, workers=1) as stack:
        front = stack.frontend["rust"]
        require_mm_routing_init(front.metrics(), front.log.read_text(), workers=1)
        mute = stack.add_worker("--no-enable-prefix-caching")
        wait_for(lambda: mute.get("/health")[0] == 200, "it serves", 180)
        registered = "dynamo_component_router_worker_registered"
        wait_for(lambda: front.metrics().total(registered) == 2, "both are registered")
        with pytest.raises(AssertionError, match="1 of 2 workers send KV events"):
            require_mm_routing_init(front.metrics(), front.log.read_text(), workers=2)
