"""What an identity stands for, so that no prompt makes room for another item than it names.

Engines take an item that they hold by hash alone. Where a prompt has room for more or fewer
embeddings than that item has, or for another modality, they end for everybody.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.wire import Modality, Transfer

#: Identities that are remembered, some 10 MB: more than vLLM's cache has room for items of 128 KB.
_KNOWN: Final = 32_768


class Size(NamedTuple):
    """What is known of an item: its modality, and the embeddings that its encoder makes."""

    modality: Modality
    embeds: int


class ItemSizes:
    """Sizes of items by identity; those used last are kept.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int = _KNOWN) -> None:
        self._sizes: dict[str, Size] = {}
        self._capacity = capacity

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._sizes

    def differs(self, mm_hash: str, size: Size) -> bool:
        """Whether the identity is known to be an item of another size."""
        return self._sizes.get(mm_hash, size) != size

    def enter(self, mm_hash: str, size: Size) -> None:
        """Remember what the engine is given."""
        self._sizes.pop(mm_hash, None)
        self._sizes[mm_hash] = size
        if len(self._sizes) > self._capacity:
            del self._sizes[next(iter(self._sizes))]

    def check(self, transfer: Transfer) -> None:
        """Compare the items of a transfer with what is known of them, and with each other.

        Raises:
            InvalidTransferError: ``invalid_placeholder``.
        """
        seen: dict[str, Size] = {}
        for item in transfer.items:
            size = Size(item.modality, item.placeholder.embeds)
            known = self._sizes.get(item.mm_hash) or seen.setdefault(item.mm_hash, size)
            if known != size:
                raise InvalidTransferError(
                    f"item {item.mm_hash} is known as {known.modality} of {known.embeds} "
                    f"embeddings, and the prompt has room for {size.modality} of {size.embeds}; "
                    "all frontends of a model need the same processor configuration",
                    reason="invalid_placeholder",
                )
