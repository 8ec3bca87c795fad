"""Pre-processed media through a real SGLang worker: what it answers, and what it does not do."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.counted_worker import HASHED, POSITIONED, PROCESSED
from tests.direct import DirectClient, FrontendDouble, Rendered, Reply, Segments, request
from tests.engines import SGLANG
from tests.pictures import picture
from tests.snapshot import Snapshot
from tests.stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_OUTCOMES = "dynamo_worker_ext_requests_total"


@dataclass
class Seen:
    """A worker's answer, and what its metrics rose by."""

    reply: Reply
    change: Snapshot

    @property
    def tokens(self) -> list[int]:
        assert self.reply.error is None, self.reply.error
        return self.reply.tokens

    @property
    def outcome(self) -> str:
        (outcome,) = self.change.by("outcome", _OUTCOMES)
        return outcome

    @property
    def processed(self) -> float:
        """Images that the Hugging Face processor was given."""
        return self.change.total("sglang" + PROCESSED)

    @property
    def read_bytes(self) -> float:
        return self.change.total("dynamo_worker_ext_mm_received_bytes_total")


@dataclass
class Worker:
    """One worker of one family, and a frontend double for it."""

    family: str
    stack: Stack
    client: DirectClient
    front: FrontendDouble
    segments: Segments

    def send(self, body: Mapping[str, Any]) -> Seen:
        worker = self.stack.worker[0]
        before = worker.metrics()
        reply = self.client.send(body, self.stack.instance_id(worker))
        return Seen(reply, worker.metrics() - before)

    def transfer(self, rendered: Rendered, salt: str, **more: Any) -> Seen:
        shm = [self.segments.put(item.payload) for item in rendered.items]
        return self.send(salted(request(rendered, shm=shm, **more), salt))

    def raw(self, rendered: Rendered, salt: str, **more: Any) -> Seen:
        return self.send(salted(request(rendered, raw=True, **more), salt))


def salted(body: dict[str, Any], salt: str) -> dict[str, Any]:
    """With a salt, nothing that another request left cached is reused."""
    body["extra_args"]["nvext"] = {"cache_salt": salt}
    return body


@pytest.fixture(scope="module", params=FAMILIES)
def worker(
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Worker]:
    family = request.param
    model, folder = tiny_model(family), tmp_path_factory.mktemp(family)
    with ExitStack() as held:
        front = FrontendDouble(model)
        held.callback(front.close)
        stack = held.enter_context(Stack(model, folder, {}, workers=1, engine=SGLANG, block=1))
        client = held.enter_context(DirectClient(stack.env, folder / "client.log"))
        segments = held.enter_context(Segments())
        yield Worker(family, stack, client, front, segments)


def test_it_answers_as_from_raw_media_without_processing(worker: Worker) -> None:
    rendered = worker.front.render([picture()])
    raw = worker.raw(rendered, "raw")
    assert (raw.outcome, raw.processed) == ("raw", 1)
    assert raw.change.total(POSITIONED) == 1
    moved = worker.transfer(rendered, "moved")
    assert (moved.outcome, moved.processed) == ("received", 0)
    assert moved.read_bytes == len(rendered.items[0].payload)
    assert moved.tokens == raw.tokens
    assert len(moved.tokens) == 8
    # All of the prompt was computed: the answer is not what the first one left cached.
    assert moved.reply.cached_tokens == raw.reply.cached_tokens == 0
    assert moved.change.total(HASHED) == 0, "the frontend has hashed it"
    assert moved.change.total(POSITIONED) == 0


def test_a_repeat_is_neither_read_nor_processed(worker: Worker) -> None:
    rendered = worker.front.render([picture()])
    for first in (worker.transfer, worker.raw):
        salt = secrets.token_hex(4)
        new = first(rendered, salt)
        assert new.outcome != "hit"
        for again in (worker.transfer, worker.raw):
            seen = again(rendered, salt)
            assert (seen.outcome, seen.processed, seen.read_bytes) == ("hit", 0, 0)
            assert seen.tokens == new.tokens
            assert seen.reply.cached_tokens == len(rendered.expanded) - 1


def test_several_images_keep_their_order(worker: Worker) -> None:
    one, other = picture(size=168), picture(size=224)
    both, turned = worker.front.render([one, other]), worker.front.render([other, one])
    for rendered in (both, turned):
        salt = secrets.token_hex(4)
        moved = worker.transfer(rendered, salt)
        assert (moved.outcome, moved.processed) == ("received", 0)
        assert moved.change.total(HASHED) == 0
        assert moved.tokens == worker.raw(rendered, salt + "raw").tokens
        assert worker.transfer(rendered, salt).outcome == "hit"


def test_the_cache_is_kept_apart_by_salt(worker: Worker) -> None:
    rendered = worker.front.render([picture()])
    assert worker.transfer(rendered, "mine").outcome == "received"
    assert worker.transfer(rendered, "mine").outcome == "hit"
    assert worker.transfer(rendered, "theirs").outcome == "received"


def test_a_64_character_hash_is_cut(worker: Worker) -> None:
    """Two images whose hashes differ behind the first 16 characters only are one to SGLang."""
    first, second = (worker.front.render([picture()]) for _ in range(2))
    prefix = secrets.token_hex(8)
    assert worker.transfer(first.named([prefix + "0" * 48]), "cut").outcome == "received"
    again = worker.transfer(second.named([prefix + "f" * 48]), "cut")
    assert again.outcome == "hit"
    # And two that differ within them are two: 0.5.21 looks at the low 30 bits of what it is given.
    low = secrets.token_hex(24)
    one = worker.transfer(first.named([secrets.token_hex(8) + low]), "low")
    other = worker.transfer(second.named([secrets.token_hex(8) + low]), "low")
    assert other.reply.cached_tokens < len(second.expanded) - 1
    assert (one.outcome, other.outcome) == ("received", "received")


def _as_video(worker: Worker, rendered: Rendered) -> dict[str, Any]:
    body = request(rendered, shm=[])
    extra = body["extra_args"]
    for name in ("mm_hashes_by_modality", "mm_placeholders_by_modality"):
        extra[name] = {"video": extra[name]["image"]}
    extra["mm_kwargs_shm"] = {
        "modality": "video",
        "items": [worker.segments.put(rendered.items[0].payload)],
        "mm_hashes": rendered.hashes,
    }
    return body


def test_a_video_is_taken_as_it_was_processed(worker: Worker) -> None:
    frames = np.random.default_rng(7).integers(0, 255, (4, 112, 112, 3), dtype=np.uint8)
    rendered = worker.front.render_video(frames)
    body = salted(_as_video(worker, rendered), "video")
    first = worker.send(body)
    assert (first.outcome, len(first.tokens)) == ("received", 8)
    assert first.change.total(HASHED) == 0
    again = worker.send(copy.deepcopy(body))
    assert again.outcome == "hit"
    assert again.tokens == first.tokens
    assert again.reply.cached_tokens == len(rendered.expanded) - 1


@pytest.mark.parametrize("spoil", ["grid", "pixels", "field", "room", "token"])
def test_what_does_not_fit_never_reaches_the_engine(worker: Worker, spoil: str) -> None:
    from dynamo_worker_ext.transfer import codec
    from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem

    rendered = worker.front.render([picture(size=112)]).renamed()
    item = rendered.items[0]
    fields = dict(codec.decode(memoryview(bytearray(item.payload))).fields)
    pixels, grid = fields["pixel_values"], fields["image_grid_thw"]
    if spoil == "grid":
        fields["image_grid_thw"] = KwargsField(grid.data * 2, grid.kind, grid.options)
    elif spoil == "pixels":
        fields["pixel_values"] = KwargsField(pixels.data[:-1], pixels.kind, pixels.options)
    elif spoil == "field":
        fields["extra"] = fields["pixel_values"]
    placeholder = [item.placeholder[0], item.placeholder[1] - (spoil == "room")]
    payload = b"".join(bytes(piece) for piece in codec.encode(KwargsItem(fields)))
    bad = replace(item, payload=payload, placeholder=placeholder)
    expanded = list(rendered.expanded)
    if spoil == "token":
        expanded[item.placeholder[0] + 1] = rendered.token_ids[0]
    spoiled = replace(rendered, items=(bad,), expanded=expanded)
    seen = worker.transfer(spoiled, "bad")
    assert seen.outcome == "lost"
    reason = "invalid_placeholder" if spoil == "token" else "invalid_type"
    assert reason in str(seen.reply.error)
    # With raw media beside it the answer is that of the picture.
    seen = worker.transfer(spoiled, "bad", raw=True)
    assert (seen.outcome, seen.processed) == ("reprocessed", 1)
    assert seen.tokens == worker.raw(rendered, "good").tokens


def test_what_is_cached_stands_only_where_it_fits(worker: Worker) -> None:
    """A known hash with another placeholder is read anew, and refused by what then comes."""
    rendered = worker.front.render([picture(size=112)])
    assert worker.transfer(rendered, "known").outcome == "received"
    (first, length), item = rendered.items[0].placeholder, rendered.items[0]
    shorter = replace(
        rendered,
        expanded=rendered.expanded[:first] + rendered.expanded[first + 1 :],
        items=(replace(item, placeholder=[first, length - 1]),),
    )
    seen = worker.transfer(shorter, "known")
    assert seen.outcome == "lost"
    assert "has room for" in str(seen.reply.error)
    assert worker.transfer(rendered, "known").outcome == "hit"


def test_an_identity_is_of_one_modality(worker: Worker) -> None:
    """SGLang's scheduler would end where an image and a video of one identity meet in a batch."""
    rendered = worker.front.render([picture(size=112)]).renamed()
    assert worker.transfer(rendered, "image").outcome == "received"
    frames = np.random.default_rng(8).integers(0, 255, (4, 112, 112, 3), dtype=np.uint8)
    video = worker.front.render_video(frames).named([rendered.hashes[0][:16] + "0" * 48])
    body = salted(_as_video(worker, video), "another")
    seen = worker.send(body)
    assert seen.outcome == "lost"
    assert "invalid_hash" in str(seen.reply.error)
    assert worker.transfer(rendered, "image").outcome == "hit"


def test_two_pictures_that_meet_are_refused(worker: Worker) -> None:
    """SGLang finds media by runs of tokens; two without a word between them would be one."""
    both = worker.front.render([picture(size=112), picture(size=112)]).renamed()
    (a, m), (b, n) = (item.placeholder for item in both.items)
    expanded = both.expanded[: a + m] + both.expanded[b : b + n] + both.expanded[b + n :]
    items = (both.items[0], replace(both.items[1], placeholder=[a + m, n]))
    seen = worker.transfer(replace(both, expanded=expanded, items=items), "meet")
    assert seen.outcome == "lost"
    assert "SGLang takes them for one" in str(seen.reply.error)


def test_options_of_the_model_s_processor_are_refused(worker: Worker) -> None:
    body = request(worker.front.render([picture(size=112)]), raw=True)
    body["mm_processor_kwargs"] = {"max_pixels": 3136}
    assert "mm_processor_kwargs cannot be honoured" in str(worker.send(body).reply.error)


def test_pictures_without_placeholders_and_the_reverse_are_refused(worker: Worker) -> None:
    rendered = worker.front.render([picture(size=112)])
    body = request(rendered)
    del body["extra_args"]["expanded_token_ids"]
    assert "stand for media" in str(worker.send(body).reply.error)
    body = request(rendered, raw=True)
    image_token = rendered.expanded[rendered.items[0].placeholder[0]]
    body["token_ids"] = [t for t in body["token_ids"] if t != image_token]
    assert "0 placeholder(s)" in str(worker.send(body).reply.error)
    too_many = worker.front.render([picture(size=112)] * 4)
    assert "at most 3" in str(worker.raw(too_many, "many").reply.error)
