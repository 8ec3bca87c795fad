"""What an encode worker may say, and what becomes of what it may not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_worker_ext import wire

MB = 1024 * 1024
HASH_A, HASH_B = "a" * 16, "b" * 64
IMAGE, BREAK = 5, 6
PROMPT = [1, IMAGE, 2, IMAGE, 3]


def item(mm_hash: str, **changes: Any) -> wire.EncodedItem:
    fields: dict[str, Any] = {
        "modality": "image",
        "mm_hash": mm_hash,
        "target": (IMAGE,),
        "runs": ((IMAGE, 4),),
        "shape": (4, 64),
        "dtype": "bfloat16",
        "grid": (1, 4, 4),
    }
    return wire.EncodedItem(**{**fields, **changes})


def handle_of(*items: wire.EncodedItem) -> dict[str, Any]:
    """A handle over arena and NIXL, as it travels."""
    modalities, hashes = ["image"] * len(items), [one.mm_hash for one in items]
    arena = {i: wire.ArenaRef("dwe_s", "0" * 16, 0, i, 64, 700, 3) for i in range(len(items))}
    nixl = {i: wire.NixlRef(700, {"agent": "x"}) for i in range(len(items))}
    offers = [
        wire.write_offer("arena", modalities, hashes, dict(arena)),
        wire.write_offer("nixl", modalities, hashes, dict(nixl)),
    ]
    handle: dict[str, Any] = json.loads(json.dumps(wire.write_encoded(items, offers)))
    return handle


def request_with(handle: object, **fields: Any) -> dict[str, Any]:
    return {
        "token_ids": PROMPT,
        "encoder_result": handle,
        "multi_modal_data": {"image_url": [{"Url": "http://a"}, {"Url": "http://b"}]},
        "extra_args": {"mm_hashes": [HASH_A, HASH_B]},
        **fields,
    }


def parse(request: dict[str, Any]) -> wire.MediaRequest:
    return wire.parse(request, max_item_bytes=MB)


def reason(handle: object, **fields: Any) -> str:
    media = parse(request_with(handle, **fields))
    assert media.transfer is None
    assert media.transfer_error is not None
    assert media.raw, "raw media is there to fall back to"
    return media.transfer_error.reason


def test_a_handle_becomes_a_transfer() -> None:
    media = parse(request_with(handle_of(item(HASH_A), item(HASH_B))))
    transfer = media.transfer
    assert media.transfer_error is None
    assert transfer is not None
    assert transfer.expanded_token_ids == [1, *[IMAGE] * 4, 2, *[IMAGE] * 4, 3]
    assert [one.mm_hash for one in transfer.items] == [HASH_A, HASH_B]
    assert [one.placeholder for one in transfer.items] == [
        wire.Placeholder(1, 4),
        wire.Placeholder(6, 4),
    ]
    assert transfer.items[0].embeddings == wire.Embeddings((4, 64), "bfloat16", (1, 4, 4))
    assert transfer.is_complete("arena")
    assert transfer.is_complete("nixl")
    assert transfer.offers["nixl"][1] == wire.NixlRef(700, {"agent": "x"})


def preprocessed(*hashes: str, length: int = 4) -> dict[str, Any]:
    """What a frontend says of images that it has processed, 5 tokens apart."""
    refs = {i: wire.ShmRef(f"frontend_{i}", 700) for i, _ in enumerate(hashes)}
    offer = wire.write_offer("shm", ["image"] * len(hashes), hashes, dict(refs))
    places = [{"offset": 1 + 5 * i, "length": length} for i, _ in enumerate(hashes)]
    return {
        "expanded_token_ids": [1, *[IMAGE] * 4, 2, *[IMAGE] * 4, 3],
        "mm_hashes_by_modality": {"image": list(hashes)},
        "mm_placeholders_by_modality": {"image": places},
        **offer,
    }


def test_embeddings_of_processed_images_stand_where_the_frontend_has_them() -> None:
    # Nothing in the handle's own tokens is looked for.
    handle = handle_of(item(HASH_A, target=(9,)), item(HASH_B, target=(9,)))
    transfer = parse(request_with(handle, extra_args=preprocessed(HASH_A, HASH_B))).transfer
    assert transfer is not None
    assert list(transfer.offers) == ["arena", "nixl"]
    assert [one.placeholder.offset for one in transfer.items] == [1, 6]
    assert all(one.embeddings is not None for one in transfer.items)


def test_a_request_that_is_passed_on_keeps_its_processed_images() -> None:
    passed_on = wire.write_encoded([], [])
    transfer = parse(request_with(passed_on, extra_args=preprocessed(HASH_A, HASH_B))).transfer
    assert transfer is not None
    assert list(transfer.offers) == ["shm"]


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (preprocessed(HASH_B, HASH_A), "invalid_hash"),
        (preprocessed(HASH_A), "invalid_hash"),
        (preprocessed(HASH_A, HASH_B, length=3), "invalid_placeholder"),
    ],
)
def test_embeddings_of_other_images_than_those_processed(extra: dict[str, Any], why: str) -> None:
    assert reason(handle_of(item(HASH_A), item(HASH_B)), extra_args=extra) == why


def test_a_handle_without_items_passes_the_request_on() -> None:
    media = parse(request_with({"version": 1, "items": []}))
    assert media.transfer is media.transfer_error is None
    assert media.raw


def test_only_some_tokens_of_an_item_may_be_embeddings() -> None:
    rows = ((IMAGE, 2), (BREAK, 1), (IMAGE, 2), (BREAK, 1))
    media = parse(request_with(handle_of(item(HASH_A, runs=rows), item(HASH_B))))
    assert media.transfer is not None
    (first, _) = media.transfer.items
    assert first.placeholder.length == 6
    assert first.placeholder.is_embed == (True, True, False, True, True, False)


def test_a_target_may_be_several_tokens() -> None:
    of_two = item(HASH_A, target=(IMAGE, 2)), item(HASH_B, target=(IMAGE, 3))
    media = parse(request_with(handle_of(*of_two)))
    assert media.transfer is not None
    assert media.transfer.expanded_token_ids == [1, *[IMAGE] * 8]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "invalid_metadata"),
        ({"items": "none"}, "invalid_metadata"),
        ({"mm_kwargs_arena": None, "mm_kwargs_nixl": None}, "invalid_metadata"),
    ],
)
def test_a_malformed_handle(change: dict[str, Any], expected: str) -> None:
    assert reason({**handle_of(item(HASH_A), item(HASH_B)), **change}) == expected


@pytest.mark.parametrize("handle", [[], "handle", 7, True])
def test_what_is_no_handle(handle: object) -> None:
    assert reason(handle) == "invalid_metadata"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mm_hash", "A" * 16, "invalid_hash"),
        ("mm_hash", "a" * 17, "invalid_hash"),
        ("mm_hash", "a" * 16 + "\n", "invalid_hash"),
        ("mm_hash", "c" * 16, "invalid_hash"),
        ("modality", "smell", "invalid_metadata"),
        ("target", [], "invalid_tokens"),
        ("target", [-1], "invalid_tokens"),
        ("runs", [], "invalid_tokens"),
        ("runs", [[IMAGE, 0]], "invalid_tokens"),
        ("runs", [[IMAGE, 2**40]], "invalid_tokens"),
        ("runs", [[IMAGE, 2**20]], "invalid_tokens"),
        ("runs", [[IMAGE, 3]], "invalid_placeholder"),
        ("runs", [[IMAGE, 4], [BREAK, 4]], "invalid_placeholder"),
        ("shape", [4], "invalid_size"),
        ("shape", [4, 0], "invalid_size"),
        ("shape", [-4, 64], "invalid_size"),
        ("shape", [4, 2**20], "invalid_size"),
        ("dtype", "object", "invalid_type"),
        ("grid", [1, 4], "invalid_type"),
        ("grid", [1, 3, 5], "invalid_type"),
        ("grid", [0, 4, 4], "invalid_type"),
        ("seconds_per_grid", 0, "invalid_type"),
        ("seconds_per_grid", -0.5, "invalid_type"),
        ("seconds_per_grid", float("nan"), "invalid_type"),
        ("seconds_per_grid", "1", "invalid_type"),
    ],
)
def test_a_malformed_item(name: str, value: object, expected: str) -> None:
    handle = handle_of(item(HASH_A), item(HASH_B))
    handle["items"][0][name] = value
    assert reason(handle) == expected


def test_items_and_places_in_the_prompt_differ() -> None:
    assert reason(handle_of(item(HASH_A))) == "invalid_count"
    assert reason(handle_of(item(HASH_A), item(HASH_B), item(HASH_B))) == "invalid_count"
    assert reason(handle_of(item(HASH_A), item(HASH_B)), token_ids=[1, 2]) == "invalid_count"


def test_two_kinds_that_want_the_same_tokens() -> None:
    items = item(HASH_A, target=(IMAGE, 2)), item(HASH_B, target=(2, IMAGE))
    handle = handle_of(*items)
    handle["items"][1]["modality"] = "video"
    handle["mm_kwargs_arena"]["mm_hashes"] = {"image": [HASH_A], "video": [HASH_B]}
    assert reason(handle) == "invalid_tokens"


def test_a_handle_of_another_request_is_refused() -> None:
    swapped = handle_of(item(HASH_B), item(HASH_A))
    assert reason(swapped) == "invalid_hash"
    # With options of the processor the identity is the encode worker's affair.
    media = parse(request_with(swapped, mm_processor_kwargs={"max_pixels": 9}))
    assert media.transfer is not None


def test_an_item_larger_than_is_accepted() -> None:
    handle = handle_of(item(HASH_A), item(HASH_B))
    handle["mm_kwargs_arena"]["items"][1]["size"] = 2 * MB
    assert reason(handle) == "invalid_size"


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.data())
def test_whatever_comes_is_an_error_of_ours_or_sound(data: st.DataObject) -> None:
    """One part of a good handle is replaced by something else."""
    handle = copy.deepcopy(handle_of(item(HASH_A), item(HASH_B)))
    at: Any = handle
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(_JUNK)
            break
        at = at[key]
    transfer = parse(request_with(handle)).transfer
    if transfer is None:
        return
    total = len(transfer.expanded_token_ids)
    for one in transfer.items:
        assert one.embeddings is not None
        assert 0 <= one.placeholder.offset < one.placeholder.end <= total
        mask = one.placeholder.is_embed
        places = one.placeholder.length if mask is None else sum(mask)
        assert places == one.embeddings.shape[0]
