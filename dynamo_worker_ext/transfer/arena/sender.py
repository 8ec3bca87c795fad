"""The sender's end of an arena. Lives in the frontend process."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from dynamo_worker_ext.card import host_identity
from dynamo_worker_ext.errors import SegmentError, TransportUnavailableError
from dynamo_worker_ext.metrics import WarnOnceAMinute
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.arena import meeting
from dynamo_worker_ext.transfer.arena.meeting import Kind, Listener
from dynamo_worker_ext.transfer.arena.memory import TABLE_BYTES, OwnPart
from dynamo_worker_ext.transfer.arena.slots import ArenaStatistics, Slot, SlotPool
from dynamo_worker_ext.transfer.base import MmKwargsSender
from dynamo_worker_ext.transfer.scheduling import give_way
from dynamo_worker_ext.wire import ArenaRef

log = logging.getLogger(__name__)

#: Up to this many bytes an offer is copied on the event loop. The pages are there already, so that
#: 8 MB take a millisecond at most; a hop to a thread and back costs up to half of that.
INLINE_BYTES: Final = 8 << 20

_ROUND: Final = 2 << 20  # huge pages, where there are any

#: Seconds until receivers are accepted again after the operating system had no descriptor for one.
_ACCEPT_AGAIN_S: Final = 1.0


class _Place(NamedTuple):
    """Where a payload goes in its slot.

    Attributes:
        lead: bytes to leave before it.
        size: its bytes.
    """

    lead: int
    size: int

    @classmethod
    def of(cls, pieces: Sequence[codec.Piece]) -> _Place:
        return cls(codec.pieces_lead(pieces), codec.payload_size(pieces))


class ArenaSender(MmKwargsSender[ArenaRef]):
    """Copies payloads into memory that receivers have mapped already.

    An offer lasts until it is withdrawn; it may be read any number of times, also by several
    receivers. Its memory is used again when, besides, no receiver holds it.

    Args:
        max_bytes: memory at most. An offer that does not fit fails, and may go another way.
        step_bytes: memory that is added at a time; none is given back before `close`.
        offer_s: seconds after which an offer that nobody withdrew is ended when room is needed.
        directory: where the socket is made; None for `meeting.default_directory`.
        host_id: identity to offer under; None for `card.host_identity`.
        inline_bytes: what is copied on the event loop at most.
        options: those of `MmKwargsSender`.

    Raises:
        TransportUnavailableError: this host has no identity.
    """

    transport: ClassVar[str] = "arena"

    def __init__(
        self,
        *,
        max_bytes: int = 1 << 30,
        step_bytes: int = 64 << 20,
        offer_s: float = 600.0,
        directory: str | Path | None = None,
        host_id: str | None = None,
        inline_bytes: int = INLINE_BYTES,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._max_bytes, self._step_bytes = max_bytes, step_bytes
        self._offer_s = offer_s
        self._directory = Path(directory or meeting.default_directory())
        self._host_id = host_identity() if host_id is None else host_id
        if not self._host_id:
            raise TransportUnavailableError(
                "the arena transport needs /dev/shm and a boot id to know who shares this memory"
            )
        self._inline_bytes = inline_bytes
        self._pool = SlotPool(time.monotonic)
        self._growing = asyncio.Lock()
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="dwe-arena-send", initializer=give_way
        )
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[socket.socket] = set()
        self._warn = WarnOnceAMinute(log)
        self._closed = False

    def statistics(self) -> ArenaStatistics:
        """What the arena holds now."""
        self._hear_all()
        return self._pool.statistics()._replace(readers=len(self._readers))

    def check(self) -> None:
        """Make sure that the arena is whole; `RuntimeError` if it is not."""
        self._pool.check()

    def _offer_now(self, payloads: Sequence[Sequence[codec.Piece]]) -> list[ArenaRef] | None:
        if self._closed or self._listener is None:
            return None
        places = [_Place.of(pieces) for pieces in payloads]
        if sum([place.size for place in places]) > self._inline_bytes:
            return None
        slots: list[Slot] = []
        try:
            for place in places:
                slot = self._pool.take(place.lead + place.size)
                if slot is None:
                    self._end(slots)
                    return None
                slots.append(slot)
            for copy in self._copies(slots, places, payloads):
                copy()
        except BaseException:
            self._end(slots)
            raise
        return self._published(self._listener, slots, places)

    async def _offer(self, payloads: Sequence[Sequence[codec.Piece]]) -> list[ArenaRef]:
        if self._closed:
            raise TransportUnavailableError("the arena sender is closed")
        listener = self._listen()
        places = [_Place.of(pieces) for pieces in payloads]
        slots: list[Slot] = []
        try:
            for place in places:
                slots.append(await self._take(place.lead + place.size))
        except BaseException:
            self._end(slots)
            raise
        await self._fill(slots, places, payloads)
        return self._published(listener, slots, places)

    def _published(
        self, listener: Listener, slots: Sequence[Slot], places: Sequence[_Place]
    ) -> list[ArenaRef]:
        refs = []
        for slot, (lead, size) in zip(slots, places, strict=True):
            offset = slot.start + lead
            self._pool.offer(slot, offset, size, self._offer_s)
            refs.append(
                ArenaRef(
                    listener.name, self._host_id, slot.part, slot.number, offset, size,
                    slot.generation,
                )
            )  # fmt: skip
        return refs

    async def withdraw(self, refs: Sequence[ArenaRef]) -> None:
        """Take back what `offer` made readable. Unknown references are ignored."""
        found = [self._pool.find(ref.part, ref.slot, ref.generation) for ref in refs]
        self._end([slot for slot in found if slot is not None])

    async def close(self) -> None:
        """Withdraw everything. What receivers hold stays valid. A second call is a no-op."""
        if self._closed:
            return
        self._closed = True
        if self._listener is not None and self._loop is not None:
            self._loop.remove_reader(self._listener.socket)
            self._listener.close()
        for reader in list(self._readers):
            self._drop(reader)
        self._pool.close()
        # A copy that runs ends in memory that is still mapped, and is for nobody.
        await asyncio.to_thread(self._executor.shutdown)

    # Memory

    async def _take(self, nbytes: int) -> Slot:
        slot = self._pool.take(nbytes)
        if slot is not None:
            return slot
        async with self._growing:
            if self._closed:
                raise TransportUnavailableError("the arena sender is closed")
            self._end(self._pool.overdue())
            while (slot := self._pool.take(nbytes)) is None:
                await self._grow(nbytes)
        return slot

    async def _grow(self, nbytes: int) -> None:
        # Slots are rounded up by a quarter at most.
        needed = -(-(nbytes * 5 // 4 + 2 * TABLE_BYTES) // _ROUND) * _ROUND
        left = self._max_bytes - self._pool.bytes
        if needed > left:
            used = self._pool.statistics().used_bytes
            raise SegmentError(
                f"the arena has no room for {nbytes} bytes: {used} of {self._pool.bytes} bytes are "
                f"in use and {self._max_bytes} are allowed",
                reason="segment_full",
            )
        nbytes = min(max(needed, self._step_bytes), left // _ROUND * _ROUND)
        making = self._executor.submit(OwnPart, nbytes)
        try:
            part = await asyncio.wrap_future(making)
        except OSError as error:
            raise SegmentError(
                f"{nbytes} bytes for the arena cannot be had: {error.strerror}",
                reason="segment_full",
            ) from None
        except BaseException:
            making.add_done_callback(_discard)
            raise
        if self._closed:
            part.close()
            raise TransportUnavailableError("the arena sender is closed")
        self._pool.add(part)

    def _copies(
        self,
        slots: Sequence[Slot],
        places: Sequence[_Place],
        payloads: Sequence[Sequence[codec.Piece]],
    ) -> list[Callable[[], None]]:
        """What copies payloads in, in any thread."""
        return [
            partial(part.fill, slot.start + place.lead, pieces)
            for slot, place, pieces in zip(slots, places, payloads, strict=True)
            if (part := self._pool.part(slot.part)) is not None
        ]

    async def _fill(
        self,
        slots: Sequence[Slot],
        places: Sequence[_Place],
        payloads: Sequence[Sequence[codec.Piece]],
    ) -> None:
        """Copy payloads in; on failure the slots are free again when nothing writes to them."""
        stop = threading.Event()
        copies = self._copies(slots, places, payloads)

        def copy() -> None:
            for one in copies:
                if not stop.is_set():
                    one()

        copying = self._executor.submit(copy)
        try:
            await asyncio.wrap_future(copying)
            if self._closed:
                raise TransportUnavailableError("the arena sender is closed")
        except BaseException:
            stop.set()
            copying.add_done_callback(self._on_loop(self._end, slots))
            raise

    def _end(self, slots: Iterable[Slot]) -> None:
        """End offers. Their memory is free once no receiver holds it."""
        if self._closed:
            return
        slots = list(slots)
        for slot in slots:
            self._pool.retract(slot)
        # In this order: who looked before it was retracted has said so before.
        self._hear_all()
        for slot in slots:
            self._pool.end(slot)

    def _on_loop(self, call: Callable[..., object], *args: object) -> Callable[[Any], None]:
        def later(_: object) -> None:
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed; so will the arena be
                    self._loop.call_soon_threadsafe(call, *args)

        return later

    # Receivers

    def _listen(self) -> Listener:
        if self._listener is None:
            self._loop = asyncio.get_running_loop()
            self._listener = Listener(self._directory)
            self._loop.add_reader(self._listener.socket, self._accept)
        return self._listener

    def _accept(self) -> None:
        if self._listener is None or self._loop is None:
            return
        try:
            reader, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Such as too many open files: who connects waits, and would be reported without end.
            self._warn("accept", "no receiver of the arena can be accepted: %s", error.strerror)
            self._loop.remove_reader(self._listener.socket)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again)
            return
        try:
            meeting.check_peer(reader)
        except (SegmentError, OSError):  # whoever it is, there is nothing to say to them
            reader.close()
            return
        reader.setblocking(False)
        self._readers.add(reader)
        self._loop.add_reader(reader, self._hear, reader)

    def _accept_again(self) -> None:
        if self._listener is not None and self._loop is not None and not self._closed:
            self._loop.add_reader(self._listener.socket, self._accept)

    def _hear_all(self) -> None:
        for reader in list(self._readers):
            self._hear(reader)

    def _hear(self, reader: socket.socket) -> None:
        """Take in all that one receiver has said so far."""
        while reader in self._readers:
            try:
                record = reader.recv(64)
            except BlockingIOError:
                return
            except OSError:
                record = b""
            if not record:  # the end: it has closed, or was killed
                self._drop(reader)
            elif len(record) == meeting.RECORD.size:
                self._obey(reader, *meeting.RECORD.unpack(record))

    def _obey(self, reader: socket.socket, kind: int, part: int, number: int, gen: int) -> None:
        if kind == Kind.WANT:
            self._hand_over(reader, part)
        elif (slot := self._pool.find(part, number, gen)) is not None:
            if kind == Kind.HOLD:
                self._pool.hold(slot, reader)
            elif kind == Kind.RELEASE:
                self._pool.release(slot, reader)

    def _hand_over(self, reader: socket.socket, index: int) -> None:
        part = self._pool.part(index)
        # A receiver that asks and does not listen gets no answer and runs into its deadline.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            if part is None:
                reader.send(meeting.PART.pack(meeting.MAGIC, index, 0))
            else:
                answer = meeting.PART.pack(meeting.MAGIC, index, part.nbytes)
                socket.send_fds(reader, [answer], [part.fd])

    def _drop(self, reader: socket.socket) -> None:
        self._readers.discard(reader)
        if self._loop is not None:
            self._loop.remove_reader(reader)
        reader.close()
        self._pool.drop(reader)


def _discard(making: Future[OwnPart]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()
