"""What an identity stands for, so that no prompt makes room for another item than it names.

Engines take an item that they hold by hash alone. Where a prompt has room for more or fewer
embeddings than that item has, or for another modality, they end for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from dynamo_worker_ext.errors import CacheMissError, InvalidTransferError
from dynamo_worker_ext.wire import Modality, Transfer

#: Identities that are remembered, some 10 MB: more than vLLM's cache has room for items of 128 KB.
_KNOWN: Final = 32_768


class Size(NamedTuple):
    """What is known of an item: its modality, and the embeddings that its encoder makes."""

    modality: Modality
    embeds: int


def sizes_of(transfer: Transfer) -> list[tuple[str, Size]]:
    """The identities of a transfer, and what the prompt has room for."""
    return [(one.mm_hash, Size(one.modality, one.placeholder.embeds)) for one in transfer.items]


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

    def conflict(self, items: Iterable[tuple[str, Size]]) -> tuple[str, Size, Size] | None:
        """Compare identities with what is known of them, and with each other.

        Returns:
            The first that stands for two items: its name, the size known and the other one.
        """
        seen: dict[str, Size] = {}
        for mm_hash, size in items:
            known = self._sizes.get(mm_hash) or seen.setdefault(mm_hash, size)
            if known != size:
                return mm_hash, known, size
        return None

    def check(self, transfer: Transfer) -> None:
        """Compare the items of a transfer with what is known of them, and with each other.

        Raises:
            InvalidTransferError: ``invalid_placeholder``.
        """
        if (conflict := self.conflict(sizes_of(transfer))) is not None:
            mm_hash, known, size = conflict
            raise InvalidTransferError(
                f"item {mm_hash} is known as {known.modality} of {known.embeds} embeddings, and "
                f"the prompt has room for {size.modality} of {size.embeds}; all frontends of a "
                "model need the same processor configuration",
                reason="invalid_placeholder",
            )

    def admit(self, items: Sequence[tuple[str, Size]]) -> None:
        """Enter what was checked before something was waited for.

        Raises:
            CacheMissError: another request has entered one as another item meanwhile.
        """
        for mm_hash, size in items:
            if self.differs(mm_hash, size):
                raise CacheMissError([mm_hash])
            self.enter(mm_hash, size)
