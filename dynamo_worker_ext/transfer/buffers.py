"""A pool of memory that has been touched before.

The first touch of a 4 KB page costs about 2.7 us, which for an item of 25 MB is several times the
copy itself. `BufferPool` keeps what was used, so that a payload is read into pages that exist.

A buffer comes back by itself: whoever holds the view, a slice of it, or a tensor or array over it
holds the buffer, and with the last of them it returns. There is no release to forget.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

_PAGE: Final = 4096
_HUGE: Final = 2 << 20


class PoolStatistics(NamedTuple):
    """What a pool holds now.

    Attributes:
        free: buffers waiting for use.
        leased: buffers somebody holds.
        free_bytes: memory of the waiting ones; never above the pool's bound.
        bytes: memory of all of them.
    """

    free: int
    leased: int
    free_bytes: int
    bytes: int


class _Slab:
    """One piece of memory of a size class."""

    __slots__ = ("capacity", "lease", "memory", "returned")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Private, because Python's default for anonymous memory is shared, which is slower to
        # touch and survives into forked children.
        self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= _HUGE:
            with suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.lease: weakref.ref[Any] | None = None
        self.returned = 0


def size_class(nbytes: int) -> int:
    """The capacity that a lease of `nbytes` is given: 4 KB or 25 % more at most."""
    step = max(_PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


class BufferPool:
    """Reusable buffers, in the process of the receiver. All methods are thread-safe.

    Args:
        max_bytes: memory kept for later at most. What is leased is not bounded here: it belongs
            to those who hold it, and what does not fit when it returns is given back to the
            operating system, the longest unused first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[_Slab]] = {}  # by capacity, the last returned at the end
        self._free_bytes = 0
        self._leased: dict[int, _Slab] = {}  # by the id of the weak reference to its lease
        self._turn = 0
        # Callbacks only append here. They run wherever the last reference goes, also inside
        # this class while it holds its lock, and so must not take it.
        self._returning: deque[weakref.ref[Any]] = deque()

    def lease(self, nbytes: int, *, offset: int = 0) -> memoryview:
        """Borrow memory until nobody holds the view, nor anything made over it.

        Args:
            nbytes: length of the view, at least 1.
            offset: the address of the view is this many bytes past a page boundary.

        Returns:
            A writable view of bytes with arbitrary content.
        """
        if nbytes < 1 or offset < 0:
            raise ValueError(f"a lease is at least 1 byte at an offset >= 0: {nbytes}, {offset}")
        capacity = size_class(offset + nbytes)
        with self._lock:
            self._collect()
            same = self._free.get(capacity)
            slab = same.pop() if same else None
            if slab is not None:
                self._free_bytes -= capacity
                if not same:
                    del self._free[capacity]
        if slab is None:
            slab = _Slab(capacity)
        # The view's owner. Every slice, tensor and array over the view refers to it in the end,
        # and it is the one object here that is new for each lease and can be watched weakly.
        lease = np.ndarray(nbytes, np.uint8, slab.memory, offset)
        slab.lease = weakref.ref(lease, self._returning.append)
        with self._lock:
            self._leased[id(slab.lease)] = slab
        return lease.data

    def is_warm(self, sizes: Iterable[int]) -> bool:
        """Whether leases of so many bytes, offsets included, would all be of used memory."""
        wanted = Counter(map(size_class, sizes))
        with self._lock:
            self._collect()
            return all(len(self._free.get(c, ())) >= count for c, count in wanted.items())

    def statistics(self) -> PoolStatistics:
        """What the pool holds now."""
        with self._lock:
            self._collect()
            free = sum(len(slabs) for slabs in self._free.values())
            total = self._free_bytes + sum(slab.capacity for slab in self._leased.values())
            return PoolStatistics(free, len(self._leased), self._free_bytes, total)

    def check(self) -> None:
        """Make sure that the pool is whole.

        Raises:
            RuntimeError: the books do not add up, or a buffer is both free and held.
        """
        with self._lock:
            self._collect()
            free = [slab for slabs in self._free.values() for slab in slabs]
            leased = self._leased.values()
            faults = []
            if sum(slab.capacity for slab in free) != self._free_bytes:
                faults.append("free bytes do not add up")
            if self._free_bytes > self.max_bytes:
                faults.append(f"{self._free_bytes} bytes are free, {self.max_bytes} allowed")
            if len({*map(id, free), *map(id, leased)}) != len(free) + len(leased):
                faults.append("a buffer is in two places")
            if any(slab.lease is not None and slab.lease() is not None for slab in free):
                faults.append("a free buffer is still held")
            if any(slab.capacity != key for key, slabs in self._free.items() for slab in slabs):
                faults.append("a buffer is in the wrong size class")
        if faults:
            raise RuntimeError(f"the buffer pool is not whole: {'; '.join(faults)}")

    def _collect(self) -> None:
        """Take in what has come back and let go of what is too much. Called with the lock held."""
        while self._returning:
            slab = self._leased.pop(id(self._returning.popleft()))
            self._turn += 1
            slab.returned = self._turn
            self._free.setdefault(slab.capacity, []).append(slab)
            self._free_bytes += slab.capacity
        while self._free_bytes > self.max_bytes:
            oldest = min(self._free.values(), key=lambda slabs: slabs[0].returned)
            slab = oldest.pop(0)
            self._free_bytes -= slab.capacity
            if not oldest:
                del self._free[slab.capacity]
