"""Transfer metadata as a sender writes it: what `transfer` reads back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from dynamo_worker_ext.wire.types import ArenaRef, ItemRef, NixlRef, ShmRef

#: Transports whose metadata says of each item which it is: requests may mix modalities, and may
#: leave out items. Dynamo's own names one modality for all.
NAMES_ITEMS: Final = frozenset({"arena"})

#: What Dynamo 1.6.1 calls the one buffer of an item; there is no pickle in it.
_FIELD_NAME: Final = "__pickled_kwargs_item__"


def write_offer(
    transport: str,
    modalities: Sequence[str],
    mm_hashes: Sequence[str],
    refs: Mapping[int, ItemRef],
) -> dict[str, Any]:
    """The part of ``extra_args`` that says where the items of a request lie.

    Args:
        transport: its name.
        modalities, mm_hashes: of all items of the request, aligned.
        refs: of the items that are sent, by index; at least one, all of one sender, and all that
            there are unless the transport is in `NAMES_ITEMS`.

    Returns:
        ``{"mm_kwargs_<transport>": ...}``; plain JSON values.

    Raises:
        ValueError: this transport's metadata cannot say it.
    """
    if transport == "arena":
        offer = _arena(modalities, mm_hashes, cast(Mapping[int, ArenaRef], refs))
    elif len(set(modalities)) != 1 or sorted(refs) != list(range(len(mm_hashes))):
        raise ValueError(f"mm_kwargs_{transport} takes all items of a request, of one modality")
    else:
        offer = {"modality": modalities[0], "mm_hashes": list(mm_hashes)}
        if transport == "shm":
            offer["items"] = [_segment(cast(ShmRef, refs[i])) for i in sorted(refs)]
        elif transport == "nixl":
            offer["tensor_specs"] = [_buffer(cast(NixlRef, refs[i])) for i in sorted(refs)]
        else:
            raise ValueError(f"nothing writes mm_kwargs_{transport}")
    return {f"mm_kwargs_{transport}": offer}


def _segment(ref: ShmRef) -> dict[str, Any]:
    return {"name": ref.name, "size": ref.size}


def _buffer(ref: NixlRef) -> dict[str, Any]:
    return {
        "field_name": _FIELD_NAME,
        "shape": [ref.size],
        "dtype_str": "uint8",
        "serialized_request": dict(ref.descriptor),
    }


def _arena(
    modalities: Sequence[str], mm_hashes: Sequence[str], refs: Mapping[int, ArenaRef]
) -> dict[str, Any]:
    hashes: dict[str, list[str]] = {}
    items = []
    for at, (modality, mm_hash) in enumerate(zip(modalities, mm_hashes, strict=True)):
        index = len(hashes.setdefault(modality, []))
        hashes[modality].append(mm_hash)
        if (ref := refs.get(at)) is not None:
            items.append(
                {
                    "modality": modality,
                    "index": index,
                    "part": ref.part,
                    "slot": ref.slot,
                    "offset": ref.offset,
                    "size": ref.size,
                    "generation": ref.generation,
                }
            )
    [(socket, host_id)] = {(ref.socket, ref.host_id) for ref in refs.values()}
    return {"socket": socket, "host_id": host_id, "items": items, "mm_hashes": hashes}
