"""What a frontend puts into a request, checked.

Dynamo 1.6.1 writes the fields read here (``dynamo.frontend.vllm_processor`` and the Rust
preprocessor); DESIGN calls them transfer metadata and raw media. Every bound on what comes
from the wire is checked in this module and nowhere else: a `MediaRequest` can be trusted.

    extra_args.mm_kwargs_shm | mm_kwargs_nixl   where the pre-processed items lie
    extra_args.mm_hashes[_by_modality]          identity of each item, 16 or 64 hex
    extra_args.mm_placeholders[_by_modality]    where each item stands in the expanded prompt
    extra_args.expanded_token_ids               the expanded prompt
    multi_modal_data                            raw media: URLs, data URIs, decoded pixels

Malformed transfer metadata is no reason to refuse a request that also carries raw media, so
`parse` never raises for it: the error is handed on in `MediaRequest.transfer_error`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamo_worker_ext.errors import InvalidTransferError, RequestError
from dynamo_worker_ext.hashing import is_mm_hash

Modality = Literal["image", "video", "audio"]
MODALITIES: Final[tuple[Modality, ...]] = ("image", "video", "audio")

#: Transports in the order in which a receiver prefers them.
TRANSPORTS: Final = ("shm", "nixl")

#: More items than any model takes; keeps a hostile count from costing time.
MAX_ITEMS: Final = 4096

_STRICT = ConfigDict(extra="ignore", strict=True, frozen=True)
_M = TypeVar("_M", bound=BaseModel)
# Not pydantic: it takes four times as long for a prompt of a thousand tokens.
_Tokens = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Where one item stands in the expanded prompt.

    Attributes:
        offset: index of the first token.
        length: number of tokens, at least 1.
        is_embed: of each of these tokens, whether an embedding replaces it; None for all.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item of a transfer: what it is and where it stands."""

    modality: Modality
    mm_hash: str
    placeholder: Placeholder


@dataclass(frozen=True, slots=True)
class ShmRef:
    """One item in a shared-memory segment: its plain name and payload size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class NixlRef:
    """One item that a NIXL agent offers: payload size in bytes and the agent's descriptor."""

    size: int
    descriptor: Mapping[str, Any]


ItemRef = ShmRef | NixlRef


@dataclass(frozen=True, slots=True)
class Transfer:
    """Validated transfer metadata of one request.

    Attributes:
        expanded_token_ids: the prompt with every placeholder in full.
        items: the items in the order of the sender.
        offers: for each transport the references, aligned with `items`. Dynamo's senders leave
            out an item that the frontend's own cache held and do not say which: then there are
            fewer references than items, and `is_complete` is False.
    """

    expanded_token_ids: list[int]
    items: tuple[MediaItem, ...]
    offers: Mapping[str, tuple[ItemRef, ...]]

    def is_complete(self, transport: str) -> bool:
        """Whether `transport` offers every item."""
        return len(self.offers[transport]) == len(self.items)


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """The media side of one request.

    Attributes:
        token_ids: the prompt as the frontend tokenised it, placeholders not expanded.
        transfer: transfer metadata, if any came and it was well formed.
        transfer_error: why it was not.
        raw: raw media by modality, in prompt order, as Dynamo's loaders take them.
        mm_hashes: identities that the frontend gave to the raw media, by modality.
        user_uuids: cache identities chosen by the client, by modality.
        mm_processor_kwargs: options for the model's processor; they change what an item is.
        media_io_kwargs: options for decoding, by modality.
    """

    token_ids: list[int]
    transfer: Transfer | None = None
    transfer_error: InvalidTransferError | None = None
    raw: Mapping[Modality, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    mm_hashes: Mapping[Modality, tuple[str, ...]] = field(default_factory=dict)
    user_uuids: Mapping[Modality, tuple[str | None, ...]] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] | None = None
    media_io_kwargs: Mapping[str, Any] | None = None

    def count(self, modality: Modality) -> int:
        """Items of one modality that this request names, by the larger of its two ways in."""
        moved = sum(i.modality == modality for i in self.transfer.items) if self.transfer else 0
        return max(moved, len(self.raw.get(modality, ())))

    def identities(self, modality: Modality) -> tuple[str | None, ...] | None:
        """Identities of one modality's raw media, aligned with it: the client's own before the
        frontend's. None where there are none or their count differs."""
        values = self.user_uuids.get(modality) or self.mm_hashes.get(modality)
        return values if values and len(values) == len(self.raw.get(modality, ())) else None


class _ShmItem(BaseModel):
    model_config = _STRICT
    # A plain name: /dev/shm knows no folders, and a leading dot would be a hidden file.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,249}$")]
    size: Annotated[int, Field(ge=1)]


class _Shm(BaseModel):
    model_config = _STRICT
    modality: Modality
    items: Annotated[list[_ShmItem], Field(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: Annotated[list[str], Field(max_length=MAX_ITEMS)] = []


class _NixlSpec(BaseModel):
    model_config = _STRICT
    shape: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(min_length=1, max_length=8)]
    dtype_str: Literal["uint8"]
    serialized_request: dict[str, Any]


class _Nixl(BaseModel):
    model_config = _STRICT
    modality: Modality
    tensor_specs: Annotated[list[_NixlSpec], Field(min_length=1, max_length=MAX_ITEMS)]
    mm_hashes: Annotated[list[str], Field(max_length=MAX_ITEMS)] = []


class _PlaceholderDict(BaseModel):
    model_config = _STRICT
    offset: int
    length: int
    is_embed: list[bool] | None = None


def parse(request: Mapping[str, Any], *, max_item_bytes: int) -> MediaRequest:
    """Read the media side of one of Dynamo's preprocessed requests.

    Args:
        request: the request as the Backend SDK hands it to ``generate``.
        max_item_bytes: the largest payload of one item that is accepted (``--mm-max-item-mb``).

    Raises:
        RequestError: what the client itself sent is malformed. Transfer metadata, which a
            frontend writes, never raises; see `MediaRequest.transfer_error`.
    """
    extra = request.get("extra_args")
    extra = extra if isinstance(extra, Mapping) else {}
    transfer: Transfer | None = None
    transfer_error: InvalidTransferError | None = None
    try:
        transfer = _parse_transfer(extra, max_item_bytes)
    except InvalidTransferError as error:
        transfer_error = error
    kwargs = request.get("mm_processor_kwargs") or extra.get("mm_processor_kwargs") or None
    io_kwargs = request.get("media_io_kwargs") or None
    return MediaRequest(
        token_ids=request.get("token_ids") or [],
        transfer=transfer,
        transfer_error=transfer_error,
        raw=_parse_raw(request.get("multi_modal_data")),
        mm_hashes=_parse_raw_hashes(extra),
        user_uuids=_parse_user_uuids(request.get("multi_modal_uuids")),
        mm_processor_kwargs=_object_or_none("mm_processor_kwargs", kwargs),
        media_io_kwargs=_object_or_none("media_io_kwargs", io_kwargs),
    )


def _parse_transfer(extra: Mapping[str, Any], max_item_bytes: int) -> Transfer | None:
    offers: dict[str, tuple[ItemRef, ...]] = {}
    modality: Modality | None = None
    meta_hashes: list[str] = []
    if (raw := extra.get("mm_kwargs_shm")) is not None:
        shm = _model(_Shm, raw, "mm_kwargs_shm")
        offers["shm"] = tuple(ShmRef(i.name, i.size) for i in shm.items)
        modality, meta_hashes = shm.modality, shm.mm_hashes
    if (raw := extra.get("mm_kwargs_nixl")) is not None:
        nixl = _model(_Nixl, raw, "mm_kwargs_nixl")
        offers["nixl"] = tuple(
            NixlRef(prod(s.shape), s.serialized_request) for s in nixl.tensor_specs
        )
        modality, meta_hashes = nixl.modality, nixl.mm_hashes
    if modality is None:
        return None

    for transport, refs in offers.items():
        for ref in refs:
            if ref.size > max_item_bytes:
                raise InvalidTransferError(
                    f"mm_kwargs_{transport} names an item of {ref.size} bytes; at most "
                    f"{max_item_bytes} are accepted (--mm-max-item-mb)",
                    reason="invalid_size",
                )
    tokens = _parse_tokens(extra.get("expanded_token_ids"))
    hashes = _modality_list(extra, "mm_hashes", modality)
    if hashes and meta_hashes and hashes != meta_hashes:
        raise InvalidTransferError(
            "mm_hashes of the request and of its transfer metadata differ", reason="invalid_hash"
        )
    hashes = hashes or meta_hashes
    for value in hashes:
        if not is_mm_hash(value):
            raise InvalidTransferError(
                f"an mm_hash is 16 or 64 lower-case hex characters, got {_short(value)}",
                reason="invalid_hash",
            )
    placeholders = [
        _parse_placeholder(value, len(tokens))
        for value in _modality_list(extra, "mm_placeholders", modality)
    ]
    most = max(len(refs) for refs in offers.values())
    if not hashes or len(hashes) != len(placeholders) or most > len(hashes):
        raise InvalidTransferError(
            f"counts differ: {most} item(s), {len(hashes)} mm_hashes, "
            f"{len(placeholders)} placeholders",
            reason="invalid_count",
        )
    _check_overlap(placeholders)
    items = tuple(MediaItem(modality, h, p) for h, p in zip(hashes, placeholders, strict=True))
    return Transfer(tokens, items, offers)


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
            f"a placeholder is [offset, length] or an object, got {_short(value)}",
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


def _modality_list(extra: Mapping[str, Any], key: str, modality: Modality) -> list[Any]:
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
            f"{key} is a list of at most {MAX_ITEMS}, got {_short(value)}", reason="invalid_count"
        )
    return list(value)


def _parse_raw(value: object) -> dict[Modality, Sequence[Mapping[str, Any]]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"multi_modal_data is an object, got {_short(value)}")
    result: dict[Modality, Sequence[Mapping[str, Any]]] = {}
    for modality in MODALITIES:
        items = value.get(f"{modality}_url")
        if not items:
            continue
        if not isinstance(items, list) or not all(isinstance(i, Mapping) for i in items):
            raise RequestError(f"multi_modal_data.{modality}_url is a list of objects")
        result[modality] = items
    return result


def _parse_raw_hashes(extra: Mapping[str, Any]) -> dict[Modality, tuple[str, ...]]:
    """Identities for raw media. One that is malformed is left away: the engine hashes itself."""
    result: dict[Modality, tuple[str, ...]] = {}
    for modality in MODALITIES:
        try:
            values = _modality_list(extra, "mm_hashes", modality)
        except InvalidTransferError:
            continue
        if values and all(is_mm_hash(v) for v in values):
            result[modality] = tuple(values)
    return result


def _parse_user_uuids(value: object) -> dict[Modality, tuple[str | None, ...]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"multi_modal_uuids is an object, got {_short(value)}")
    result: dict[Modality, tuple[str | None, ...]] = {}
    for modality in MODALITIES:
        uuids = value.get(f"{modality}_url") or value.get(modality)
        if not uuids:
            continue
        if not isinstance(uuids, list) or not all(
            u is None or (isinstance(u, str) and u) for u in uuids
        ):
            raise RequestError(f"multi_modal_uuids.{modality} is a list of strings and nulls")
        result[modality] = tuple(uuids)
    return result


def _object_or_none(name: str, value: object) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return value
    raise RequestError(f"{name} is an object, got {_short(value)}")


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
    return f"{where}: {first['msg']}, got {_short(first['input'])}"


def _short(value: object) -> str:
    """A value from the wire, fit for an error message and a log line."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else ""
    return text[:80] if text else type(value).__name__
