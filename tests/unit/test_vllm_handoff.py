"""What a prefill worker knows of its items, and what decode makes of it, on vLLM's own types."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from dynamo_worker_ext.errors import (
    CacheMissError,
    HandoffError,
    InvalidTransferError,
    StrayPlaceholderError,
    UnsupportedOptionError,
)
from dynamo_worker_ext.vllm import handoff, scheduler
from dynamo_worker_ext.vllm.handoff import ItemFacts, engine_input
from dynamo_worker_ext.vllm.reference import FieldReference, ItemReference
from dynamo_worker_ext.vllm.stats import Snapshots
from dynamo_worker_ext.wire import Fact, HandedItem, Handoff, Placeholder

HASH = "cd" * 32
GRID = Fact("int64", (3,), (1, 4, 4))
REFERENCE = ItemReference(
    {
        "pixel_values": FieldReference("flat", torch.float32, (None, 8)),
        "image_grid_thw": FieldReference("batched", torch.int64, (3,)),
    },
    merge=2,
)


class Media:
    """Stands for the engine's side of media: what it holds, and what it was told to forget."""

    media_tokens = frozenset({9})

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.forgotten: list[str] = []

    def holds(self, mm_hash: str) -> bool:
        return mm_hash in self.held

    async def forget(self, mm_hashes: list[str]) -> None:
        self.forgotten += mm_hashes

    def check_facts(self, modality: str, facts: Any, where: Placeholder) -> Any:
        if modality != "image":
            raise InvalidTransferError("no such modality", reason="invalid_type")
        return REFERENCE.check_facts(facts, where)


@pytest.fixture
def media() -> Any:
    return Media()


def processed() -> MultiModalKwargsItem:
    flat = MultiModalFlatField(slices=[slice(0, 16)], dim=0)
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=torch.zeros(16, 8), field=flat),
            "image_grid_thw": MultiModalFieldElem(
                data=torch.tensor([1, 4, 4]), field=MultiModalBatchedField()
            ),
        }
    )


def prompt(item: MultiModalKwargsItem | None, mm_hash: str = HASH, tail: int = 3) -> dict[str, Any]:
    return {
        "prompt_token_ids": [1, 9, 9, 9, 9] + [2] * tail,
        "mm_kwargs": {"image": [item]},
        "mm_hashes": {"image": [mm_hash]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=1, length=4)]},
    }


async def test_facts_are_the_small_fields_and_outlive_the_data(media: Any) -> None:
    facts = ItemFacts(media)
    expected = (HandedItem("image", HASH, Placeholder(1, 4), {"image_grid_thw": GRID}),)
    assert await facts.of(prompt(processed())) == expected
    assert await facts.of(prompt(None)) == expected
    assert await facts.of({"prompt_token_ids": [1]}) == ()


async def test_an_item_that_nothing_is_known_of_is_sent_again(media: Any) -> None:
    with pytest.raises(CacheMissError):
        await ItemFacts(media).of(prompt(None))
    assert media.forgotten == [HASH]


async def test_a_prompt_that_ends_in_media_is_refused(media: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match="text after it"):
        await ItemFacts(media).of(prompt(processed(), tail=0))


async def test_facts_are_kept_as_long_as_the_engine_keeps_the_item(
    media: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "_FIRST_PRUNE", 4)
    facts = ItemFacts(media)
    hashes = [f"{i:064x}" for i in range(4)]
    media.held = set(hashes[:2])
    for mm_hash in hashes:
        await facts.of(prompt(processed(), mm_hash))
    assert await facts.of(prompt(None, hashes[0]))
    with pytest.raises(CacheMissError):
        await facts.of(prompt(None, hashes[3]))


def handed(**changes: Any) -> Handoff:
    item = {"modality": "image", "mm_hash": HASH, "placeholder": Placeholder(1, 4)}
    facts = {"facts": {"image_grid_thw": GRID, "of another release": GRID}}
    return Handoff([1, 9, 9, 9, 9, 2], (HandedItem(**{**item, **facts, **changes}),), None, 32)


def test_decodes_engine_gets_the_facts_alone(media: Any) -> None:
    result = engine_input(handed(), media)
    (item,) = result["mm_kwargs"]["image"]
    assert list(item) == ["image_grid_thw"]
    assert item["image_grid_thw"].data.tolist() == [1, 4, 4]
    # vLLM 0.31.0 drops other fields of items whose KV is there.
    assert item["image_grid_thw"].field.keep_on_cpu
    assert result["mm_hashes"] == {"image": [HASH]}
    (where,) = result["mm_placeholders"]["image"]
    assert (where.offset, where.length) == (1, 4)


def test_text_has_no_media(media: Any) -> None:
    result = engine_input(Handoff([1, 2, 3], (), None, 32), media)
    assert (result["type"], result["prompt_token_ids"]) == ("token", [1, 2, 3])
    assert "mm_kwargs" not in result


def test_a_media_token_without_its_item_is_refused(media: Any) -> None:
    with pytest.raises(StrayPlaceholderError):
        engine_input(Handoff([1, 9, 2], (), None, 32), media)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {}},
        {"facts": {"image_grid_thw": Fact("int32", (3,), (1, 4, 4))}},
        {"facts": {"image_grid_thw": Fact("int64", (2,), (4, 4))}},
        {"facts": {"image_grid_thw": Fact("int64", (3,), (1, 4, 8))}},
        {"facts": {"image_grid_thw": Fact("int64", (3,), (1, -4, -4))}},
        {"placeholder": Placeholder(1, 4, (True, True, True, False))},
        {"modality": "audio"},
    ],
    ids=str,
)
def test_facts_that_would_end_the_engine(changes: dict[str, Any], media: Any) -> None:
    with pytest.raises(HandoffError, match="does not fit this model") as caught:
        engine_input(handed(**changes), media)
    assert caught.value.reason == "invalid"


@pytest.mark.parametrize(
    ("asynchronous", "chosen"), [(True, "AsyncDecodeScheduler"), (False, "DecodeScheduler")]
)
def test_a_decode_engine_schedules_no_media(asynchronous: bool, chosen: str) -> None:
    config: Any = SimpleNamespace(scheduler_cls=None, async_scheduling=asynchronous)
    scheduler.have_no_media(config)
    assert config.scheduler_cls == f"dynamo_worker_ext.vllm.scheduler.{chosen}"
    with pytest.raises(ValueError, match="--scheduler-cls"):
        scheduler.have_no_media(config)


# Whether prefill is there.


async def test_a_prefill_worker_that_greets_is_there() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff")

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await handoff.check_source({"remote_host": "127.0.0.1", "remote_port": port})


@pytest.mark.parametrize("says", ["nothing", "end", "no listener"])
async def test_a_prefill_worker_that_says_nothing_is_gone(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its connections are accepted, as they are while a killed process is torn down."""
    monkeypatch.setattr(handoff, "_ANSWER_S", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if says == "nothing":
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if says == "no listener":
        server.close()
    with pytest.raises(HandoffError, match="is gone") as caught:
        await handoff.check_source({"remote_host": "127.0.0.1", "remote_port": port})
    assert caught.value.reason == "kv"
    server.close()


def test_only_waiting_for_kv_counts_as_waiting_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, now = Snapshots(), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def step(seconds: float, *, running: int = 0, deferred: int = 0, used: float = 0.1) -> float:
        nonlocal now
        now += seconds
        stats = SimpleNamespace(
            kv_cache_usage=used,
            num_running_reqs=running,
            num_skipped_waiting_reqs=deferred,
        )
        snapshots.note(0, stats)
        return snapshots.waited_s

    assert step(1) == 0
    assert step(5, deferred=1) == 0
    assert step(5, deferred=1) == 5
    assert step(5, used=0.0) == 5  # the client has given up
    assert step(1000, deferred=1) == 5  # the next one comes
    assert step(2, deferred=2) == 7
    assert step(1, running=1, deferred=2) == 0  # its KV is here
    assert step(9, deferred=1) == 0
    assert step(9, deferred=1) == 9
    assert step(1, running=1) == 0
    assert step(9, deferred=1, used=0.0) == 0
    assert step(9, deferred=1, used=0.0) == 0  # a grammar takes its time
