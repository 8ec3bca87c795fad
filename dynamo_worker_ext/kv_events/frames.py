"""The payload of one KV event message, typed and checked.

A message is ``[topic, sequence (8 bytes, big-endian), payload]``; the payload is msgpack
``[timestamp, events, dp_rank]``. An event is a map with a ``type`` (vLLM 0.31, SGLang 0.5.21 and
later) or an array that starts with it (SGLang up to 0.5.14, older vLLM); the order of the
fields below is the order of the array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

#: vLLM sends the low 64 bits of a block's hash as an unsigned number, or with
#: ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` the whole hash as bytes; SGLang a signed number.
BlockHash = int | bytes


class FrameError(msgspec.DecodeError):
    """A payload that is not a batch of KV events."""


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True):
    """A chain of full blocks became reusable.

    Attributes:
        token_ids: of all blocks, one after the other.
        block_size: tokens of each block.
        medium: where the blocks lie; None for the accelerator.
        lora_name: the adapter. SGLang's array form has ``{"cache_salt": ...}`` in this place.
        extra_keys: of each block, what besides its tokens went into its hash (vLLM): the name of
            the adapter, ``[identifier, offset]`` of each media item whose placeholder overlaps
            the block (relative to the block, negative where it began before), the cache salt
            (first block of a prompt only), and digests of prompt embeddings as bytes.
        group_idx: KV cache group of a hybrid model.
        kv_cache_spec_kind: what kind of attention that group is for.
        locality: ``REMOTE`` for blocks that are not this worker's.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """Blocks were evicted. With duplicates of a block, one event for each copy."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """The prefix cache was reset."""


class _ArrayBlockStored(BlockStored, tag="BlockStored", frozen=True, array_like=True):
    pass


class _ArrayBlockRemoved(BlockRemoved, tag="BlockRemoved", frozen=True, array_like=True):
    pass


class _ArrayAllBlocksCleared(
    AllBlocksCleared, tag="AllBlocksCleared", frozen=True, array_like=True
):
    pass


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one engine step.

    Attributes:
        events: in the order in which they happened.
        dp_rank: data-parallel rank of the engine, where it says so.
        unknown: events of a type that this package does not know.
    """

    events: tuple[EngineEvent, ...]
    dp_rank: int | None
    unknown: int


_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
# msgspec takes no union of both forms, so the first byte of each event picks its decoder.
_MAP: Final[msgspec.msgpack.Decoder[EngineEvent]] = msgspec.msgpack.Decoder(
    BlockStored | BlockRemoved | AllBlocksCleared
)
_ARRAY: Final[msgspec.msgpack.Decoder[EngineEvent]] = msgspec.msgpack.Decoder(
    _ArrayBlockStored | _ArrayBlockRemoved | _ArrayAllBlocksCleared
)
_KNOWN: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def decode_batch(payload: bytes) -> Batch:
    """Decode one payload.

    Raises:
        FrameError: it is no batch of events, or one of its events is malformed. A batch is
            taken as a whole or not at all: the event that could not be read may have been a
            removal.
    """
    try:
        batch = _BATCH.decode(payload)
        events = [_decode_event(raw) for raw in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a KV event message of {len(payload)} bytes: {error}") from error
    known = tuple(event for event in events if event is not None)
    return Batch(known, batch.dp_rank, len(events) - len(known))


def _decode_event(raw: msgspec.Raw) -> EngineEvent | None:
    first = memoryview(raw)[0]
    is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
    try:
        return (_MAP if is_map else _ARRAY).decode(raw)
    except msgspec.ValidationError:
        # A type that a later engine added is no fault of the frame; anything else is.
        body = msgspec.msgpack.decode(raw)
        match body:
            case {"type": str(tag)} | [str(tag), *_] if tag not in _KNOWN:
                return None
        raise
