"""``encoder_result``: what an encode worker tells those who take its embeddings.

It is a handle and never the tensors::

    {"version": 1,
     "items": [{"modality", "mm_hash", "target", "runs", "shape", "dtype", "grid",
                "seconds_per_grid"}, ...],
     "mm_kwargs_arena": ..., "mm_kwargs_nixl": ...}

    target, runs   tokens that stand for the item in the prompt, and [[token id, count], ...] that
                   replace them
    shape, dtype   of its embeddings, [tokens, width]
    grid           [time, height, width] in patches, or null
    seconds_per_grid
                   of a video, between two steps of its grid, or null
    mm_kwargs_*    where the embeddings lie, as `write_offer` writes it

Items are one modality after the other, in the order of the prompt within each. None at all means
that the encode worker passes the request on as it came. `read` makes of a handle and the prompt's
tokens what pre-processed media is too: a `Transfer`, so that one policy decides about both. Of a
request that came pre-processed the handle's items are those of its transfer, in the same order and
at the same places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Final, Literal

import msgspec

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.wire.transfer import parse_transfer, short
from dynamo_worker_ext.wire.types import (
    MAX_ITEMS,
    MODALITIES,
    TRANSPORTS,
    Embeddings,
    Modality,
    Placeholder,
    Transfer,
)

VERSION: Final = 1

#: More tokens than any context has; keeps hostile counts from costing memory.
MAX_TOKENS: Final = 1 << 20

_ITEM_SIZE: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

_Meta = msgspec.Meta
_Token = Annotated[int, _Meta(ge=0, lt=2**31)]
_Count = Annotated[int, _Meta(ge=1, le=MAX_TOKENS)]


class EncodedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of a handle; see the module for what the fields are."""

    modality: Modality
    mm_hash: Annotated[str, _Meta(pattern=r"^([0-9a-f]{16}|[0-9a-f]{64})\Z")]
    target: Annotated[tuple[_Token, ...], _Meta(min_length=1, max_length=16)]
    runs: Annotated[tuple[tuple[_Token, _Count], ...], _Meta(min_length=1, max_length=4096)]
    shape: tuple[_Count, Annotated[int, _Meta(ge=1, lt=2**24)]]
    dtype: Literal["bfloat16", "float16", "float32"]
    grid: tuple[_Count, _Count, _Count] | None = None
    seconds_per_grid: Annotated[float, _Meta(gt=0, le=1e6)] | None = None


class _Handle(msgspec.Struct):
    version: Literal[1]
    items: Annotated[list[EncodedItem], _Meta(max_length=MAX_ITEMS)]


def write(items: Sequence[EncodedItem], offers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The handle of a request's items, plain JSON values.

    Args:
        items: one modality after the other, in the order of the prompt within each.
        offers: of each transport what `write_offer` returned.
    """
    # By way of JSON, so that tuples are lists here as they are for whoever reads it.
    plain = msgspec.json.decode(msgspec.json.encode(list(items)))
    handle: dict[str, Any] = {"version": VERSION, "items": plain}
    for offer in offers:
        handle |= offer
    return handle


def read(
    value: object,
    token_ids: Sequence[int],
    max_item_bytes: int,
    preprocessed: Transfer | None = None,
) -> Transfer | None:
    """Check a handle, and line it up with the prompt that it belongs to.

    Args:
        value: the request's ``encoder_result``.
        token_ids: the prompt before expansion.
        max_item_bytes: the largest payload of one item that is accepted.
        preprocessed: the transfer that the same request carries, if it does.

    Returns:
        None where the encode worker passed the request on.

    Raises:
        InvalidTransferError: it is malformed, or does not fit the prompt.
    """
    if not isinstance(value, Mapping):
        raise InvalidTransferError(
            f"encoder_result is an object, got {short(value)}", reason="invalid_metadata"
        )
    try:
        handle = msgspec.convert(value, _Handle)
    except msgspec.ValidationError as error:
        text = str(error)[:200]
        raise InvalidTransferError(f"encoder_result: {text}", reason=_reason(text)) from None
    if not handle.items:
        return None
    items = sorted(handle.items, key=lambda item: MODALITIES.index(item.modality))
    for item in items:
        _check(item, max_item_bytes)
    if preprocessed is None:
        tokens, places = _expand(list(token_ids), items)
    else:
        tokens, places = preprocessed.expanded_token_ids, _places(items, preprocessed)
    hashes: dict[str, list[str]] = {}
    placeholders: dict[str, list[Placeholder]] = {}
    for item, place in zip(items, places, strict=True):
        hashes.setdefault(item.modality, []).append(item.mm_hash)
        placeholders.setdefault(item.modality, []).append(place)
    extra: dict[str, Any] = {
        f"mm_kwargs_{name}": value.get(f"mm_kwargs_{name}") for name in TRANSPORTS
    }
    transfer = parse_transfer(
        {
            **extra,
            "expanded_token_ids": tokens,
            "mm_hashes_by_modality": hashes,
            "mm_placeholders_by_modality": placeholders,
        },
        max_item_bytes,
    )
    if transfer is None:
        raise InvalidTransferError(
            "encoder_result does not say where its embeddings lie", reason="invalid_metadata"
        )
    return msgspec.structs.replace(
        transfer,
        items=tuple(
            msgspec.structs.replace(
                item, embeddings=Embeddings(of.shape, of.dtype, of.grid, of.seconds_per_grid)
            )
            for item, of in zip(transfer.items, items, strict=True)
        ),
    )


def check_identities(transfer: Transfer, mm_hashes: Mapping[Modality, Sequence[str]]) -> None:
    """Refuse a handle whose items are not those of the request that it came with.

    Args:
        transfer: what `read` made of it.
        mm_hashes: identities that the frontend gave to the raw media, by modality.

    Raises:
        InvalidTransferError: ``invalid_hash``.
    """
    for modality in {item.modality for item in transfer.items}:
        known = list(mm_hashes.get(modality, ()))
        items = [item.mm_hash for item in transfer.items if item.modality == modality]
        if known and known != items:
            raise InvalidTransferError(
                f"the {modality}s of encoder_result are not those of the request",
                reason="invalid_hash",
            )


def _check(item: EncodedItem, max_item_bytes: int) -> None:
    tokens, width = item.shape
    if (size := tokens * width * _ITEM_SIZE[item.dtype]) > max_item_bytes:
        raise InvalidTransferError(
            f"embeddings of {size} bytes; at most {max_item_bytes} are accepted (--mm-max-item-mb)",
            reason="invalid_size",
        )
    if item.grid is not None and (patches := prod(item.grid)) % tokens:
        raise InvalidTransferError(
            f"a grid of {patches} patches does not make {tokens} embeddings",
            reason="invalid_type",
        )


def _places(items: Sequence[EncodedItem], preprocessed: Transfer) -> list[Placeholder]:
    """Where a transfer has the items, which are to be the same."""
    known = [(item.modality, item.mm_hash) for item in preprocessed.items]
    if known != [(item.modality, item.mm_hash) for item in items]:
        raise InvalidTransferError(
            "the items of encoder_result are not those of the request", reason="invalid_hash"
        )
    places = [item.placeholder for item in preprocessed.items]
    for item, place in zip(items, places, strict=True):
        room = place.embeds
        if item.shape[0] != room:
            raise InvalidTransferError(
                f"{item.shape[0]} embeddings do not fit a placeholder with room for {room}",
                reason="invalid_placeholder",
            )
    return places


def _expand(
    before: Sequence[int], items: Sequence[EncodedItem]
) -> tuple[list[int], list[Placeholder]]:
    """Put what each item becomes in the place of its target."""
    total = len(before) + sum(count for item in items for _, count in item.runs)
    if total > MAX_TOKENS:
        raise InvalidTransferError(
            f"encoder_result makes a prompt of {total} tokens; at most {MAX_TOKENS} are taken",
            reason="invalid_tokens",
        )
    places: dict[int, Placeholder] = {}
    starts = sorted(
        (start, index)
        for modality in MODALITIES
        for start, index in _starts(before, items, modality)
    )
    after: list[int] = []
    at = 0
    for start, index in starts:
        item = items[index]
        if start < at:
            raise InvalidTransferError(
                f"two items of encoder_result want the tokens at {start}", reason="invalid_tokens"
            )
        after += before[at:start]
        tokens = [token for token, count in item.runs for _ in range(count)]
        places[index] = Placeholder(len(after), len(tokens), _mask(item))
        after += tokens
        at = start + len(item.target)
    return after + list(before[at:]), [places[index] for index in range(len(items))]


def _starts(
    before: Sequence[int], items: Sequence[EncodedItem], modality: Modality
) -> Iterator[tuple[int, int]]:
    """Where in the prompt each item of one modality goes, and its index."""
    at, last = 0, None
    found = [(index, item) for index, item in enumerate(items) if item.modality == modality]
    for count, (index, item) in enumerate(found):
        start = _find(before, item.target, at)
        if start is None:
            raise InvalidTransferError(
                f"encoder_result has {len(found)} {modality}(s), the prompt has room for {count}",
                reason="invalid_count",
            )
        yield start, index
        at, last = start + len(item.target), item.target
    if last is not None and _find(before, last, at) is not None:
        raise InvalidTransferError(
            f"encoder_result has {len(found)} {modality}(s), the prompt has room for more",
            reason="invalid_count",
        )


def _find(tokens: Sequence[int], target: tuple[int, ...], at: int) -> int | None:
    """Where `target` begins, not before `at`."""
    for start in range(at, len(tokens) - len(target) + 1):
        if tokens[start] == target[0] and tuple(tokens[start : start + len(target)]) == target:
            return start
    return None


def _mask(item: EncodedItem) -> tuple[bool, ...] | None:
    """Which tokens embeddings replace: all, or else those of the one id that is as many."""
    by_id: dict[int, int] = {}
    for token, count in item.runs:
        by_id[token] = by_id.get(token, 0) + count
    wanted = item.shape[0]
    if sum(by_id.values()) == wanted:
        return None
    replaced = [token for token, count in by_id.items() if count == wanted]
    if len(replaced) != 1:
        raise InvalidTransferError(
            f"{wanted} embeddings do not fit a placeholder of {sum(by_id.values())} tokens",
            reason="invalid_placeholder",
        )
    return tuple(token == replaced[0] for token, count in item.runs for _ in range(count))


_REASONS: Final = {
    "mm_hash": "invalid_hash",
    "target": "invalid_tokens",
    "runs": "invalid_tokens",
    "shape": "invalid_size",
    "dtype": "invalid_type",
    "grid": "invalid_type",
    "seconds_per_grid": "invalid_type",
}


def _reason(text: str) -> str:
    if f"of length <= {MAX_ITEMS}" in text and "items[" not in text:
        return "invalid_count"
    names = re.findall(r"(?:\.|field `)(\w+)", text)
    return next((_REASONS[name] for name in names if name in _REASONS), "invalid_metadata")
