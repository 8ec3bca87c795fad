"""KV event messages: both forms, later versions, and garbage."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    FrameError,
    decode_batch,
)

STORED = BlockStored(
    block_hashes=[2**64 - 1, 1],
    parent_block_hash=-1,
    token_ids=list(range(32)),
    block_size=16,
    medium="GPU",
    lora_name="adapter",
    extra_keys=[["adapter", ["0" * 64, -3], "salt", b"digest"], None],
    group_idx=0,
    kv_cache_spec_kind="full_attention",
)


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


@pytest.mark.parametrize("form", ["map", "array"])
def test_maps_and_arrays_say_the_same(form: str) -> None:
    events = [STORED, BlockRemoved([1, 2], medium="GPU", group_idx=0), AllBlocksCleared()]
    if form == "map":
        payload = batch(*events)
    else:
        fields = msgspec.structs.astuple
        payload = batch(*([type(event).__name__, *fields(event)] for event in events))
    decoded = decode_batch(payload)
    assert [msgspec.structs.asdict(event) for event in decoded.events] == [
        msgspec.structs.asdict(event) for event in events
    ]
    assert all(isinstance(a, type(b)) for a, b in zip(decoded.events, events, strict=True))
    assert decoded.dp_rank == 0


def test_old_short_arrays_can_be_read() -> None:
    """SGLang 0.5.11: no medium, no rank."""
    payload = msgspec.msgpack.encode(
        [1, [["BlockStored", [-5], None, [1] * 16, 16, None], ["BlockRemoved", [-5]]]]
    )
    decoded = decode_batch(payload)
    assert [type(event).__mro__[1] for event in decoded.events] == [BlockStored, BlockRemoved]
    assert decoded.dp_rank is None


def test_fields_and_types_of_a_later_engine_are_left_alone() -> None:
    later = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
             "token_ids": [1], "block_size": 1, "brand_new": {"x": [1]}}  # fmt: skip
    decoded = decode_batch(batch(later, {"type": "BlockMoved", "to": 1}, ["BlockMoved", 1]))
    assert len(decoded.events) == 1
    assert decoded.unknown == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        batch()[:-1],
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        batch(7),
        batch(None),
        batch([]),
        batch({}),
        batch({"type": 5}),
        batch({"type": "BlockStored"}),
        batch({"type": "BlockRemoved", "block_hashes": "no"}),
        batch(["BlockStored", [1], None, [[1, 2]], 1]),
        batch(BlockRemoved([1]), {"type": "BlockRemoved"}),
        b"\x93\x01\x91" + b"\x91" * 100_000,
    ],
)
def test_what_is_no_batch_of_events_is_an_error(payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(payload: bytes) -> None:
    with suppress(FrameError):
        decode_batch(payload)
