"""Shared memory on one host: one file in ``/dev/shm`` an item, as Dynamo's frontends write them.

`ShmReceiver` trusts neither the name nor the size nor the file behind them, and copies with
``preadv`` instead of mapping: a file that shrinks meanwhile is then a short read, where a mapping
would end the process with SIGBUS. It registers nothing with Python's resource tracker and never
unlinks: a segment belongs to its sender.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from dynamo_worker_ext.errors import (
    InvalidTransferError,
    SegmentError,
    TransferError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import codec, owner
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, MmKwargsSender, Received
from dynamo_worker_ext.transfer.buffers import BufferPool, PoolStatistics
from dynamo_worker_ext.transfer.scheduling import give_way
from dynamo_worker_ext.wire import ShmRef

log = logging.getLogger(__name__)

SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - this is what shared memory is

#: Up to this many bytes a request's segments are copied on the event loop. 2 MB take about 0.3 ms,
#: 8 MB a millisecond or two into memory that was used before, of which there is mostly some; a hop
#: to a thread and back costs 0.3 ms, and more on a busy machine.
READ_INLINE_BYTES: Final = 2 << 20
READ_INLINE_WARM_BYTES: Final = 8 << 20
WRITE_INLINE_BYTES: Final = 256 << 10  # fresh pages cost three times as much

#: Where a payload begins in its buffer, besides what its alignment asks for. The kernel copies
#: six times slower to an address up to 15 bytes past its source's, both modulo a page (AMD Zen's
#: ``rep movsb``), and a segment begins at a page: half a page away it never does.
_APART: Final = 2048

#: A copy looks at its cancellation after this many bytes.
_CHUNK_BYTES: Final = 16 << 20

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,249}\Z")
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_PIECES: Final = 1024  # IOV_MAX on Linux

#: What opening a name answers when there is something else than a file of ours behind it.
_FOREIGN: Final = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM}
_FULL: Final = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}

_T = TypeVar("_T")


class ShmReceiver(MmKwargsReceiver[ShmRef]):
    """Copies segments into pooled memory. Lives in the worker process.

    Args:
        limits: sizes and deadline.
        metrics: where stages and bytes are counted.
        directory: where segments lie.
        trusted_uids: users besides our own whose segments are read, for a frontend that runs as
            somebody else.
        pool_bytes: memory kept for reuse at most; see `BufferPool`.
        threads: segments copied at the same time.
        inline_bytes, inline_warm_bytes: what is copied on the event loop at most.

    Raises:
        TransportUnavailableError: there is no such directory.
    """

    transport: ClassVar[str] = "shm"

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        *,
        directory: str | Path = SHM_DIRECTORY,
        trusted_uids: Collection[int] = (),
        pool_bytes: int = 256 << 20,
        threads: int = 4,
        inline_bytes: int = READ_INLINE_BYTES,
        inline_warm_bytes: int = READ_INLINE_WARM_BYTES,
    ) -> None:
        super().__init__(limits, metrics)
        self._directory = _open_directory(directory)
        self._uids = frozenset({os.geteuid(), *trusted_uids})
        self._pool = BufferPool(pool_bytes)
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="dwe-shm-receive", initializer=give_way
        )
        self._inline_bytes, self._inline_warm_bytes = inline_bytes, inline_warm_bytes
        self._closed = threading.Event()

    def statistics(self) -> PoolStatistics:
        """What the buffer pool holds now."""
        return self._pool.statistics()

    def check(self) -> None:
        """Make sure that the buffer pool is whole; `RuntimeError` if it is not."""
        self._pool.check()

    def _size(self, ref: ShmRef) -> int:
        return ref.size

    def _receive_now(self, refs: Sequence[ShmRef]) -> list[Received] | None:
        if self._closed.is_set():
            raise TransportUnavailableError("the shm receiver is closed")
        total = sum([ref.size for ref in refs])
        if total > self._inline_bytes and (
            total > self._inline_warm_bytes
            or not self._pool.is_warm(_APART + ref.size for ref in refs)
        ):
            return None
        return [Received(self._read(ref)) for ref in refs]

    async def _receive(self, refs: Sequence[ShmRef]) -> list[Received]:
        stop = threading.Event()
        # Not the futures' results: loop and threads hold on to those for a while after the await.
        payloads: dict[int, memoryview] = {}

        def read(at: int, ref: ShmRef) -> None:
            payloads[at] = self._read(ref, stop)
            if stop.is_set():
                payloads.clear()

        loop = asyncio.get_running_loop()
        reads = [loop.run_in_executor(self._executor, read, at, r) for at, r in enumerate(refs)]
        try:
            await asyncio.gather(*reads)
        except BaseException:
            # Also on cancellation: a read that runs cannot be interrupted, but it ends by itself
            # at its next chunk, closes its own descriptor and drops its buffer.
            stop.set()
            payloads.clear()  # the error's traceback would keep what has already arrived
            for waiting in reads:
                waiting.cancel()
            raise
        return [Received(payloads.pop(at)) for at in range(len(refs))]

    async def close(self) -> None:
        """Release everything. Payloads already handed on stay valid. A second call is a no-op."""
        if self._closed.is_set():
            return
        self._closed.set()

        def finish() -> None:
            # Reads in flight use the directory's descriptor; its number must not be reused yet.
            self._executor.shutdown()
            os.close(self._directory)

        await asyncio.to_thread(finish)

    def _read(self, ref: ShmRef, stop: threading.Event | None = None) -> memoryview:
        """Copy one segment, unless told to stop. Blocks; runs in any thread."""
        fd = self._open(ref)
        try:
            self._check_file(ref, os.fstat(fd))
            lead = codec.alignment_lead(os.pread(fd, codec.HEAD_BYTES, 0))
            buffer = self._pool.lease(ref.size, offset=_APART + lead)
            try:
                self._fill(fd, buffer, ref, stop)
            except BaseException:
                # Not left to the garbage collector: the error's traceback refers to this frame.
                buffer.release()
                raise
            return buffer
        except OSError as error:
            raise _unreadable(ref, error) from None
        finally:
            os.close(fd)

    def _open(self, ref: ShmRef) -> int:
        if not _PLAIN_NAME.match(ref.name):
            raise InvalidTransferError(
                f"a segment has a plain file name, got {ref.name[:80]!r}", reason="invalid_name"
            )
        try:
            return os.open(ref.name, _READ, dir_fd=self._directory)
        except FileNotFoundError:
            raise SegmentError(
                f"segment {ref.name} is not here: its sender runs on another host or in another "
                "container, has ended, or has already withdrawn it",
                reason="segment_missing",
            ) from None
        except OSError as error:
            raise _unreadable(ref, error) from None

    def _check_file(self, ref: ShmRef, info: os.stat_result) -> None:
        # No sender makes hard links; one may be another file under a name of the linker's choice.
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise SegmentError(f"segment {ref.name} is not a plain file", reason="segment_foreign")
        if info.st_uid not in self._uids:
            raise SegmentError(
                f"segment {ref.name} belongs to user {info.st_uid}; trusted are "
                f"{sorted(self._uids)}",
                reason="segment_foreign",
            )
        # A larger one is fine: senders may round up to pages.
        if info.st_size < ref.size:
            raise _short(ref, info.st_size)

    def _fill(self, fd: int, buffer: memoryview, ref: ShmRef, stop: threading.Event | None) -> None:
        done = 0
        while done < ref.size:
            if (stop is not None and stop.is_set()) or self._closed.is_set():
                raise TransportUnavailableError(f"reading segment {ref.name} was given up")
            with buffer[done : done + _CHUNK_BYTES] as chunk:
                count = os.preadv(fd, [chunk], done)
            if count == 0:
                raise _short(ref, done)
            done += count


class ShmSender(MmKwargsSender[ShmRef]):
    """Writes each item to a segment of its own. Lives in the frontend process.

    Segments bear their owner's name (`owner`). A sender that starts removes those whose owner was
    killed, and nothing else.

    Args:
        directory: where segments lie.
        options: those of `MmKwargsSender`.

    Raises:
        TransportUnavailableError: there is no such directory.
    """

    transport: ClassVar[str] = "shm"

    def __init__(self, *, directory: str | Path = SHM_DIRECTORY, **options: Any) -> None:
        super().__init__(**options)
        self._directory = _open_directory(directory)
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="dwe-shm-send", initializer=give_way
        )
        self._closed = False
        self._lock = threading.Lock()
        self._live: set[str] = set()  # names that are ours to unlink, written or not yet
        _sweep(self._directory)

    async def _offer(self, payloads: Sequence[Sequence[codec.Piece]]) -> list[ShmRef]:
        if self._closed:
            raise TransportUnavailableError("the shm sender is closed")
        names = owner.names(len(payloads))
        refs = [
            ShmRef(name, codec.payload_size(pieces))
            for name, pieces in zip(names, payloads, strict=True)
        ]
        stop = threading.Event()
        with self._lock:
            self._live.update(names)
        writing = self._start(sum(ref.size for ref in refs), self._write_all, refs, payloads, stop)
        try:
            await asyncio.wrap_future(writing)
        except BaseException:
            # A write that runs goes on behind our back; what it makes is nobody's.
            stop.set()
            writing.add_done_callback(lambda _: self._unlink(names))
            raise
        return refs

    async def withdraw(self, refs: Sequence[ShmRef]) -> None:
        """Unlink segments. Unknown references are ignored."""
        if not self._closed:
            size = sum(ref.size for ref in refs)
            unlinking = self._start(size, self._unlink, [ref.name for ref in refs])
            # Shielded: a caller that is cancelled must not take it out of the thread's queue.
            await asyncio.shield(asyncio.wrap_future(unlinking))

    async def close(self) -> None:
        """Withdraw everything. A second call is a no-op."""
        if self._closed:
            return
        self._closed = True

        def finish() -> None:
            self._executor.shutdown()
            self._unlink(list(self._live))
            os.close(self._directory)

        await asyncio.to_thread(finish)

    def _start(self, nbytes: int, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Do it here if it is little, else in the thread."""
        if nbytes > WRITE_INLINE_BYTES:
            return self._executor.submit(function, *args)
        done: Future[_T] = Future()
        try:
            done.set_result(function(*args))
        except TransferError as error:
            done.set_exception(error)
        return done

    def _write_all(
        self,
        refs: Sequence[ShmRef],
        payloads: Sequence[Sequence[codec.Piece]],
        stop: threading.Event,
    ) -> None:
        for ref, pieces in zip(refs, payloads, strict=True):
            if stop.is_set():
                return
            try:
                self._write(ref, pieces)
            except OSError as error:
                reason = "segment_full" if error.errno in _FULL else "segment_refused"
                raise SegmentError(
                    f"segment {ref.name} of {ref.size} bytes cannot be written: {error.strerror}",
                    reason=reason,
                ) from None

    def _write(self, ref: ShmRef, pieces: Sequence[codec.Piece]) -> None:
        fd = os.open(ref.name, _CREATE, 0o600, dir_fd=self._directory)
        try:
            # A full memory is an error here, before anything is copied.
            os.posix_fallocate(fd, 0, ref.size)
            left = [view for piece in pieces if (view := memoryview(piece).cast("B")).nbytes]
            done = 0
            while left:
                count = os.pwritev(fd, left[:_MAX_PIECES], done)
                done += count
                while left and count >= left[0].nbytes:
                    count -= left.pop(0).nbytes
                if count:
                    left[0] = left[0][count:]
        finally:
            os.close(fd)

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            # The lock: whoever still finds a name in the set may use the directory's descriptor.
            with self._lock:
                if name in self._live:
                    self._live.remove(name)
                    try:
                        os.unlink(name, dir_fd=self._directory)
                    except FileNotFoundError:
                        pass  # never written, or swept away by somebody else
                    except OSError as error:  # what has this name now is not ours
                        log.warning("segment %s cannot be removed: %s", name, error.strerror)


def _sweep(directory: int) -> None:
    """Remove what senders of our user left behind when they were killed."""
    for name in os.listdir(directory):
        if owner.is_abandoned(name):
            with suppress(FileNotFoundError):  # somebody else sweeps too
                info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if info.st_uid == os.geteuid() and stat.S_ISREG(info.st_mode):
                    os.unlink(name, dir_fd=directory)


def _open_directory(directory: str | Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportUnavailableError(
            f"the shm transport needs the directory {directory}: {error.strerror}"
        ) from None


def _short(ref: ShmRef, found: int) -> SegmentError:
    return SegmentError(
        f"segment {ref.name} should hold {ref.size} bytes and holds {found}",
        reason="segment_short",
    )


def _unreadable(ref: ShmRef, error: OSError) -> SegmentError:
    return SegmentError(
        f"segment {ref.name} cannot be read: {error.strerror}",
        reason="segment_foreign" if error.errno in _FOREIGN else "segment_refused",
    )
