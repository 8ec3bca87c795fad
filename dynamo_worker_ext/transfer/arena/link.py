"""A receiver's end of its connection to one sender. Lives in the worker process."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dynamo_worker_ext.errors import InvalidTransferError, SegmentError
from dynamo_worker_ext.transfer.arena import meeting
from dynamo_worker_ext.transfer.arena.meeting import Kind
from dynamo_worker_ext.transfer.arena.memory import MappedPart
from dynamo_worker_ext.wire import ArenaRef


class Link:
    """One sender: its memory and what is held of it.

    Args:
        connection: to the sender; owned from here on.
        name: of its socket, for messages.
        on_end: called once, on the event loop, when the sender has gone.
    """

    def __init__(
        self, connection: socket.socket, name: str, on_end: Callable[[Link], object]
    ) -> None:
        self._connection = connection
        self._name = name
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, asyncio.Task[MappedPart]] = {}
        self._answers: deque[asyncio.Future[tuple[int, int]]] = deque()  # descriptor, bytes
        self._serials = itertools.count()
        self._held: set[int] = set()
        self._unsaid: deque[bytes] = deque()
        self._waiting = False  # for room to say it
        self._ended = False  # nothing is asked any more
        self._loop.add_reader(connection, self._on_readable)

    @property
    def held(self) -> int:
        """Payloads that somebody looks at."""
        return len(self._held)

    async def lease(self, ref: ArenaRef) -> memoryview:
        """A writable view of one payload; its slot is held until nobody holds the view.

        Raises:
            TransferError: the sender has gone, or what `ref` names is not there.
        """
        part = await self._part(ref.part)
        part.check(ref)
        await self._say(_record(Kind.HOLD, ref))
        return self._look(part, ref)

    def lease_now(self, ref: ArenaRef) -> memoryview | None:
        """`lease` where nothing has to be waited for; None where something has to."""
        fetching = self._parts.get(ref.part)
        if fetching is None or not fetching.done():
            return None
        part = fetching.result()
        part.check(ref)
        return self._look(part, ref) if self._said(_record(Kind.HOLD, ref)) else None

    def _look(self, part: MappedPart, ref: ArenaRef) -> memoryview:
        """What the sender has been told that is held."""
        serial = next(self._serials)
        self._held.add(serial)
        let_go = partial(self._let_go, part, serial, _record(Kind.RELEASE, ref))
        try:
            # Now that the sender knows, it counts: from here on the slot is not used again.
            part.check(ref)
            return part.view(ref, let_go)
        except BaseException:
            let_go()
            raise

    def close(self) -> None:
        """Ask no more. The sender learns of it when nobody looks at its memory any more."""
        if self._ended:
            return
        self._ended = True
        self._loop.remove_reader(self._connection)
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(meeting.gone(self._name))
        for fetching in self._parts.values():
            fetching.add_done_callback(_close_part)
        self._parts.clear()
        self._close_if_unused()

    # The sender's memory

    async def _part(self, index: int) -> MappedPart:
        """One part, mapped at its first use; who asks meanwhile waits for the same."""
        fetching = self._parts.get(index)
        if fetching is None:
            fetching = self._parts[index] = asyncio.ensure_future(self._fetch(index))
            fetching.add_done_callback(partial(self._fetched, index))
        if fetching.done():
            return fetching.result()
        return await asyncio.shield(fetching)

    async def _fetch(self, index: int) -> MappedPart:
        answer: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        # Said and queued without a pause in between: answers come in the order of the questions.
        await self._say(meeting.RECORD.pack(Kind.WANT, index, 0, 0))
        self._answers.append(answer)
        fd, nbytes = await answer
        return await asyncio.to_thread(MappedPart, fd, nbytes)

    def _fetched(self, index: int, fetching: asyncio.Task[MappedPart]) -> None:
        failed = fetching.cancelled() or fetching.exception() is not None
        if failed and self._parts.get(index) is fetching:
            del self._parts[index]

    def _on_readable(self) -> None:
        try:
            message, fds, flags, _ = socket.recv_fds(
                self._connection, 64, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        except OSError:
            message, fds, flags = b"", [], 0
        answer = self._answers.popleft() if self._answers else None
        if answer is None or answer.done() or len(message) != meeting.PART.size:
            for fd in fds:
                os.close(fd)
            if answer is not None and not answer.done():
                answer.set_exception(meeting.gone(self._name))
            if len(message) != meeting.PART.size:  # the end, or nothing that we understand
                self._end()
            return
        magic, index, nbytes = meeting.PART.unpack(message)
        if magic == meeting.MAGIC and len(fds) == 1:
            answer.set_result((fds[0], nbytes))
        elif magic == meeting.MAGIC and flags & socket.MSG_CTRUNC:
            # One was sent. The kernel drops it where this process has no number left for it.
            answer.set_exception(
                SegmentError(
                    f"part {index} of arena {self._name} did not come through: this process has "
                    "too many open files",
                    reason="segment_refused",
                )
            )
        elif magic == meeting.MAGIC:
            answer.set_exception(
                InvalidTransferError(f"the arena has no part {index}", reason="invalid_slot")
            )
        else:
            for fd in fds:
                os.close(fd)
            answer.set_exception(
                SegmentError(
                    f"arena {self._name} speaks {magic!r}, expected {meeting.MAGIC!r}: sender and "
                    "receiver are of different versions",
                    reason="segment_foreign",
                )
            )

    def _end(self) -> None:
        if not self._ended:
            self.close()
            self._on_end(self)

    # What the sender is told

    async def _say(self, record: bytes) -> None:
        while not self._said(record):  # noqa: ASYNC110 - nobody is told when there is room
            await asyncio.sleep(0.001)

    def _said(self, record: bytes) -> bool:
        """Say it; False where there is no room to."""
        if not self._ended:
            try:
                self._connection.send(record)
                return True
            except BlockingIOError:  # the sender's event loop is behind by hundreds of records
                return False
            except OSError:
                self._end()
        raise meeting.gone(self._name)

    def _let_go(self, part: MappedPart, serial: int, record: bytes) -> None:
        # In any thread, at any moment, perhaps in the midst of this very method: so no locks.
        self._unsaid.append(record)
        self._say_what_is_unsaid()
        self._held.discard(serial)
        self._close_if_unused()
        if not part.settling:
            part.settling = True
            with suppress(RuntimeError):  # the loop is closed; nobody will look again
                self._loop.call_soon_threadsafe(self._settle, part)

    def _settle(self, part: MappedPart) -> None:
        part.settling = part.settle()
        if part.settling:  # not in one go: the loop has more to do
            self._loop.call_soon(self._settle, part)

    def _say_what_is_unsaid(self) -> None:
        while self._unsaid:
            try:
                record = self._unsaid.popleft()
            except IndexError:  # somebody else said it
                return
            try:
                self._connection.send(record)
            except BlockingIOError:
                self._unsaid.append(record)
                self._waiting = True
                with suppress(RuntimeError):  # the loop is closed; the end of the process says it
                    self._loop.call_soon_threadsafe(self._say_when_writable)
                return
            except OSError:
                self._unsaid.clear()  # nobody is there to know it

    def _say_when_writable(self) -> None:
        fd = self._connection.fileno()
        if fd < 0:
            return

        def writable() -> None:
            self._loop.remove_writer(fd)
            self._waiting = False
            self._say_what_is_unsaid()
            self._close_if_unused()

        self._loop.add_writer(fd, writable)

    def _close_if_unused(self) -> None:
        if self._ended and not (self._held or self._unsaid or self._waiting):
            self._connection.close()


def _record(kind: Kind, ref: ArenaRef) -> bytes:
    return meeting.RECORD.pack(kind, ref.part, ref.slot, ref.generation)


def _close_part(fetching: asyncio.Task[MappedPart]) -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        fetching.result().close()
