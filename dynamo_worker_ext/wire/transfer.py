"""Transfer metadata: where pre-processed items lie, and which item of the request each one is.

The arena's field is ours. It names every item that it holds by modality and index, so that a
request may mix modalities and may send only a part of its items::

    mm_kwargs_arena  {"socket": name, "host_id": hex, "items": [item, ...], "mm_hashes": hashes}
    item             {"modality", "index", "part", "slot", "offset", "size", "generation"}
    hashes           {modality: [hex, ...]}; may be left out if the request has them anyway
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.hashing import is_mm_hash
from dynamo_worker_ext.wire.types import (
    MAX_ITEMS,
    MODALITIES,
    ArenaRef,
    ItemRef,
    MediaItem,
    Modality,
    NixlRef,
    Placeholder,
    ShmRef,
    Transfer,
)

_STRICT = ConfigDict(extra="ignore", strict=True, frozen=True)
_M = TypeVar("_M", bound=BaseModel)
# Not pydantic: it takes four times as long for a prompt of a thousand tokens.
_Tokens = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]

# A plain name: no folders, and a leading dot would be a hidden file.
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,249}$")]
_Size = Annotated[int, Field(ge=1)]
_Index = Annotated[int, Field(ge=0, lt=MAX_ITEMS)]
_Hashes = Annotated[list[str], Field(max_length=MAX_ITEMS)]
_Offset = Annotated[int, Field(ge=0, lt=2**63)]


class _ArenaItem(BaseModel):
    model_config = _STRICT
    modality: Modality
    index: _Index
    part: Annotated[int, Field(ge=0, lt=2**16)]
    slot: Annotated[int, Field(ge=0, lt=2**16)]
    offset: _Offset
    size: _Size
    generation: Annotated[int, Field(ge=1, lt=2**63)]


class _Arena(BaseModel):
    model_config = _STRICT
    socket: _Name
    host_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    items: Annotated[list[_ArenaItem], Field(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: dict[Modality, _Hashes] = {}


class _ShmItem(BaseModel):
    model_config = _STRICT
    name: _Name
    size: _Size


class _Shm(BaseModel):
    model_config = _STRICT
    modality: Modality
    items: Annotated[list[_ShmItem], Field(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: _Hashes = []


class _NixlSpec(BaseModel):
    model_config = _STRICT
    shape: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(min_length=1, max_length=8)]
    dtype_str: Literal["uint8"]
    serialized_request: dict[str, Any]


class _Nixl(BaseModel):
    model_config = _STRICT
    modality: Modality
    tensor_specs: Annotated[list[_NixlSpec], Field(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: _Hashes = []


class _PlaceholderDict(BaseModel):
    model_config = _STRICT
    offset: int
    length: int
    is_embed: list[bool] | None = None


class _Offer:
    """What one field of the metadata offers.

    Attributes:
        refs: by modality, the references by index in that modality.
        unnamed: by modality, references of which only the order is known.
        hashes: by modality, the identities that came with the field.
    """

    def __init__(self) -> None:
        self.refs: dict[Modality, dict[int, ItemRef]] = {}
        self.unnamed: dict[Modality, list[ItemRef]] = {}
        self.hashes: dict[Modality, list[str]] = {}

    def all(self) -> list[ItemRef]:
        named = [ref for refs in self.refs.values() for ref in refs.values()]
        return named + [ref for refs in self.unnamed.values() for ref in refs]


def parse_transfer(extra: Mapping[str, Any], max_item_bytes: int) -> Transfer | None:
    """Read the transfer metadata among a request's ``extra_args``.

    Args:
        max_item_bytes: the largest payload of one item that is accepted.

    Returns:
        None where there is none.

    Raises:
        InvalidTransferError: it is malformed; the reason says in what.
    """
    offers = _offers(extra)
    if not offers:
        return None
    for transport, offer in offers.items():
        for ref in offer.all():
            if ref.size > max_item_bytes:
                raise InvalidTransferError(
                    f"mm_kwargs_{transport} names an item of {ref.size} bytes; at most "
                    f"{max_item_bytes} are accepted (--mm-max-item-mb)",
                    reason="invalid_size",
                )
    tokens = _parse_tokens(extra.get("expanded_token_ids"))
    items: list[MediaItem] = []
    found: dict[str, dict[int, ItemRef]] = {transport: {} for transport in offers}
    for modality in _modalities(extra, offers):
        first = len(items)
        items += _parse_items(extra, modality, offers, len(tokens))
        for transport, offer in offers.items():
            refs = offer.refs.get(modality, {})
            unnamed = offer.unnamed.get(modality, [])
            if len(unnamed) == len(items) - first:
                refs = dict(enumerate(unnamed))
            found[transport] |= {first + index: ref for index, ref in refs.items()}
    _check_overlap([item.placeholder for item in items])
    return Transfer(tokens, tuple(items), found)


def modality_list(extra: Mapping[str, Any], key: str, modality: Modality) -> list[Any]:
    """One modality's list of a field that comes grouped, flat (images only), or not at all."""
    grouped = extra.get(f"{key}_by_modality")
    if isinstance(grouped, Mapping) and grouped.get(modality):
        value = grouped[modality]
    else:
        value = extra.get(key) if modality == "image" else None
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or len(value) > MAX_ITEMS:
        raise InvalidTransferError(
            f"{key} is a list of at most {MAX_ITEMS}, got {short(value)}", reason="invalid_count"
        )
    return list(value)


def short(value: object) -> str:
    """A value from the wire, fit for an error message and a log line."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else ""
    return text[:80] if text else type(value).__name__


def _offers(extra: Mapping[str, Any]) -> dict[str, _Offer]:
    """What each transport's field offers, by transport."""
    offers: dict[str, _Offer] = {}
    if (raw := extra.get("mm_kwargs_arena")) is not None:
        arena = _model(_Arena, raw, "mm_kwargs_arena")
        offer = offers["arena"] = _Offer()
        offer.hashes = dict(arena.mm_hashes)
        for item in arena.items:
            where = (item.part, item.slot, item.offset, item.size, item.generation)
            refs = offer.refs.setdefault(item.modality, {})
            if item.index in refs:
                raise InvalidTransferError(
                    f"mm_kwargs_arena names {item.modality} {item.index} twice",
                    reason="invalid_count",
                )
            refs[item.index] = ArenaRef(arena.socket, arena.host_id, *where)
    if (raw := extra.get("mm_kwargs_shm")) is not None:
        shm = _model(_Shm, raw, "mm_kwargs_shm")
        offer = offers["shm"] = _Offer()
        offer.hashes = {shm.modality: shm.mm_hashes}
        offer.unnamed = {shm.modality: [ShmRef(item.name, item.size) for item in shm.items]}
    if (raw := extra.get("mm_kwargs_nixl")) is not None:
        nixl = _model(_Nixl, raw, "mm_kwargs_nixl")
        offer = offers["nixl"] = _Offer()
        offer.hashes = {nixl.modality: nixl.mm_hashes}
        offer.unnamed = {
            nixl.modality: [
                NixlRef(prod(spec.shape), spec.serialized_request) for spec in nixl.tensor_specs
            ]
        }
    return offers


def _modalities(extra: Mapping[str, Any], offers: Mapping[str, _Offer]) -> list[Modality]:
    """The modalities whose items belong to the transfer.

    Dynamo's fields know one. With the arena's, all that the request has: the items of one may all
    have been left out.
    """
    named = {
        modality
        for offer in offers.values()
        for part in (offer.refs, offer.unnamed, offer.hashes)
        for modality, values in part.items()
        if values
    }
    return [
        modality
        for modality in MODALITIES
        if modality in named
        or ("arena" in offers and modality_list(extra, "mm_placeholders", modality))
    ]


def _parse_items(
    extra: Mapping[str, Any], modality: Modality, offers: Mapping[str, _Offer], prompt_len: int
) -> list[MediaItem]:
    """All items of one modality."""
    hashes = modality_list(extra, "mm_hashes", modality)
    for offer in offers.values():
        if not (of_field := offer.hashes.get(modality)):
            continue
        if hashes and hashes != of_field:
            raise InvalidTransferError(
                "mm_hashes of the request and of its transfer metadata differ",
                reason="invalid_hash",
            )
        hashes = of_field
    for value in hashes:
        if not is_mm_hash(value):
            raise InvalidTransferError(
                f"an mm_hash is 16 or 64 lower-case hex characters, got {short(value)}",
                reason="invalid_hash",
            )
    places = [
        _parse_placeholder(value, prompt_len)
        for value in modality_list(extra, "mm_placeholders", modality)
    ]
    most = max(
        max(offer.refs.get(modality, ()), default=-1) + 1 or len(offer.unnamed.get(modality, ()))
        for offer in offers.values()
    )
    if not hashes or len(hashes) != len(places) or most > len(hashes):
        raise InvalidTransferError(
            f"counts of {modality} items differ: {most} item(s), {len(hashes)} mm_hashes, "
            f"{len(places)} placeholders",
            reason="invalid_count",
        )
    return [MediaItem(modality, h, p) for h, p in zip(hashes, places, strict=True)]


def _parse_tokens(value: object) -> list[int]:
    try:
        tokens = msgspec.convert(value, _Tokens)
    except msgspec.ValidationError as error:
        raise InvalidTransferError(
            f"expanded_token_ids is a list of token ids: {error}", reason="invalid_tokens"
        ) from None
    if not tokens:
        raise InvalidTransferError("expanded_token_ids is empty", reason="invalid_tokens")
    return tokens


def _parse_placeholder(value: object, prompt_len: int) -> Placeholder:
    if isinstance(value, Mapping):
        model = _model(_PlaceholderDict, value, "mm_placeholders", reason="invalid_placeholder")
        mask = None if model.is_embed is None else tuple(model.is_embed)
        result = Placeholder(model.offset, model.length, mask)
    elif (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    ):
        result = Placeholder(value[0], value[1])
    else:
        raise InvalidTransferError(
            f"a placeholder is [offset, length] or an object, got {short(value)}",
            reason="invalid_placeholder",
        )
    if result.offset < 0 or result.length < 1 or result.end > prompt_len:
        raise InvalidTransferError(
            f"placeholder ({result.offset}, {result.length}) lies outside the expanded prompt "
            f"of {prompt_len} tokens",
            reason="invalid_placeholder",
        )
    if result.is_embed is not None and len(result.is_embed) != result.length:
        raise InvalidTransferError(
            f"is_embed has {len(result.is_embed)} entries for {result.length} tokens",
            reason="invalid_placeholder",
        )
    return result


def _check_overlap(placeholders: Sequence[Placeholder]) -> None:
    ordered = sorted(placeholders, key=lambda p: p.offset)
    for before, after in pairwise(ordered):
        if after.offset < before.end:
            raise InvalidTransferError(
                f"placeholders overlap: ({before.offset}, {before.length}) and "
                f"({after.offset}, {after.length})",
                reason="invalid_placeholder",
            )


def _model(model: type[_M], value: object, name: str, *, reason: str | None = None) -> _M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InvalidTransferError(
            f"{name}: {_first(error)}", reason=reason or _reason(error)
        ) from None


def _reason(error: ValidationError) -> str:
    """The label of the first thing wrong: the field's own, else ``invalid_metadata``."""
    names = {str(part) for part in error.errors()[0]["loc"]}
    return next(
        (
            label
            for key, label in (
                ("size", "invalid_size"),
                ("shape", "invalid_size"),
                ("name", "invalid_name"),
                ("socket", "invalid_name"),
                ("index", "invalid_count"),
                ("part", "invalid_slot"),
                ("slot", "invalid_slot"),
                ("offset", "invalid_slot"),
                ("generation", "invalid_slot"),
                ("mm_hashes", "invalid_hash"),
                ("dtype_str", "invalid_type"),
            )
            if key in names
        ),
        "invalid_metadata",
    )


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "value"
    return f"{where}: {first['msg']}, got {short(first['input'])}"
