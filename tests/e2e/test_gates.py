"""Each gate passes on a sound deployment, and fails on one that was broken on purpose."""

from __future__ import annotations

import re
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
    min_avg_kv_hit_rate,
    require_full_overlap,
    require_mm_routing_init,
    require_transfer_outcome,
)
from tests.pictures import PictureServer, data_uri, part, picture
from tests.snapshot import Snapshot
from tests.stack import BLOCK, FrontendSpec, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FRONTENDS = {"vllm-shm": FrontendSpec("vllm", "shm"), "rust": FrontendSpec("rust", "off")}


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


@pytest.fixture(scope="module")
def deployment(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("gates")
    switch = folder / "broken"
    stack = Stack(
        tiny_model("qwen2_5_vl"),
        folder,
        FRONTENDS,
        workers=1,
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
    workers = deployment.workers()
    before, after, prompt_tokens = deployment.repeat(frontend)
    sizes = {"prompt_tokens": prompt_tokens, "block_size": BLOCK}
    require_full_overlap(before, after, **sizes)
    assert min_avg_kv_hit_rate(before, after, **sizes, minimum=0.9) == pytest.approx(1)
    new = "received" if frontend == "vllm-shm" else "raw"
    require_transfer_outcome(workers, deployment.workers(), {new: 4, "hit": 4})


@pytest.mark.parametrize("broken", BREAKS, indirect=True)
@pytest.mark.parametrize("frontend", list(FRONTENDS))
def test_a_broken_normaliser_is_noticed(
    deployment: Deployment, frontend: str, broken: None
) -> None:
    before, after, prompt_tokens = deployment.repeat(frontend)
    sizes: dict[str, Any] = {"prompt_tokens": prompt_tokens, "block_size": BLOCK}
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
        url = part(server.url(picture()))
        assert deployment.stack.chat("rust", [url, "Describe it"]).status == 200
    with pytest.raises(AssertionError, match="routes by text prefix"):
        require_mm_routing_init(front.metrics(), front.log.read_text(), workers=1)


@pytest.mark.parametrize("how", BREAKS[:1])
def test_a_worker_does_not_start_with_a_broken_normaliser(deployment: Deployment, how: str) -> None:
    """It would advertise an identity that its events do not carry. Ends the deployment."""
    stack = deployment.stack
    stack.stop()
    deployment.switch.write_text(how)
    refused = stack.add_worker()
    try:
        assert refused.wait(120) == 2
        assert "does not identify media as pad_value" in refused.tail()
        wait_for(lambda: not refused.members(), "no process left behind", 15)
    finally:
        refused.end(0)
