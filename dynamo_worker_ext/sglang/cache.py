"""Features of media that the worker has seen, so that a repeat is neither read nor processed."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from dynamo_worker_ext.sglang.features import Features
from dynamo_worker_ext.sglang.llava import LlavaImage

#: What is kept of one item.
Kept = Features | LlavaImage


class FeatureCacheStatistics(NamedTuple):
    """Entries and the memory that they take, in bytes."""

    entries: int
    bytes: int


class FeatureCache:
    """An LRU by scope and identity, bounded in bytes. Not thread-safe.

    A scope keeps requests with different cache salts or adapters apart: none of them can learn
    that another has sent an item.

    Args:
        max_bytes: 0 switches it off.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._entries

    def get(self, key: tuple[str, str]) -> Kept | None:
        """What is kept under (scope, mm_hash), which is from now on the newest."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: tuple[str, str], features: Kept) -> None:
        """Keep `features`, unless they alone are larger than the cache."""
        if features.nbytes > self._max_bytes:
            return
        self.drop(key)
        self._entries[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.nbytes

    def drop(self, key: tuple[str, str]) -> None:
        """Forget one entry, if it is there."""
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= entry.nbytes

    def statistics(self) -> FeatureCacheStatistics:
        """What is held now."""
        return FeatureCacheStatistics(len(self._entries), self._bytes)
