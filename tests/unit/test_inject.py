"""vLLM's side of injection: prompt updates rebuilt from the two prompts, and the cache on a
renderer of a few lines (the real one is in tests/vllm)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import CacheMissError, StrayPlaceholderError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.vllm.inject import VllmMedia, media_token_ids
from dynamo_worker_ext.vllm.prompts import prompt_updates

PAD, START, END = 90, 91, 92
A, B = "a" * 64, "b" * 64


def item(mm_hash: str, offset: int, length: int, **more: Any) -> wire.MediaItem:
    return wire.MediaItem(
        more.pop("modality", "image"), mm_hash, wire.Placeholder(offset, length, **more)
    )


def transfer(expanded: list[int], *items: wire.MediaItem) -> wire.Transfer:
    return wire.Transfer(expanded, items, {"shm": {}})


# Prompt updates.


def test_one_placeholder_becomes_its_token_and_what_it_grew_to() -> None:
    (update,) = prompt_updates([1, START, PAD, END, 2], transfer(
        [1, START, PAD, PAD, PAD, END, 2], item(A, 2, 3)
    )) or [None]  # fmt: skip
    assert update is not None
    assert update.target == [PAD]
    assert update.content.full == [PAD, PAD, PAD]
    assert update.content.is_embed is None
    assert (update.modality, update.item_idx) == ("image", 0)


def test_several_placeholders_keep_their_own_lengths_and_the_senders_order() -> None:
    expanded = [PAD, PAD, 5, PAD, 6]
    updates = prompt_updates([PAD, 5, PAD, 6], transfer(expanded, item(B, 3, 1), item(A, 0, 2)))
    assert updates is not None
    assert [u.content.full for u in updates] == [[PAD], [PAD, PAD]]
    assert [u.item_idx for u in updates] == [0, 1]


def test_a_placeholder_of_several_tokens_is_replaced_as_a_whole() -> None:
    updates = prompt_updates(
        [1, START, PAD, END, 2], transfer([1, 7, START, PAD, PAD, END, 8, 2], item(A, 1, 6))
    )
    assert updates is not None
    assert updates[0].target == [START, PAD, END]


def test_a_mask_stays_with_the_content() -> None:
    mask = (False, True, True, False)
    updates = prompt_updates(
        [1, PAD, 2], transfer([1, 7, PAD, PAD, 8, 2], item(A, 1, 4, is_embed=mask))
    )
    assert updates is not None
    assert updates[0].content.is_embed is not None
    assert updates[0].content.is_embed([]).tolist() == list(mask)


@pytest.mark.parametrize(
    "before",
    [[1, 2], [9, PAD, 2], [1, PAD, 9], [1, PAD, 2, 3], []],
    ids=["inserted", "other prefix", "other suffix", "longer", "empty"],
)
def test_prompts_that_do_not_line_up_give_no_updates(before: list[int]) -> None:
    expanded = [1, PAD, PAD, 2]
    assert prompt_updates(before, transfer(expanded, item(A, 1, 2))) is None


# The cache.


class Cache:
    """What vLLM's LRU sender cache does, and a record of the calls."""

    def __init__(self, *held: str, room: int = 10) -> None:
        self.entries: dict[str, Any] = dict.fromkeys(held, ("item", ["update"]))
        self.room = room
        self.calls: list[str] = []

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.entries

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        self.calls.append(f"touch {mm_hash[0]}")

    def invalidate(self, mm_hash: str) -> None:
        self.entries.pop(mm_hash, None)

    def get_and_update_item(self, entry: Any, mm_hash: str) -> Any:
        self.calls.append(f"update {mm_hash[0]}")
        if mm_hash in self.entries:
            return None, self.entries[mm_hash][1]
        assert entry is not None
        self.entries[mm_hash] = entry
        while len(self.entries) > self.room:
            del self.entries[next(iter(self.entries))]
        return entry


class Engine:
    def __init__(self, cache: Cache | None) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.renderer = SimpleNamespace(
            mm_processor_cache=cache,
            mm_processor=None,
            _mm_executor=self.executor,
            update_mm_cache_stats=lambda: None,
        )
        config = SimpleNamespace(image_token_id=PAD, video_token_id=None)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=config, is_multimodal_model=True)
        )


async def inject(
    cache: Cache | None, payloads: list[Any], before: list[int] | None = None, **options: Any
) -> dict[str, Any]:
    media = VllmMedia(Engine(cache), Metrics())
    expanded = [1, PAD, PAD, 2, PAD, 3]
    moved = transfer(expanded, item(A, 1, 2), item(B, 4, 1))
    tokens = [1, PAD, 2, PAD, 3] if before is None else before
    return await media.from_transfer(tokens, moved, payloads, **options)


async def test_what_the_cache_holds_is_sent_by_hash_alone() -> None:
    result = await inject(Cache(A, B), [None, None])
    assert result["mm_kwargs"] == {"image": [None, None]}
    assert result["mm_hashes"] == {"image": [A, B]}
    assert [(p.offset, p.length) for p in result["mm_placeholders"]["image"]] == [(1, 2), (4, 1)]


async def test_a_new_item_is_entered_with_its_prompt_update() -> None:
    cache = Cache(B)
    result = await inject(cache, ["pixels", None])
    assert result["mm_kwargs"] == {"image": ["pixels", None]}
    payload, (update,) = cache.entries[A]
    assert payload == "pixels"
    assert update.content.full == [PAD, PAD]


async def test_items_are_touched_before_any_is_entered() -> None:
    cache = Cache(B)
    await inject(cache, ["pixels", None])
    assert cache.calls == ["touch a", "touch b", "update a", "update b"]


async def test_an_item_without_prompt_updates_is_sent_but_not_entered() -> None:
    cache = Cache()
    result = await inject(cache, ["x", "y"], before=[7, 7])
    assert result["mm_kwargs"] == {"image": ["x", "y"]}
    assert cache.entries == {}


async def test_an_item_evicted_since_the_check_is_a_miss_and_changes_nothing() -> None:
    cache = Cache(A)
    with pytest.raises(CacheMissError) as caught:
        await inject(cache, [None, None])
    assert caught.value.mm_hashes == (B,)
    assert cache.calls == []


async def test_a_cache_smaller_than_the_request_is_a_miss_and_no_crash() -> None:
    with pytest.raises(CacheMissError):
        await inject(Cache(B, room=1), ["x", None])


async def test_a_resend_carries_every_payload() -> None:
    cache = Cache(A, B)
    result = await inject(cache, ["x", "y"], resend=True)
    assert result["mm_kwargs"] == {"image": ["x", "y"]}
    assert set(cache.entries) == {A, B}


async def test_without_a_cache_every_payload_is_sent() -> None:
    result = await inject(None, ["x", "y"])
    assert result["mm_kwargs"] == {"image": ["x", "y"]}


async def test_the_cache_is_never_touched_beside_the_renderers_thread() -> None:
    engine = Engine(Cache(A, B))
    media = VllmMedia(engine, Metrics())
    moved = transfer([PAD, 1, PAD], item(A, 0, 1), item(B, 2, 1))
    go_on = threading.Event()
    busy = engine.renderer._mm_executor.submit(go_on.wait)
    waiting = asyncio.create_task(media.from_transfer([PAD, 1, PAD], moved, [None, None]))
    await asyncio.sleep(0.05)
    assert engine.renderer.mm_processor_cache.calls == []
    go_on.set()
    await waiting
    assert busy.done()
    assert engine.renderer.mm_processor_cache.calls[0] == "touch a"


async def test_a_hit_waits_for_no_thread_where_the_renderer_is_idle() -> None:
    engine = Engine(Cache(A))
    media = VllmMedia(engine, Metrics())
    engine.executor.shutdown()  # whoever needs it now fails
    moved = transfer([PAD], item(A, 0, 1))
    assert (await media.from_transfer([PAD], moved, [None]))["mm_kwargs"] == {"image": [None]}


async def test_the_callers_list_is_left_alone() -> None:
    payloads = ["x", "y"]
    await inject(Cache(A, B), payloads)
    assert payloads == ["x", "y"]


async def test_a_media_token_outside_of_the_placeholders_never_reaches_the_engine() -> None:
    media = VllmMedia(Engine(Cache(A)), Metrics())
    moved = transfer([PAD, 1, PAD, PAD], item(A, 2, 2))
    with pytest.raises(StrayPlaceholderError):
        await media.from_transfer([PAD, 1, PAD], moved, [None])
    with pytest.raises(StrayPlaceholderError, match=str(PAD)):
        media.from_text(wire.MediaRequest([1, PAD]))


def test_media_tokens_are_those_that_the_config_names() -> None:
    config = SimpleNamespace(image_token_id=5, image_token_index=None, video_token_id=True)
    assert media_token_ids(config) == {5}
