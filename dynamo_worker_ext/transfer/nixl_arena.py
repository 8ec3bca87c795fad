"""One piece of memory that is registered once, and parts of it.

As with `buffers`, a part comes back by itself with the last view of it: a transfer that was given
up keeps its part for as long as something may still be written there, by holding on to it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.nixl_request import Bytes

_PAGE: Final = 4096

#: How much is touched before its first use. Parts are taken from the front, so what lies behind
#: is touched only when there is a need for it.
_TOUCHED_BYTES: Final = 16 << 20


class ArenaStatistics(NamedTuple):
    """What an arena holds now, in bytes and parts.

    Attributes:
        bytes: all of it.
        free_bytes: what is not lent.
        largest_free_bytes: of this, the most in one piece.
        leased: parts somebody holds.
    """

    bytes: int
    free_bytes: int
    largest_free_bytes: int
    leased: int


class Arena:
    """Memory to move things through, in either process. All methods are thread-safe.

    Args:
        nbytes: rounded up to pages.

    Raises:
        OSError: there is no such amount of memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        whole = np.frombuffer(memory, np.uint8)
        whole[:_TOUCHED_BYTES:_PAGE] = 0
        self.address = int(whole.ctypes.data)
        self._lock = threading.Lock()
        self._free = [(0, self.nbytes)]  # (offset, bytes), by offset, none beside another
        self._lent: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._returning: deque[int] = deque()  # as in `BufferPool`: finalizers take no lock

    def lease(self, nbytes: int) -> Bytes | None:
        """Borrow a part until nobody holds it nor a view over it; None if there is no room.

        Returns:
            (nbytes,), arbitrary content, aligned to 64 bytes.
        """
        size = -(-nbytes // codec.ALIGNMENT) * codec.ALIGNMENT
        with self._lock:
            self._collect()
            at = next((at for at, (_, free) in enumerate(self._free) if free >= size), None)
            if at is None:
                return None
            offset, free = self._free[at]
            self._free[at : at + 1] = [(offset + size, free - size)] if free > size else []
            part = np.ndarray(nbytes, np.uint8, self._memory, offset)
            self._lent[offset] = (size, weakref.ref(part))
        weakref.finalize(part, self._returning.append, offset).atexit = False
        return part

    def statistics(self) -> ArenaStatistics:
        """What the arena holds now."""
        with self._lock:
            self._collect()
            free = [nbytes for _, nbytes in self._free]
            return ArenaStatistics(self.nbytes, sum(free), max(free, default=0), len(self._lent))

    def check(self) -> None:
        """Make sure that the arena is whole.

        Raises:
            RuntimeError: parts overlap or are missing.
        """
        with self._lock:
            self._collect()
            lent = [(offset, size) for offset, (size, _) in self._lent.items()]
            end, faults = 0, []
            for offset, size in sorted(self._free + lent):
                if offset != end:
                    faults.append(f"a part at {offset} where {end} is next")
                end = offset + size
            if end != self.nbytes:
                faults.append(f"{end} of {self.nbytes} bytes are accounted for")
            if any(a + n == b for (a, n), (b, _) in zip(self._free, self._free[1:], strict=False)):
                faults.append("free parts were not joined")
        if faults:
            raise RuntimeError(f"the arena is not whole: {'; '.join(faults)}")

    def _collect(self) -> None:
        """Take in what has come back. Called with the lock held."""
        while self._returning:
            offset = self._returning.popleft()
            size, _ = self._lent.pop(offset)
            insort(self._free, (offset, size))
            at = self._free.index((offset, size))
            if at + 1 < len(self._free) and self._free[at + 1][0] == offset + size:
                size += self._free.pop(at + 1)[1]
                self._free[at] = (offset, size)
            if at and sum(self._free[at - 1]) == offset:
                self._free[at - 1] = (self._free[at - 1][0], self._free[at - 1][1] + size)
                del self._free[at]
