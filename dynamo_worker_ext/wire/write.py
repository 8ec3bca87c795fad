"""Transfer metadata as a sender writes it: what `transfer` reads back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from dynamo_worker_ext.wire.types import ArenaRef, ItemRef, ShmRef

#: Transports whose metadata says of each item which it is: requests may mix modalities, and may
#: leave out items. Dynamo's own names one modality for all.
NAMES_ITEMS: Final = frozenset({"arena"})


def write_offer(
    transport: str,
    modalities: Sequence[str],
    mm_hashes: Sequence[str],
    refs: Mapping[int, ItemRef],
) -> dict[str, Any]:
    """The part of ``extra_args`` that says where the items of a request lie.

    Args:
        transport: ``arena`` or ``shm``.
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
    elif transport == "shm":
        segments = cast(Mapping[int, ShmRef], refs)
        items = [{"name": segments[i].name, "size": segments[i].size} for i in sorted(segments)]
        offer = {"modality": modalities[0], "items": items, "mm_hashes": list(mm_hashes)}
    else:
        raise ValueError(f"nothing writes mm_kwargs_{transport}")
    return {f"mm_kwargs_{transport}": offer}


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
