"""What a request says about its offered media: what `dynamo_worker_ext.wire` reads, written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

#: Transports whose metadata names the modality of each item. Dynamo's own name one for all.
MIXING: Final[frozenset[str]] = frozenset()


def _shm(refs: Sequence[Any]) -> dict[str, Any]:
    return {"items": [{"name": ref.name, "size": ref.size} for ref in refs]}


_WRITERS: Final[Mapping[str, Callable[[Sequence[Any]], dict[str, Any]]]] = {"shm": _shm}


def write_offer(
    transport: str, modalities: Sequence[str], mm_hashes: Sequence[str], refs: Sequence[Any]
) -> dict[str, Any]:
    """The part of ``extra_args`` that says where all items of a request lie.

    Args:
        transport: its name; one in `MIXING` if the modalities differ.
        modalities, mm_hashes, refs: of each item, aligned.
    """
    offer = _WRITERS[transport](refs) | {"mm_hashes": list(mm_hashes)}
    offer["modality"] = modalities[0]
    return {f"mm_kwargs_{transport}": offer}
