"""Reading all of a request's media side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_worker_ext.errors import InvalidTransferError, RequestError
from dynamo_worker_ext.hashing import is_mm_hash
from dynamo_worker_ext.wire import encoded
from dynamo_worker_ext.wire.transfer import modality_list, parse_transfer, short
from dynamo_worker_ext.wire.types import MODALITIES, MediaRequest, Modality, Transfer


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
    extra = extra if isinstance(extra, dict) else {}
    raw = _parse_raw(request.get("multi_modal_data"))
    hashes = _parse_raw_hashes(extra) if raw else {}
    kwargs = request.get("mm_processor_kwargs") or extra.get("mm_processor_kwargs") or None
    io_kwargs = request.get("media_io_kwargs") or None
    transfer: Transfer | None = None
    transfer_error: InvalidTransferError | None = None
    try:
        preprocessed = transfer = parse_transfer(extra, max_item_bytes)
        if (handle := request.get("encoder_result")) is not None:
            token_ids = request.get("token_ids") or []
            encodings = encoded.read(handle, token_ids, max_item_bytes, preprocessed)
            # With options an encode worker derives identities of its own.
            if encodings is not None and preprocessed is None and not (kwargs or io_kwargs):
                encoded.check_identities(encodings, hashes)
            transfer = encodings or transfer
    except InvalidTransferError as error:
        transfer, transfer_error = None, error
    return MediaRequest(
        token_ids=request.get("token_ids") or [],
        transfer=transfer,
        transfer_error=transfer_error,
        raw=raw,
        mm_hashes=hashes,
        user_uuids=_parse_user_uuids(request.get("multi_modal_uuids")),
        mm_processor_kwargs=_object_or_none("mm_processor_kwargs", kwargs),
        media_io_kwargs=_object_or_none("media_io_kwargs", io_kwargs),
    )


def _parse_raw(value: object) -> dict[Modality, Sequence[Mapping[str, Any]]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"multi_modal_data is an object, got {short(value)}")
    if embeds := [str(name) for name in value if str(name).endswith("_embeds") and value[name]]:
        raise RequestError(
            f"multi_modal_data.{short(embeds[0])}: a prompt's own embeddings are not taken; send "
            "the media"
        )
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
            values = modality_list(extra, "mm_hashes", modality)
        except InvalidTransferError:
            continue
        if values and all(is_mm_hash(v) for v in values):
            result[modality] = tuple(values)
    return result


def _parse_user_uuids(value: object) -> dict[Modality, tuple[str | None, ...]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"multi_modal_uuids is an object, got {short(value)}")
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
    raise RequestError(f"{name} is an object, got {short(value)}")
