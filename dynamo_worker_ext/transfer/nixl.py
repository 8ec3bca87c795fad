"""NIXL: between hosts over UCX, and on one host where shared memory does not reach.

Each end has one agent in a thread of its own (`nixl_thread`) with one arena that is registered
once (`nixl_arena`). A peer's metadata is loaded once, and only after a child process has survived
it (`nixl_probe`). References are those of Dynamo 1.6.1's ``MmKwargsNixlSender`` (`nixl_request`),
so that upstream's ends and ours can be mixed.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, Final

from dynamo_worker_ext.errors import (
    InvalidTransferError,
    SegmentError,
    TransferError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import codec, nixl_request
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, MmKwargsSender, Received
from dynamo_worker_ext.transfer.buffers import BufferPool, PoolStatistics
from dynamo_worker_ext.transfer.nixl_arena import ArenaStatistics
from dynamo_worker_ext.transfer.nixl_probe import Probe
from dynamo_worker_ext.transfer.nixl_request import HEADER_BYTES, Bytes
from dynamo_worker_ext.transfer.nixl_thread import AgentThread, Read, ThreadStatistics
from dynamo_worker_ext.transfer.scheduling import give_way
from dynamo_worker_ext.wire import NixlRef

#: Up to this many bytes of a request are written on the event loop, which takes a millisecond; a
#: hop to a thread and back costs up to half of that.
_WRITE_INLINE_BYTES: Final = 6 << 20

#: What payloads may take of a receiver's arena while somebody holds them, by default.
_KEPT_BYTES: Final = 64 << 20

_ARENA_BYTES: Final = 256 << 20


class NixlReceiver(MmKwargsReceiver[NixlRef]):
    """Reads items out of a sender's memory. Lives in the worker process.

    Opening it takes about half a second, for the agent. A child process stands by to try the
    metadata of senders that were not seen before; first contact takes some 30 ms.

    A sender is told of every item that will not be read after all, as far as it can be reached:
    upstream's would otherwise hold the item for a minute.

    Args:
        limits: sizes and deadline.
        metrics: where stages and bytes are counted.
        arena_bytes: memory that reads go through; by default room for one largest item and 64 MB.
            Reads that find no room wait for it. Payloads stay there while there is room for one
            largest item besides.
        pool_bytes: memory kept for the other payloads at most; see `BufferPool`.

    Raises:
        TransportUnavailableError: nixl is not installed or does not start here.
    """

    transport: ClassVar[str] = "nixl"
    declines: ClassVar[bool] = True

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        *,
        arena_bytes: int | None = None,
        pool_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(limits, metrics)
        largest = limits.max_item_bytes + HEADER_BYTES + codec.ALIGNMENT
        if arena_bytes is None:
            arena_bytes = largest + _KEPT_BYTES
        self._pool = BufferPool(pool_bytes)
        self._thread = AgentThread(
            arena_bytes, self._pool, reserve_bytes=largest, on_unknown=self._on_unknown
        )
        try:
            self._probe = Probe()
        except TransportUnavailableError:
            self._thread.close()
            raise
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dwe-nixl-probe")
        self._closed = False

    def statistics(self) -> tuple[ThreadStatistics, ArenaStatistics, PoolStatistics]:
        """What the thread, the arena and the buffer pool hold now."""
        return self._thread.statistics(), self._thread.arena.statistics(), self._pool.statistics()

    def check(self) -> None:
        """Make sure that arena and buffer pool are whole; `RuntimeError` if they are not."""
        self._thread.arena.check()
        self._pool.check()

    def _size(self, ref: NixlRef) -> int:
        return ref.size

    async def _receive(self, refs: Sequence[NixlRef]) -> list[Received]:
        if self._closed:
            raise TransportUnavailableError("the nixl receiver is closed")
        reads: list[Read] = []
        error: TransferError | None = None
        for ref in refs:
            try:
                reads.append(Read(self._parse(ref)))
            except InvalidTransferError as malformed:
                error = malformed
        if error is not None:
            # The others are not read either, and their senders have to hear of it.
            for read in reads:
                read.future.cancel()
        for read in reads:
            self._thread.submit(read)
        if error is not None:
            raise error
        waiting = [asyncio.wrap_future(read.future) for read in reads]
        try:
            await asyncio.gather(*waiting)
        except BaseException:
            # Also on cancellation. The thread lets go of each when its transfer is over.
            for one in waiting:
                one.cancel()
            for read in reads:
                read.future.cancel()
            reads.clear()  # the error's traceback would keep what has already arrived
            raise
        result = []
        for read in reads:
            if read.payload is None:
                raise TransportUnavailableError("a read ended without a payload")
            result.append(Received(read.payload))
        return result

    def decline(self, refs: Sequence[NixlRef]) -> None:
        for ref in refs:
            with suppress(InvalidTransferError):  # there is nobody to tell
                read = Read(nixl_request.parse(ref))
                read.future.cancel()
                self._thread.submit(read)

    async def close(self) -> None:
        """Release everything. Payloads already handed on stay valid. A second call is a no-op."""
        if self._closed:
            return
        self._closed = True

        def finish() -> None:
            self._probe.stop()
            self._executor.shutdown()
            self._probe.close()
            self._thread.close()

        await asyncio.to_thread(finish)

    def _parse(self, ref: NixlRef) -> nixl_request.Offer:
        offer = nixl_request.parse(ref)
        if offer.lead + offer.size + codec.ALIGNMENT > self._thread.arena.nbytes:
            raise InvalidTransferError(
                f"an item of {offer.size} bytes does not fit the arena of "
                f"{self._thread.arena.nbytes} (arena_bytes)",
                reason="invalid_size",
            )
        return offer

    def _on_unknown(self, read: Read) -> None:
        try:
            self._executor.submit(self._introduce, read)
        except RuntimeError:  # it was shut down meanwhile
            read.fail(TransportUnavailableError("the nixl receiver is closed"))

    def _introduce(self, read: Read) -> None:
        """Have metadata tried. Blocks; in the probe's thread."""
        try:
            if self._closed:
                raise TransportUnavailableError("the nixl receiver is closed")
            if read.offer.digest not in self._thread.digests():
                self._probe.check(read.offer)
        except TransferError as error:
            read.fail(error)
        else:
            read.tried = True
            self._thread.submit(read)


class NixlSender(MmKwargsSender[NixlRef]):
    """Keeps items in registered memory for others to read. Lives in the frontend process.

    An item that was withdrawn before anybody has said to have read it is taken from readers of
    ours at once (``peer_stale``), but its memory is used again only when there is no other: reads
    of upstream's, which cannot tell, then still find what they came for.

    Args:
        arena_bytes: memory for everything on offer.
        options: those of `MmKwargsSender`.

    Raises:
        TransportUnavailableError: nixl is not installed or does not start here.
    """

    transport: ClassVar[str] = "nixl"

    def __init__(self, *, arena_bytes: int = _ARENA_BYTES, **options: Any) -> None:
        super().__init__(**options)
        self._lock = threading.Lock()
        self._offers: dict[str, Bytes] = {}  # by notification key, as are the others
        self._unread: set[str] = set()
        self._withdrawn: OrderedDict[str, Bytes] = OrderedDict()
        # Not to be guessed, and not to be met again after a restart.
        self._generations = itertools.count(secrets.randbits(62))
        self._thread = AgentThread(arena_bytes, BufferPool(0), on_notification=self._was_read)
        self._metadata = nixl_request.pack(self._thread.metadata)
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="dwe-nixl-send", initializer=give_way
        )
        self._closed = False

    def statistics(self) -> tuple[ThreadStatistics, ArenaStatistics]:
        """What the thread and the arena hold now."""
        return self._thread.statistics(), self._thread.arena.statistics()

    def check(self) -> None:
        """Make sure that the arena is whole; `RuntimeError` if it is not."""
        self._thread.arena.check()

    async def _offer(self, payloads: Sequence[Sequence[codec.Piece]]) -> list[NixlRef]:
        if self._closed:
            raise TransportUnavailableError("the nixl sender is closed")
        sizes = [codec.payload_size(pieces) for pieces in payloads]
        # Whoever gives up in what follows has nothing to return: slots come back by themselves.
        slots = [self._slot(one, size) for one, size in zip(payloads, sizes, strict=True)]
        if sum(sizes) <= _WRITE_INLINE_BYTES:
            stamps = self._write(list(slots), payloads)
        else:
            loop = asyncio.get_running_loop()
            stamps = await loop.run_in_executor(self._executor, self._write, list(slots), payloads)
        refs = []
        with self._lock:
            if self._closed:
                raise TransportUnavailableError("the nixl sender was closed meanwhile")
            for slot, size, stamp in zip(slots, sizes, stamps, strict=True):
                address = int(slot.ctypes.data) + HEADER_BYTES
                refs.append(nixl_request.compose(address, size, self._metadata, stamp))
                self._offers[stamp.key] = slot
                self._unread.add(stamp.key)
        return refs

    async def withdraw(self, refs: Sequence[NixlRef]) -> None:
        """Take items back. Unknown references are ignored."""
        with self._lock:
            for ref in refs:
                key = ref.descriptor.get("notification_key") if isinstance(ref, NixlRef) else None
                if isinstance(key, str) and (slot := self._offers.pop(key, None)) is not None:
                    nixl_request.revoke(slot)
                    if key in self._unread:
                        self._withdrawn[key] = slot

    async def close(self) -> None:
        """Withdraw everything. A second call is a no-op."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for slot in self._offers.values():
                nixl_request.revoke(slot)

        def finish() -> None:
            self._executor.shutdown()
            self._thread.close()

        await asyncio.to_thread(finish)
        with self._lock:
            self._offers.clear()
            self._withdrawn.clear()
            self._unread.clear()

    def _slot(self, pieces: Sequence[codec.Piece], size: int) -> Bytes:
        """Room for header and payload, where the payload's tensors lie well."""
        lead = codec.pieces_lead(pieces)
        while (slot := self._thread.arena.lease(lead + HEADER_BYTES + size)) is None:
            with self._lock:
                if not self._withdrawn:
                    raise SegmentError(
                        f"there is no room for an item of {size} bytes in the arena of "
                        f"{self._thread.arena.nbytes} (arena_bytes)",
                        reason="segment_full",
                    )
                self._unread.discard(self._withdrawn.popitem(last=False)[0])
        return slot[lead:]

    def _write(
        self, slots: list[Bytes], payloads: Sequence[Sequence[codec.Piece]]
    ) -> list[nixl_request.Stamp]:
        try:
            return [
                nixl_request.write(slot, pieces, next(self._generations))
                for slot, pieces in zip(slots, payloads, strict=True)
            ]
        finally:
            slots.clear()  # the executor keeps its arguments for a moment longer

    def _was_read(self, notified: bytes) -> None:
        """A reader is done. Called by the thread with whatever peers send."""
        key = notified.decode(errors="replace")
        with self._lock:
            self._unread.discard(key)
            self._withdrawn.pop(key, None)
