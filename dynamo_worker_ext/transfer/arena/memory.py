"""The memory objects of an arena, as their sender makes them and as a receiver maps them.

A part is one ``memfd``: a table with an entry for each slot, then the slots. It is sealed against
changes of its size, so that no look at it can end in SIGBUS, and against new writable mappings, so
that only its sender can write.

    entry   <Q generation> <Q offset> <Q size>; generation 0: nothing is offered
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from dynamo_worker_ext.errors import InvalidTransferError, SegmentError
from dynamo_worker_ext.transfer.codec import Piece
from dynamo_worker_ext.wire import ArenaRef

PAGE: Final = mmap.PAGESIZE
SLOTS: Final = 2048
TABLE_BYTES: Final = 1 << 16  # whole pages everywhere, so that no payload shares one with the table

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE: Final = 0x10  # Python has no names for these three
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23

#: Touched in one call at most; other threads that map memory wait meanwhile.
_POPULATE_BYTES: Final = 2 << 20

_LIBC: Final = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class OwnPart:
    """One memory object, in the process of the sender.

    Making one blocks for about 0.7 ms a MB. All its memory is there when it is made.

    Args:
        nbytes: length with the table, in whole pages.

    Raises:
        OSError: the memory cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("dwe_arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            memory = mmap.mmap(self.fd, nbytes)
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = np.frombuffer(memory, np.uint8)
            _populate(self._bytes, _POPULATE_WRITE)
            # Where populating failed or is not known, this is the error instead of a later SIGBUS.
            os.posix_fallocate(self.fd, 0, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            with suppress(OSError):  # Linux before 5.1
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise
        self._table = _table(self._bytes)

    def fill(self, offset: int, pieces: Sequence[Piece]) -> None:
        """Copy pieces to `offset`, one behind the other. Without the GIL where they are large."""
        for piece in pieces:
            if length := memoryview(piece).nbytes:
                np.copyto(self._bytes[offset : offset + length], np.frombuffer(piece, np.uint8))
                offset += length

    def publish(self, slot: int, generation: int, offset: int, size: int) -> None:
        """Let receivers find what was filled in."""
        at = 3 * slot
        self._table[at + 1] = offset
        self._table[at + 2] = size
        self._table[at] = generation

    def retract(self, slot: int) -> None:
        """Let nobody find it any more."""
        self._table[3 * slot] = 0

    def generation(self, slot: int) -> int:
        """What receivers see; 0 for nothing."""
        return self._table[3 * slot]

    def close(self) -> None:
        """Give up the descriptor. The memory goes with the last who has it mapped."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _Shown(NamedTuple):
    """A range of pages that was handed out."""

    start: int
    end: int
    lease: weakref.ref[Any]


class MappedPart:
    """One memory object of a sender, in the process of a receiver.

    The mapping is private and writable: torch takes no read-only memory, and what is written
    makes a copy of that page which nobody else sees. Such a copy would hide what the sender writes
    later, so it is dropped before the page is shown again: by `settle`, when nobody waits, or else
    by `view`.

    Args:
        fd: the object; closed here if this fails, else by `close`.
        nbytes: its length, as the sender says.

    Raises:
        SegmentError: ``segment_foreign`` (not the sealed and complete object that it should be),
            ``segment_refused``.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self._shown: list[_Shown] = []  # since they were last looked over
        self.settling = False  # somebody calls `settle` until there is no more
        try:
            self._check_object()
            self._memory = self._map(0, nbytes)
            self._bytes = np.frombuffer(self._memory, np.uint8)
            _populate(self._bytes, _POPULATE_READ)
        except BaseException:
            self.close()
            raise
        self._table = _table(self._bytes)

    def check(self, ref: ArenaRef) -> None:
        """Make sure that what `ref` names is there now.

        Raises:
            InvalidTransferError: ``invalid_slot``, ``invalid_size``: its sender never gave it.
            SegmentError: ``segment_stale``, ``segment_short``.
        """
        if not 0 <= ref.slot < SLOTS or ref.offset < TABLE_BYTES:
            raise _no_such(ref, f"slots are 0 to {SLOTS - 1}, behind the table")
        if ref.size < 1 or ref.offset + ref.size > self.nbytes:
            raise _no_such(ref, f"the part ends at {self.nbytes}")
        at = 3 * ref.slot
        generation, offset, size = self._table[at : at + 3]
        if generation != ref.generation or not generation:
            raise SegmentError(
                f"slot {ref.part}.{ref.slot} is no longer at generation {ref.generation}: its "
                "sender has withdrawn it",
                reason="segment_stale",
            )
        if offset != ref.offset:
            raise _no_such(ref, f"the slot's payload starts at {offset}")
        if size < ref.size:
            raise SegmentError(
                f"slot {ref.part}.{ref.slot} should hold {ref.size} bytes and holds {size}",
                reason="segment_short",
            )
        if size > ref.size:
            raise InvalidTransferError(
                f"slot {ref.part}.{ref.slot} holds {size} bytes, {ref.size} were named",
                reason="invalid_size",
            )

    def view(self, ref: ArenaRef, let_go: Callable[[], object]) -> memoryview:
        """A writable view of what `ref` names, which must have been checked.

        Args:
            let_go: called once when nobody holds the view nor anything made over it, in whatever
                thread that happens.

        Raises:
            SegmentError: ``segment_refused``; `let_go` is not called.
        """
        start = ref.offset // PAGE * PAGE
        end = -(-(ref.offset + ref.size) // PAGE) * PAGE
        before = [shown for shown in self._shown if shown.start < end and start < shown.end]
        if any(shown.lease() is not None for shown in before):
            # Whoever holds it may have written to it: this one gets a mapping of its own.
            lease = np.ndarray(ref.size, np.uint8, self._map(start, end), ref.offset - start)
        else:
            if before:
                self._forget_writes(start, end)
                self._shown = [
                    shown for shown in self._shown if shown.start < start or end < shown.end
                ]
            lease = np.ndarray(ref.size, np.uint8, self._memory, ref.offset)
            self._shown.append(_Shown(start, end, weakref.ref(lease)))
        weakref.finalize(lease, let_go).atexit = False
        return lease.data

    def settle(self) -> bool:
        """Look over one range that was shown and is held no more; about 10 to 30 us a MB.

        Returns:
            Whether there was one; there may be more.
        """
        live = [shown for shown in self._shown if shown.lease() is not None]
        for at, shown in enumerate(self._shown):
            if shown.lease() is None and not any(
                one.start < shown.end and shown.start < one.end for one in live
            ):
                self._forget_writes(shown.start, shown.end)
                del self._shown[at]
                return True
        return False

    def close(self) -> None:
        """Give up the descriptor. Views stay valid."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _check_object(self) -> None:
        try:
            seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)
        except OSError:  # EINVAL: no memfd at all
            seals = 0
        info = os.fstat(self._fd)
        if seals & _SEALS != _SEALS:
            fault = "is not sealed: it could shrink under its readers"
        elif info.st_size != self.nbytes or self.nbytes <= TABLE_BYTES or self.nbytes % PAGE:
            fault = f"has {info.st_size} bytes where {self.nbytes} were named"
        elif info.st_blocks * 512 < self.nbytes:
            fault = "is not wholly allocated"
        else:
            return
        raise SegmentError(f"an arena's memory {fault}", reason="segment_foreign")

    def _map(self, start: int, end: int) -> mmap.mmap:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            return mmap.mmap(
                self._fd, end - start, flags=mmap.MAP_PRIVATE, prot=protection, offset=start
            )
        except OSError as error:
            raise SegmentError(
                f"{end - start} bytes of an arena cannot be mapped: {error.strerror}",
                reason="segment_refused",
            ) from None

    def _forget_writes(self, start: int, end: int) -> None:
        """Make sure that a range shows the sender's pages, not copies that a write once made."""
        entries = np.zeros((end - start) // PAGE, np.uint64)
        with suppress(OSError):  # a kernel without it; then all is dropped, which is slower
            fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.preadv(fd, [entries.data], (self._bytes.ctypes.data + start) // PAGE * 8)
            finally:
                os.close(fd)
        # Bit 61: a page of a file or of shared memory. A copy, present or swapped, lacks it.
        if not int(np.bitwise_and.reduce(entries)) >> 61 & 1:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def _table(memory: np.ndarray[Any, Any]) -> memoryview:
    """Three numbers a slot; each is read and written as a whole."""
    return memory[: SLOTS * 24].data.cast("Q")


def _populate(memory: np.ndarray[Any, Any], how: int) -> None:
    """Touch all pages. A kernel before 5.14 refuses; then each is touched when it is first used."""
    # Not `mmap.madvise`, which keeps the GIL.
    for start in range(0, memory.nbytes, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, memory.nbytes - start)
        if _LIBC.madvise(memory.ctypes.data + start, length, how):
            return


def _no_such(ref: ArenaRef, what: str) -> InvalidTransferError:
    return InvalidTransferError(
        f"slot {ref.part}.{ref.slot}, {ref.size} bytes at {ref.offset}, does not exist: {what}",
        reason="invalid_slot",
    )
