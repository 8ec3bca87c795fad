"""The thread that owns an agent: reads, their memory, and notifications.

A read waits for its peer and for room in the arena, is posted, polled until it is known to be
over, and copied out. Nothing shortens this: the memory of one that was cancelled stays its own
until the transfer has ended, and only then is used again.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from dynamo_worker_ext.errors import PeerError, TransferError, TransportUnavailableError
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.buffers import BufferPool
from dynamo_worker_ext.transfer.nixl_agent import VERSIONS, Agent, Peer, Transfer, load_bindings
from dynamo_worker_ext.transfer.nixl_arena import Arena
from dynamo_worker_ext.transfer.nixl_request import Bytes, Offer, take
from dynamo_worker_ext.transfer.scheduling import give_way

#: Seconds of polling without a sleep; a small item has arrived by then.
_SPIN_S: Final = 0.0002

#: Longest sleep while something is expected to end soon, and while nothing is.
_POLL_S: Final = 0.001
_WAIT_S: Final = 0.01

#: How often notifications are collected, in seconds.
_DRAIN_S: Final = 0.05

#: How long `close` waits for transfers in flight.
_CLOSE_S: Final = 2.0

#: What cannot be taken down because a transfer may still write to it.
_ABANDONED: Final[list[object]] = []


class ThreadStatistics(NamedTuple):
    """What the thread is busy with.

    Attributes:
        waiting: reads that wait for a peer or for room.
        running: transfers that somebody waits for.
        quarantined: transfers that nobody waits for and that are not known to be over.
        peers: peers that are loaded.
        notifications: how many have come from peers since the start.
    """

    waiting: int
    running: int
    quarantined: int
    peers: int
    notifications: int


class Read:
    """One item on its way here.

    Attributes:
        offer: what is read.
        future: done when it is over. Cancelling it gives the read up; the peer is told.
        tried: whether the metadata of its offer is known to be safe to load.
        payload: what arrived. Not the future's result, which others hold on to for a while.
    """

    __slots__ = ("future", "memory", "offer", "payload", "transfer", "tried")

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.future: Future[None] = Future()
        self.tried = False
        self.payload: memoryview | None = None
        self.memory: Bytes | None = None
        self.transfer: Transfer | None = None

    def fail(self, error: TransferError) -> None:
        """End it with an error, if it has not ended otherwise."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(_bare(error))


class AgentThread:
    """An agent in a thread of its own. All methods may be called from any thread.

    Args:
        arena_bytes: what is registered.
        pool: where payloads are copied to that do not stay in the arena.
        reserve_bytes: what is free in one piece beside those that stay.
        on_notification: called in the thread with each key that a peer sends.
        on_unknown: called in the thread with each read whose peer is not loaded and whose
            metadata was not tried yet; it is to be submitted again once that was done.

    Raises:
        TransportUnavailableError: see `Agent`.
    """

    def __init__(
        self,
        arena_bytes: int,
        pool: BufferPool,
        *,
        reserve_bytes: int = 0,
        on_notification: Callable[[bytes], None] | None = None,
        on_unknown: Callable[[Read], None] | None = None,
    ) -> None:
        try:
            self.arena = Arena(arena_bytes)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise TransportUnavailableError(
                f"the nixl transport has no memory for an arena of {arena_bytes} bytes: {error}"
            ) from None
        self._pool = pool
        self._reserve_bytes = reserve_bytes
        self._on_notification = on_notification
        self._on_unknown = on_unknown
        self._commands: SimpleQueue[Read | None] = SimpleQueue()
        self._waiting: list[Read] = []
        self._active: list[Read] = []
        self._drained = 0.0
        self._notifications = 0
        self._closed = threading.Event()
        started: Future[Agent] = Future()
        # A daemon, so that a process whose owner never closed it can end.
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="dwe-nixl", daemon=True
        )
        self._thread.start()
        agent = started.result()
        self.metadata = agent.metadata
        self.digests: Callable[[], frozenset[bytes]] = lambda: agent.digests

    def submit(self, read: Read) -> None:
        """Start a read."""
        if self._closed.is_set():
            read.fail(_closed())
        else:
            self._commands.put(read)

    def statistics(self) -> ThreadStatistics:
        """What the thread is busy with, as of its last look."""
        active = list(self._active)
        given_up = sum(read.future.done() for read in active)
        return ThreadStatistics(
            waiting=self._commands.qsize() + len(self._waiting),
            running=len(active) - given_up,
            quarantined=given_up,
            peers=len(self.digests()),
            notifications=self._notifications,
        )

    def close(self) -> None:
        """End reads with an error, and the thread. Blocks. A second call is a no-op."""
        if not self._closed.is_set():
            self._closed.set()
            self._commands.put(None)
        self._thread.join()

    # From here on in the thread

    def _run(self, started: Future[Agent]) -> None:
        give_way()  # with NIXL's own threads, which the agent starts
        try:
            agent = Agent(f"dwe-{uuid.uuid4().hex}", self.arena, load_bindings())
        except TransportUnavailableError as error:
            started.set_exception(error)
            return
        except Exception as error:
            # Such as a TypeError of other bindings. Whoever starts the thread waits for an answer.
            started.set_exception(
                TransportUnavailableError(
                    f"the nixl transport needs nixl {VERSIONS}, whose bindings it uses; those here "
                    f"do not fit: {type(error).__name__}: {str(error)[:200]}"
                )
            )
            return
        started.set_result(agent)
        del started
        try:
            while not self._closed.is_set():
                self._accept(self._pause())
                self._turn(agent)
        finally:
            self._end(agent)

    def _pause(self) -> float:
        """Seconds to sleep if nothing is asked for."""
        posted = [
            read.transfer.posted
            for read in self._active
            if read.transfer is not None and not read.future.done()
        ]
        if posted:
            age = time.monotonic() - max(posted)
            return 0.0 if age < _SPIN_S else min(_POLL_S, age / 8)
        return _WAIT_S if self._active or self._waiting else _DRAIN_S

    def _accept(self, pause: float) -> None:
        """Take what is asked for; wait for it up to `pause` seconds."""
        with suppress(Empty):
            while True:
                read = self._commands.get(timeout=pause) if pause else self._commands.get_nowait()
                if read is not None:
                    self._waiting.append(read)
                pause = 0.0

    def _turn(self, agent: Agent) -> None:
        """Do for each read what can be done without waiting."""
        full = False  # later ones must not overtake one that found no room
        for read in list(self._waiting):
            try:
                started, full = self._start(agent, read, full)
            except PeerError as error:
                read.fail(error)
                started = True
            if started:
                self._waiting.remove(read)
        for read in list(self._active):
            if self._finish(agent, read):
                self._active.remove(read)
        now = time.monotonic()
        if now - self._drained >= _DRAIN_S:
            self._drained = now
            for key in agent.notifications():
                self._notifications += 1
                if self._on_notification is not None:
                    self._on_notification(key)

    def _start(self, agent: Agent, read: Read, full: bool) -> tuple[bool, bool]:
        """Post a read; say whether there is no more to do to start it, and whether there is no
        room for others."""
        offer = read.offer
        if not read.tried and offer.digest not in agent.digests:
            if self._on_unknown is not None:
                self._on_unknown(read)
            return True, full
        peer: Peer | None = agent.admit(offer.agent, offer.digest, offer.metadata)
        if read.future.cancelled():
            # Given up before it began. The sender holds its memory until it hears of that.
            agent.notify(offer.agent, offer.key)
            return True, full
        if peer is None or full:
            return False, full
        nbytes = offer.lead + offer.size
        # As far behind a boundary as in the sender's memory, where a payload of ours lies well.
        remote = offer.ptr - offer.lead
        pad = remote % codec.ALIGNMENT
        memory = self.arena.lease(pad + nbytes)
        if memory is None:
            return False, True
        memory = memory[pad:]
        local = int(memory.ctypes.data)
        try:
            transfer = agent.read(peer, remote, local, nbytes, offer.key)
        except PeerError:
            agent.notify(offer.agent, offer.key)
            raise
        read.memory, read.transfer = memory, transfer
        self._active.append(read)
        return True, False

    def _finish(self, agent: Agent, read: Read) -> bool:
        """Look after a read that was posted; say whether it is over."""
        transfer, memory = read.transfer, read.memory
        if transfer is None or memory is None:
            return True
        ended = transfer.failed
        if not ended:
            try:
                ended = agent.advance(transfer)
            except PeerError as error:
                ended = transfer.failed = True
                read.fail(error)
                agent.notify(read.offer.agent, read.offer.key)
                # What was tried when the peer lived has to be tried again before it is loaded.
                for other in self._waiting:
                    other.tried &= other.offer.digest != read.offer.digest
        if not ended or not agent.release(transfer):
            return False
        read.memory = None  # whoever waits for others of its request still holds the read
        if transfer.failed:
            if not transfer.peer.reads:
                agent.forget(transfer.peer)
        elif not read.future.done() and read.future.set_running_or_notify_cancel():
            try:
                # Whoever holds it must not keep larger ones from arriving.
                keep = self.arena.statistics().largest_free_bytes >= self._reserve_bytes
                read.payload = take(read.offer, memory, self._pool, keep=keep)
                read.future.set_result(None)
            except PeerError as error:
                read.future.set_exception(_bare(error))
            except (MemoryError, OSError):
                size = read.offer.size
                read.future.set_exception(
                    TransportUnavailableError(f"there is no memory for an item of {size} bytes")
                )
        return True

    def _end(self, agent: Agent) -> None:
        self._closed.set()  # also where the thread ends by an error of its own
        self._accept(0.0)
        for read in self._waiting + self._active:
            read.fail(_closed())
        self._waiting.clear()
        until = time.monotonic() + _CLOSE_S
        while self._active and time.monotonic() < until:
            self._active = [read for read in self._active if not self._finish(agent, read)]
            time.sleep(_POLL_S)
        self._accept(0.0)  # what was asked for at the moment of closing
        for read in self._waiting:
            read.fail(_closed())
        self._waiting.clear()
        if self._active:
            _ABANDONED.append((agent, self._active))
        else:
            agent.close()


def _bare(error: TransferError) -> TransferError:
    """Without the frames it came through: they hold the arena's memory for as long as it lives."""
    error.__context__ = None  # refers to frames just as well
    return error.with_traceback(None)


def _closed() -> TransportUnavailableError:
    return TransportUnavailableError("the nixl transport is closed")
