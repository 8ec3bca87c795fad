"""From an engine's KV events to the router's, judged by Dynamo's own block hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.hashing import HashMode, pad_value, routing_hash
from dynamo_worker_ext.kv_events import (
    CACHE_SALT_PREFIX,
    AllBlocksCleared,
    BlockRemoved,
    Normalizer,
    RemovedBlocks,
    StoredBlocks,
    decode_batch,
)
from dynamo_worker_ext.wire import Placeholder

pytest.importorskip("dynamo.llm", reason="needs Dynamo's bindings")

from tests.kv_simulation import (
    MEDIA,
    PROMPTS,
    A,
    B,
    C,
    Engine,
    Prompt,
    Router,
    chain,
    leading,
    stored_events,
)

DATA = Path(__file__).parent / "data" / "kv_events"


@pytest.mark.parametrize("steps", [(), (1, 2, 3), (2,)], ids=["at once", "stepwise", "in two"])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_repeated_prompt_overlaps_in_every_full_block(
    name: str, block_size: int, steps: tuple[int, ...]
) -> None:
    router = Router(block_size)
    prompt = PROMPTS[name]
    router.store(prompt, steps=steps)
    assert router.overlap(prompt) == len(prompt.tokens) // block_size
    assert router.dropped() == {}


def test_another_image_overlaps_up_to_the_block_in_which_it_begins() -> None:
    router = Router(16)
    router.store(Prompt().text(40).image(A, 36).text(50))
    assert router.overlap(Prompt().text(40).image(B, 36).text(50)) == 2


def test_swapped_images_overlap_up_to_the_first() -> None:
    router = Router(16)
    router.store(Prompt().text(16).image(A, 20).image(B, 20).text(16))
    assert router.overlap(Prompt().text(16).image(B, 20).image(A, 20).text(16)) == 1


def test_positions_belong_to_the_last_item_that_began_before_them() -> None:
    (event,) = stored_events(Prompt().image(A, 3).image(B, 5).text(8), 16)
    (stored,) = Normalizer(HashMode.PAD_VALUE, MEDIA, 16).normalize(event)
    assert isinstance(stored, StoredBlocks)
    assert stored.token_ids[:8] == [pad_value(A)] * 3 + [pad_value(B)] * 5


@pytest.mark.parametrize("name", ["my-cat", "tenant:uuid", A[:63], A.upper(), "0x" + A[:14]])
def test_an_identifier_that_is_no_hash_leaves_its_tokens(name: str) -> None:
    prompt = Prompt().image(A, 4).image(name, 4).text(8)
    (event,) = stored_events(prompt, 16)
    (stored,) = Normalizer(HashMode.PAD_VALUE, MEDIA, 16).normalize(event)
    assert isinstance(stored, StoredBlocks)
    assert stored.token_ids == [pad_value(A)] * 4 + prompt.tokens[4:]


def test_the_prefix_of_an_adapter_is_taken_off_an_identifier() -> None:
    prompt = Prompt().text(4).image(A, 8).text(8)
    prefixed = Prompt(prompt.tokens, [(f"lora:{A}", prompt.media[0][1])])
    router = Router(16)
    router.store(prefixed, lora="lora")
    assert router.overlap(prompt, lora_name="lora") == 1


def test_tokens_that_hold_pads_already_are_passed_on() -> None:
    """SGLang up to 0.5.21 publishes pad values itself, and no extra keys."""
    prompt = PROMPTS["one image"]
    router = Router(16)
    router.store(Prompt(prompt.routing()))
    assert router.overlap(prompt) == len(prompt.tokens) // 16


def test_block_mm_infos_leave_tokens_and_name_the_items_of_each_block() -> None:
    prompt = Prompt().text(10).image(A, 10).image(B, 4).text(24)
    (event,) = stored_events(prompt, 16)
    (stored,) = Normalizer(HashMode.BLOCK_MM_INFOS, MEDIA, 16).normalize(event)
    assert isinstance(stored, StoredBlocks)
    assert stored.token_ids == prompt.tokens[:48]
    a, b = routing_hash(A), routing_hash(B)
    assert stored.block_mm_infos == [
        {"mm_objects": [{"mm_hash": a, "offsets": [[10, 16]]}]},
        {"mm_objects": [{"mm_hash": a, "offsets": [[0, 4]]}, {"mm_hash": b, "offsets": [[4, 16]]}]},
        None,
    ]


def test_block_mm_infos_are_none_for_text() -> None:
    (event,) = stored_events(PROMPTS["no image"], 16)
    (stored,) = Normalizer(HashMode.BLOCK_MM_INFOS, MEDIA, 16).normalize(event)
    assert isinstance(stored, StoredBlocks)
    assert stored.block_mm_infos is None


# Cache salts and adapters.


@pytest.mark.parametrize("steps", [(), (1, 2)])
@pytest.mark.parametrize("prefix", ["", CACHE_SALT_PREFIX])
def test_a_salt_is_in_every_block_of_its_prompt(prefix: str, steps: tuple[int, ...]) -> None:
    router = Router(16)
    prompt = PROMPTS["one image"]
    router.store(prompt, salt=prefix + "tenant", steps=steps)
    assert router.overlap(prompt, cache_namespace="tenant") == len(prompt.tokens) // 16
    assert router.overlap(prompt) == 0
    assert router.overlap(prompt, cache_namespace="another") == 0


def test_an_adapter_is_in_every_block_and_is_no_salt() -> None:
    router = Router(16)
    prompt = PROMPTS["one image"]
    router.store(prompt, lora="adapter", steps=(2,))
    assert router.overlap(prompt, lora_name="adapter") == len(prompt.tokens) // 16
    assert router.overlap(prompt) == 0


@pytest.mark.parametrize("salt", ["tenant", "adapter", A, A[:16]])
def test_an_adapter_and_a_salt_are_told_apart(salt: str) -> None:
    router = Router(16)
    prompt = PROMPTS["one image"]
    router.store(prompt, lora="adapter", salt=salt)
    full = len(prompt.tokens) // 16
    assert router.overlap(prompt, lora_name="adapter", cache_namespace=salt) == full


def test_a_salt_is_forgotten_with_its_block() -> None:
    router = Router(16)
    prompt = Prompt().text(32)
    first, second = router.store(prompt, salt="tenant", steps=(1,))
    router.take(BlockRemoved(second.block_hashes), BlockRemoved(first.block_hashes))
    router.take(msgspec.structs.replace(first, extra_keys=None), second)
    assert router.overlap(prompt, cache_namespace="tenant") == 0
    assert router.overlap(prompt) == 2


@pytest.mark.parametrize("where", ["field", "array"])
def test_a_salt_can_be_said_outright(where: str) -> None:
    """As SGLang does: a field of the map, or a dict in the adapter's place of the array."""
    router = Router(16)
    said: dict[str, Any] = {"cache_salt": "tenant"}
    fields = said if where == "field" else {"lora_name": said}
    prompt = Prompt().text(32)
    (event,) = stored_events(prompt, 16)
    router.take(msgspec.structs.replace(event, **fields))
    assert router.overlap(prompt, cache_namespace="tenant") == 2


def test_prompts_given_as_embeddings_are_not_published() -> None:
    router = Router(16)
    (event,) = stored_events(Prompt().text(32), 16)
    router.take(msgspec.structs.replace(event, extra_keys=[[b"digest"], None]))
    assert router.dropped() == {"prompt_embeds": 1}


# Removals.


def test_a_removed_block_is_no_longer_claimed() -> None:
    router = Router(16)
    prompt = PROMPTS["one image"]
    (event,) = router.store(prompt)
    router.take(BlockRemoved(event.block_hashes[3:]))
    assert router.overlap(prompt) == 3


def test_a_block_with_copies_is_claimed_until_the_last_is_removed() -> None:
    router = Router(16)
    prompt = Prompt().text(16)
    (event,) = router.store(prompt)
    router.store(prompt)
    router.take(BlockRemoved(event.block_hashes))
    assert router.overlap(prompt) == 1
    router.take(BlockRemoved(event.block_hashes))
    assert router.overlap(prompt) == 0
    assert router.normalizer.statistics().blocks == 0


def test_a_removal_of_an_unknown_block_is_dropped() -> None:
    router = Router(16)
    router.take(BlockRemoved([1, 2]))
    assert router.view.events == []
    assert router.dropped() == {"unknown_block": 2}


def test_a_cleared_cache_takes_back_every_block_and_every_copy() -> None:
    router = Router(16)
    one, two = PROMPTS["one image"], PROMPTS["adjacent images"]
    router.store(one)
    router.store(one)
    router.store(two)
    router.take(AllBlocksCleared())
    assert router.overlap(one) == router.overlap(two) == 0
    assert not router.view.copies
    router.take(AllBlocksCleared())
    assert len(router.view.events) == 4
    router.store(one)
    assert router.overlap(one) == len(one.tokens) // 16


def test_children_are_taken_back_before_their_parents() -> None:
    normalizer = Normalizer(HashMode.PAD_VALUE, MEDIA, 16)
    (event,) = stored_events(Prompt().text(48), 16)
    (stored,) = normalizer.normalize(event)
    (removed,) = normalizer.forget()
    assert isinstance(stored, StoredBlocks)
    assert isinstance(removed, RemovedBlocks)
    assert removed.block_hashes == stored.block_hashes[::-1]


def test_what_follows_on_an_unknown_block_is_dropped() -> None:
    router = Router(16)
    prompt = PROMPTS["one image"]
    events = list(stored_events(prompt, 16, steps=(2, 4)))
    router.take(events[0])
    router.normalizer.forget()
    router.take(*events[1:])
    assert router.dropped() == {"orphan": 2}


# What is none of the router's business.


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("other_medium", {"medium": "CPU"}),
        ("other_medium", {"medium": "STORAGE"}),
        ("remote", {"locality": "REMOTE"}),
        ("other_group", {"kv_cache_spec_kind": "sliding_window"}),
        ("other_group", {"kv_cache_spec_kind": "mamba", "group_idx": 1}),
        ("other_group", {"kv_cache_spec_kind": None, "group_idx": 3}),
        ("block_size", {"block_size": 8}),
        ("tokens", {"token_ids": [1] * 31}),
        ("extra_keys", {"extra_keys": [None]}),
        ("token_range", {"token_ids": [1_000_000 + 2**61] * 32}),
        ("token_range", {"token_ids": [-1] * 32}),
        ("loop", {"block_hashes": [5, 5]}),
        ("loop", {"block_hashes": [5, 6], "parent_block_hash": 6}),
        ("empty", {"block_hashes": [], "token_ids": [], "extra_keys": []}),
    ],
)
def test_an_event_that_cannot_count_is_dropped_with_its_reason(
    reason: str, fields: dict[str, Any]
) -> None:
    router = Router(16)
    (event,) = stored_events(Prompt().text(32), 16)
    router.take(msgspec.structs.replace(event, **fields))
    assert router.view.events == []
    assert router.dropped() == {reason: 1}


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
@pytest.mark.parametrize("medium", [None, "GPU"])
def test_blocks_of_the_main_attention_on_the_device_count(
    kind: str | None, medium: str | None
) -> None:
    router = Router(16)
    (event,) = stored_events(Prompt().text(32), 16)
    router.take(msgspec.structs.replace(event, kv_cache_spec_kind=kind, medium=medium))
    assert router.overlap(Prompt().text(32)) == 2


@pytest.mark.parametrize(
    ("window", "counts"), [(4096, True), (8192, True), (4095, False), (0, False)]
)
def test_a_window_as_long_as_the_context_leaves_nothing_out(window: int, counts: bool) -> None:
    """Phi-3-vision has one: its only group is of that kind."""
    (event,) = stored_events(Prompt().text(32), 16)
    event = msgspec.structs.replace(
        event,
        group_idx=0,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=window,
    )
    normalizer = Normalizer(HashMode.PAD_VALUE, MEDIA, 16, context_tokens=4096)
    assert bool(normalizer.normalize(event)) is counts
    removed = normalizer.normalize(BlockRemoved(event.block_hashes, group_idx=0))
    assert bool(removed) is counts


def test_removals_of_another_group_leave_the_main_one() -> None:
    """vLLM's hybrid models store different blocks under the same hashes, by group."""
    router = Router(16)
    prompt = Prompt().text(32)
    (event,) = router.store(prompt, group_idx=1)
    (window,) = router.store(prompt, group_idx=0, kv_cache_spec_kind="sliding_window")
    router.take(BlockRemoved(window.block_hashes, group_idx=0))
    assert router.overlap(prompt) == 2
    router.take(BlockRemoved(event.block_hashes, group_idx=1))
    assert router.overlap(prompt) == 0


def test_removals_from_other_media_leave_the_device() -> None:
    router = Router(16)
    prompt = Prompt().text(32)
    (event,) = router.store(prompt)
    router.take(BlockRemoved(event.block_hashes, medium="CPU"))
    assert router.overlap(prompt) == 2


@pytest.mark.parametrize("form", [lambda h: h, lambda h: h - 2**64 if h >= 2**63 else h,
                                  lambda h: b"\0" * 24 + h.to_bytes(8, "big")])  # fmt: skip
def test_block_hashes_come_unsigned_signed_or_as_bytes(form: Any) -> None:
    router = Router(16)
    prompt = PROMPTS["one image"]
    hashes = []
    for event in stored_events(prompt, 16, steps=(2,)):
        parent = event.parent_block_hash
        hashes += event.block_hashes
        router.take(
            msgspec.structs.replace(
                event,
                block_hashes=[form(key) for key in event.block_hashes],
                parent_block_hash=None if parent is None else form(parent),
            )
        )
    assert router.overlap(prompt) == len(hashes)
    router.take(BlockRemoved([form(key) for key in hashes]))
    assert not router.view.copies


# Everything at once.

mm_hashes = st.sampled_from([A, B, C, A[:16], "f" * 16])
lengths = st.integers(1, 70)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    prompt = Prompt().text(draw(st.integers(0, 40)), draw(st.integers(0, 1)))
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            prompt.image(draw(mm_hashes), draw(lengths))
        else:
            mask = draw(st.lists(st.booleans(), min_size=1, max_size=50))
            prompt.masked(draw(mm_hashes), mask)
        prompt.text(draw(st.integers(0, 20)), draw(st.integers(0, 1)))
    return prompt


@given(
    st.lists(prompts(), min_size=1, max_size=4),
    st.sampled_from([16, 32]),
    st.lists(
        st.tuples(
            st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 5), max_size=6), st.booleans()
        ),
        max_size=8,
    ),
)
def test_the_router_expects_exactly_what_the_engine_has(
    asked: list[Prompt], size: int, history: list[tuple[int, bool, list[int], bool]]
) -> None:
    """Whatever was computed, computed twice, evicted, cleared and computed again.

    Where the engine tells two blocks apart by what is not in the router's tokens (an item whose
    first block holds no embedding), the router takes one for the other.
    """
    router, engine = Router(size), Engine(size)
    ends = {
        key: tuple(prompt.routing()[: (i + 1) * size])
        for prompt in asked
        for i, key in enumerate(chain(prompt, size))
    }
    for which, beside, evictions, clear in history:
        prompt = asked[which % len(asked)]
        router.take(*engine.run(prompt, [2, 4], beside=beside))
        router.take(*filter(None, map(engine.evict, evictions)))
        if clear:
            router.take(AllBlocksCleared())
            engine.copies.clear()
        visible = {ends[key] for key in engine.copies}
        for prompt in asked:
            keys = chain(prompt, size)
            expected = router.overlap(prompt)
            assert expected == leading([ends[key] in visible for key in keys])
            assert expected >= leading([key in engine.copies for key in keys])
    assert router.dropped() == {}
    router.take(AllBlocksCleared())
    assert not router.view.copies


def test_items_that_begin_alike_for_the_router_do_not_lose_what_follows() -> None:
    """Two videos whose first block holds nothing but a timestamp of theirs."""
    router = Router(16)
    first, second = (
        Prompt().text(10).masked(mm_hash, [False] * 6 + [True] * 26).text(22) for mm_hash in (A, B)
    )
    (event,) = router.store(first)
    router.store(second)
    assert router.overlap(first) == router.overlap(second) == 4
    router.take(BlockRemoved(event.block_hashes))
    assert router.overlap(first) == 1
    assert router.overlap(second) == 4


def test_block_hashes_do_not_depend_on_the_engines_seed() -> None:
    published = []
    for seed in range(2):
        prompt = PROMPTS["three images"]
        (event,) = stored_events(prompt, 16)
        hashes: list[int | bytes] = [seed * 1000 + i for i in range(len(event.block_hashes))]
        seeded = msgspec.structs.replace(event, block_hashes=hashes)
        (stored,) = Normalizer(HashMode.PAD_VALUE, MEDIA, 16).normalize(seeded)
        assert isinstance(stored, StoredBlocks)
        published.append(stored.block_hashes)
    assert published[0] == published[1]


# Recorded from vLLM 0.31.0 by tests/vllm/kv_events_engine.py.


def test_recorded_events_of_vllm_give_the_blocks_of_their_requests() -> None:
    recorded = msgspec.msgpack.decode((DATA / "vllm_0_31_0.msgpack").read_bytes())
    router = Router(32)
    for _topic, _sequence, payload in recorded["frames"]:
        router.take(*decode_batch(payload).events)
    assert router.dropped() == {}
    assert {len(request["media"]) for request in recorded["requests"]} == {0, 1, 2}
    for request in recorded["requests"]:
        media = [(h, Placeholder(offset, length)) for h, offset, length in request["media"]]
        prompt = Prompt(request["tokens"], media)
        options = {key: request[key] for key in ("lora_name", "cache_namespace")}
        assert router.overlap(prompt, **options) == len(prompt.tokens) // 32, request["name"]
