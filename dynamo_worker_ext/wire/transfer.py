"""Transfer metadata: where pre-processed items lie, and which item of the request each one is.

The arena's field is ours. It names every item that it holds by modality and index, so that a
request may mix modalities and may send only a part of its items::

    mm_kwargs_arena  {"socket": name, "host_id": hex, "items": [item, ...], "mm_hashes": hashes}
    item             {"modality", "index", "part", "slot", "offset", "size", "generation"}
    hashes           {modality: [hex, ...]}; may be left out if the request has them anyway
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Final, Literal

import msgspec

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.hashing import is_mm_hash
from dynamo_worker_ext.wire.types import (
    MAX_ITEMS,
    MODALITIES,
    ArenaRef,
    ItemRef,
    MediaItem,
    Modality,
    Name,
    NixlRef,
    Placeholder,
    ShmRef,
    Size,
    Transfer,
)

# msgspec and not pydantic, and all in one call: every request with media passes through here, and
# what costs is how much code and data a request that comes after a pause finds cold.
_Meta = msgspec.Meta
_Tokens = Annotated[list[Annotated[int, _Meta(ge=0, lt=2**31)]], _Meta(min_length=1)]
_Hashes = Annotated[list[str], _Meta(max_length=MAX_ITEMS)]
_Places = Annotated[
    list[tuple[Annotated[int, _Meta(ge=0)], Annotated[int, _Meta(ge=1)]] | Placeholder],
    _Meta(max_length=MAX_ITEMS),
]
_Small = Annotated[int, _Meta(ge=0, lt=2**16)]


class _ArenaItem(msgspec.Struct):
    modality: Modality
    index: Annotated[int, _Meta(ge=0, lt=MAX_ITEMS)]
    part: _Small
    slot: _Small
    offset: Annotated[int, _Meta(ge=0, le=2**63 - 1)]
    size: Size
    generation: Annotated[int, _Meta(ge=1, le=2**63 - 1)]


class _Arena(msgspec.Struct):
    socket: Name
    host_id: Annotated[str, _Meta(pattern=r"^[0-9a-f]{16}\Z")]
    items: Annotated[list[_ArenaItem], _Meta(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: dict[Modality, _Hashes] = {}


class _Shm(msgspec.Struct):
    modality: Modality
    items: Annotated[list[ShmRef], _Meta(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: _Hashes = []


class _NixlSpec(msgspec.Struct):
    shape: Annotated[
        list[Annotated[int, _Meta(ge=1, le=2**63 - 1)]], _Meta(min_length=1, max_length=8)
    ]
    dtype_str: Literal["uint8"]
    serialized_request: dict[str, Any]


class _Nixl(msgspec.Struct):
    modality: Modality
    tensor_specs: Annotated[list[_NixlSpec], _Meta(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: _Hashes = []


class _Extra(msgspec.Struct, kw_only=True):
    """The fields of ``extra_args`` that belong to a transfer."""

    mm_kwargs_arena: _Arena | None = None
    mm_kwargs_shm: _Shm | None = None
    mm_kwargs_nixl: _Nixl | None = None
    expanded_token_ids: _Tokens
    mm_hashes: _Hashes | None = None
    mm_hashes_by_modality: dict[str, _Hashes | None] | None = None
    mm_placeholders: _Places | None = None
    mm_placeholders_by_modality: dict[str, _Places | None] | None = None


class _Offer:
    """What one field of the metadata offers.

    Attributes:
        refs: by modality, the references by index in that modality.
        unnamed: by modality, references of which only the order is known.
        hashes: by modality, the identities that came with the field.
    """

    __slots__ = ("hashes", "refs", "unnamed")

    def __init__(self, hashes: Mapping[Modality, list[str]]) -> None:
        self.refs: dict[Modality, dict[int, ItemRef]] = {}
        self.unnamed: dict[Modality, Sequence[ItemRef]] = {}
        self.hashes = hashes

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
    if (
        extra.get("mm_kwargs_shm") is None
        and extra.get("mm_kwargs_arena") is None
        and extra.get("mm_kwargs_nixl") is None
    ):
        return None
    form = _convert(extra)
    offers = _offers(form)
    for transport, offer in offers.items():
        for ref in offer.all():
            if ref.size > max_item_bytes:
                raise InvalidTransferError(
                    f"mm_kwargs_{transport} names an item of {ref.size} bytes; at most "
                    f"{max_item_bytes} are accepted (--mm-max-item-mb)",
                    reason="invalid_size",
                )
    items: list[MediaItem] = []
    found: dict[str, dict[int, ItemRef]] = {transport: {} for transport in offers}
    for modality in _modalities(form, offers):
        first = len(items)
        items += _items(form, modality, offers)
        for transport, offer in offers.items():
            refs = offer.refs.get(modality, {})
            unnamed = offer.unnamed.get(modality, ())
            if len(unnamed) == len(items) - first:
                refs = dict(enumerate(unnamed))
            found[transport] |= {first + index: ref for index, ref in refs.items()}
    if len(items) > 1:
        _check_overlap([item.placeholder for item in items])
    return Transfer(form.expanded_token_ids, tuple(items), found)


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


def _offers(form: _Extra) -> dict[str, _Offer]:
    """What each transport's field offers, by transport."""
    offers: dict[str, _Offer] = {}
    if (arena := form.mm_kwargs_arena) is not None:
        offer = offers["arena"] = _Offer(arena.mm_hashes)
        for item in arena.items:
            where = (item.part, item.slot, item.offset, item.size, item.generation)
            refs = offer.refs.setdefault(item.modality, {})
            if item.index in refs:
                raise InvalidTransferError(
                    f"mm_kwargs_arena names {item.modality} {item.index} twice",
                    reason="invalid_count",
                )
            refs[item.index] = ArenaRef(arena.socket, arena.host_id, *where)
    if (shm := form.mm_kwargs_shm) is not None:
        offer = offers["shm"] = _Offer({shm.modality: shm.mm_hashes})
        offer.unnamed[shm.modality] = shm.items
    if (nixl := form.mm_kwargs_nixl) is not None:
        offer = offers["nixl"] = _Offer({nixl.modality: nixl.mm_hashes})
        offer.unnamed[nixl.modality] = [
            NixlRef(prod(spec.shape), spec.serialized_request) for spec in nixl.tensor_specs
        ]
    return offers


def _modalities(form: _Extra, offers: Mapping[str, _Offer]) -> list[Modality]:
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
    if "arena" in offers:
        named.update(modality for modality in MODALITIES if _places(form, modality))
    return [modality for modality in MODALITIES if modality in named]


def _places(form: _Extra, modality: Modality) -> Sequence[tuple[int, int] | Placeholder]:
    return _of(form.mm_placeholders_by_modality, form.mm_placeholders, modality)


def _of(
    grouped: Mapping[str, list[Any] | None] | None, flat: list[Any] | None, modality: Modality
) -> list[Any]:
    """As `modality_list`, of what is checked."""
    return (grouped and grouped.get(modality)) or (modality == "image" and flat) or []


def _items(form: _Extra, modality: Modality, offers: Mapping[str, _Offer]) -> list[MediaItem]:
    """All items of one modality."""
    hashes = _of(form.mm_hashes_by_modality, form.mm_hashes, modality)
    most = 0
    for offer in offers.values():
        if named := offer.refs.get(modality):
            most = max(most, max(named) + 1)
        most = max(most, len(offer.unnamed.get(modality, ())))
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
    places = _places(form, modality)
    if not hashes or len(hashes) != len(places) or most > len(hashes):
        raise InvalidTransferError(
            f"counts of {modality} items differ: {most} item(s), {len(hashes)} mm_hashes, "
            f"{len(places)} placeholders",
            reason="invalid_count",
        )
    prompt_len = len(form.expanded_token_ids)
    return [
        MediaItem(modality, mm_hash, _placeholder(place, prompt_len))
        for mm_hash, place in zip(hashes, places, strict=True)
    ]


def _placeholder(value: tuple[int, int] | Placeholder, prompt_len: int) -> Placeholder:
    where = Placeholder(*value) if isinstance(value, tuple) else value
    if where.offset < 0 or where.length < 1 or where.end > prompt_len:
        raise InvalidTransferError(
            f"placeholder ({where.offset}, {where.length}) lies outside the expanded prompt "
            f"of {prompt_len} tokens",
            reason="invalid_placeholder",
        )
    if where.is_embed is not None and len(where.is_embed) != where.length:
        raise InvalidTransferError(
            f"is_embed has {len(where.is_embed)} entries for {where.length} tokens",
            reason="invalid_placeholder",
        )
    return where


def _check_overlap(placeholders: Sequence[Placeholder]) -> None:
    ordered = sorted(placeholders, key=lambda p: p.offset)
    for before, after in pairwise(ordered):
        if after.offset < before.end:
            raise InvalidTransferError(
                f"placeholders overlap: ({before.offset}, {before.length}) and "
                f"({after.offset}, {after.length})",
                reason="invalid_placeholder",
            )


def _convert(extra: Mapping[str, Any]) -> _Extra:
    try:
        return msgspec.convert(extra, _Extra)
    except msgspec.ValidationError as error:
        text = str(error)
        if len(text) > 200:  # msgspec quotes what it does not know
            text = f"{text[:100]}...{text[-100:]}"
        raise InvalidTransferError(
            f"extra_args: {text}, got {short(_at(text, extra))}", reason=_reason(text)
        ) from None


#: Of the first thing wrong: the label of its field, else ``invalid_metadata``.
_REASONS: Final = {
    "expanded_token_ids": "invalid_tokens",
    "mm_hashes": "invalid_hash",
    "mm_hashes_by_modality": "invalid_hash",
    "mm_placeholders": "invalid_placeholder",
    "mm_placeholders_by_modality": "invalid_placeholder",
    "size": "invalid_size",
    "shape": "invalid_size",
    "name": "invalid_name",
    "socket": "invalid_name",
    "index": "invalid_count",
    "part": "invalid_slot",
    "slot": "invalid_slot",
    "offset": "invalid_slot",
    "generation": "invalid_slot",
    "dtype_str": "invalid_type",
}


def _reason(text: str) -> str:
    if f"of length <= {MAX_ITEMS}" in text:
        return "invalid_count"
    # As msgspec writes it: "... - at `$.items[0].size`", "... missing required field `size` ...".
    names = re.findall(r"\.(\w+)", text) + re.findall(r"field `(\w+)", text)
    return next((_REASONS[name] for name in names if name in _REASONS), "invalid_metadata")


def _at(text: str, value: Any) -> Any:
    """What lies where msgspec says that something is wrong, or around it."""
    path = text.rpartition("`$")[2].partition("[...]")[0] if "`$" in text else ""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return value
