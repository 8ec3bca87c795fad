"""Ten scenarios through Dynamo's real frontends and two of our workers, of each engine.

Each runs on three frontends at once over the same workers: the vLLM processor with transfer by
shared memory, the vLLM processor with transfer off, and the Rust one, which has no transfer.
Every scenario has pictures of its own, so that nothing is cached that it did not put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.engines import ENGINES, SGLANG
from tests.pictures import PictureServer, data_uri, part, picture
from tests.stack import FrontendSpec, Seen, Stack

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FRONTENDS = {
    "vllm-shm": FrontendSpec("vllm", "shm"),
    "vllm-off": FrontendSpec("vllm", "off"),
    "rust": FrontendSpec("rust", "off"),
}

DESCRIBE = "Describe the image"


@pytest.fixture(scope="module", params=list(ENGINES))
def stack(
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Stack]:
    folder, engine = tmp_path_factory.mktemp("scenarios"), ENGINES[request.param]
    with Stack(tiny_model("qwen2_5_vl"), folder, FRONTENDS, workers=2, engine=engine) as stack:
        yield stack


@pytest.fixture(scope="module")
def server() -> Iterator[PictureServer]:
    with PictureServer() as server:
        yield server


@dataclass
class Door:
    """One frontend of the stack, and what is to be expected behind it."""

    stack: Stack = field(repr=False)
    name: str

    @property
    def transfers(self) -> bool:
        return self.name == "vllm-shm"

    @property
    def identity_is_content(self) -> bool:
        """The vLLM processor hashes pixels; the Rust frontend hashes the URL or URI as written."""
        return self.name != "rust"

    @property
    def loads_all_or_none(self) -> bool:
        """SGLang takes no raw images beside such as it was given before."""
        return self.stack.engine is SGLANG and not self.transfers

    def ask(self, *content: Any) -> Seen:
        """Images become data URIs, text follows at the end unless given."""
        parts = [part(data_uri(p)) if isinstance(p, Image.Image) else p for p in content]
        if not any(isinstance(p, str) for p in parts):
            parts.append(DESCRIBE)
        seen = self.stack.ask(self.name, parts)
        assert seen.answer.status == 200, seen.answer.body
        return seen

    def expect_new(self, seen: Seen, *, new: int, held: int = 0) -> None:
        """`new` items had to come from somewhere, `held` the worker had already."""
        outcome = "received" if self.transfers else "raw"
        if self.loads_all_or_none:
            new, held = new + held, 0
        assert seen.outcome == outcome
        assert seen.items == {outcome: new, **({"hit": held} if held else {})}
        assert seen.processed_images == (0 if self.transfers else new)
        assert bool(seen.received_bytes) is self.transfers
        # The worker's cache is what the router thought, not more and not less.
        assert seen.predicted_tokens == seen.answer.cached_tokens

    def expect_hit(self, seen: Seen, first: Seen, *, items: int) -> None:
        """Everything was cached: on the same worker, and nothing but a hash was moved."""
        assert seen.text == first.text
        assert seen.outcome == "hit"
        assert seen.items == {"hit": items}
        assert seen.worker == first.worker
        assert seen.processed_images == 0
        assert seen.received_bytes == 0
        assert seen.answer.cached_tokens == seen.answer.reusable_tokens > 0
        assert seen.predicted_tokens == seen.answer.cached_tokens


@pytest.fixture(params=list(FRONTENDS))
def door(stack: Stack, request: pytest.FixtureRequest) -> Door:
    return Door(stack, request.param)


def test_text_only_routing(door: Door) -> None:
    prompt = f"{door.name} says " + "one two three four five six seven eight " * 8
    first, again = door.ask(prompt), door.ask(prompt)
    assert (first.outcome, again.outcome) == ("text", "text")
    assert again.text == first.text
    assert again.worker == first.worker
    assert first.answer.cached_tokens == 0
    assert again.answer.cached_tokens == again.answer.reusable_tokens > 0
    assert again.predicted_tokens == again.answer.cached_tokens
    assert first.processed_images == again.processed_images == 0


def test_one_image_repeated(door: Door) -> None:
    image = picture()
    first = door.ask(image)
    door.expect_new(first, new=1)
    assert first.answer.cached_tokens == 0
    for _ in range(2):
        door.expect_hit(door.ask(image), first, items=1)


def test_two_different_images(door: Door) -> None:
    one, other = picture(), picture()
    first, second = door.ask(one), door.ask(other)
    door.expect_new(second, new=1)
    assert second.text != first.text
    assert second.answer.cached_tokens == 0
    door.expect_hit(door.ask(one), first, items=1)
    door.expect_hit(door.ask(other), second, items=1)


def test_several_images(door: Door) -> None:
    images = [picture(), picture(), picture()]
    first = door.ask(*images)
    door.expect_new(first, new=3)
    door.expect_hit(door.ask(*images), first, items=3)


def test_staircase(door: Door) -> None:
    images = [picture(), picture(), picture()]
    steps = []
    for count in (1, 2, 3):
        step = door.ask(*images[:count])
        door.expect_new(step, new=1, held=count - 1)
        # What is cached of the step before: its images, all but their incomplete last block.
        assert (step.answer.cached_tokens > 0) is (count > 1)
        steps.append(step)
    assert {step.worker for step in steps} == {steps[0].worker}
    assert len({step.text for step in steps}) == 3
    assert steps[0].answer.cached_tokens < steps[1].answer.cached_tokens
    assert steps[1].answer.cached_tokens < steps[2].answer.cached_tokens
    if door.transfers:
        assert {step.received_bytes for step in steps} == {steps[0].received_bytes}
    for count, step in enumerate(steps, start=1):
        door.expect_hit(door.ask(*images[:count]), step, items=count)


def test_swapped_order(door: Door) -> None:
    one, other = picture(), picture()
    first, swapped = door.ask(one, other), door.ask(other, one)
    assert swapped.text != first.text
    assert swapped.answer.cached_tokens == 0, "blocks of one order say nothing about the other"
    if swapped.worker == first.worker:  # both are equally good: neither has the prefix
        assert (swapped.outcome, swapped.received_bytes) == ("hit", 0)
    else:
        door.expect_new(swapped, new=2)
    door.expect_hit(door.ask(one, other), first, items=2)
    door.expect_hit(door.ask(other, one), swapped, items=2)


def test_http_url(door: Door, server: PictureServer) -> None:
    url = part(server.url(picture()))
    first = door.ask(url)
    door.expect_new(first, new=1)
    fetched = len(server.paths)
    door.expect_hit(door.ask(url), first, items=1)
    assert len(server.paths) == fetched, "neither side has to fetch it again"


def test_data_uri(door: Door) -> None:
    uri = data_uri(picture())
    first = door.ask(part(uri))
    door.expect_new(first, new=1)
    door.expect_hit(door.ask(part(uri)), first, items=1)

    other_uri = uri.replace("image/png", "image/x-png")
    same_picture = door.ask(part(other_uri))
    if door.identity_is_content:
        door.expect_hit(same_picture, first, items=1)
    else:
        door.expect_new(same_picture, new=1)
        assert same_picture.text == first.text


def test_http_and_data_uri_of_the_same_picture(door: Door, server: PictureServer) -> None:
    image = picture()
    url, uri = part(server.url(image)), part(data_uri(image))
    first, second = door.ask(url), door.ask(uri)
    assert second.text == first.text
    if door.identity_is_content:
        door.expect_hit(second, first, items=1)
    else:
        door.expect_new(second, new=1)
    both = door.ask(url, uri)
    assert both.answer.prompt_tokens > first.answer.prompt_tokens
    assert both.answer.cached_tokens >= door.stack.block


def test_partial_transfer(door: Door) -> None:
    """One of two images is known: in the frontend's cache, and in the worker's."""
    known, unknown = picture(), picture()
    first = door.ask(known)
    both = door.ask(known, unknown)
    assert both.worker == first.worker
    door.expect_new(both, new=1, held=1)
    assert both.received_bytes == first.received_bytes, "one image's bytes, not two's"
    door.expect_hit(door.ask(known, unknown), both, items=2)

    # The other way round the prefix says nothing, so either worker may get it.
    turned = door.ask(unknown, known)
    assert turned.text != both.text
