"""The thread that carries KV events from the engine's socket to the router's publisher.

Every message has a sequence number. Where one is missing, the engine's replay endpoint is asked
for it; where that does not help, everything published is taken back (see `Normalizer.forget`)
and the pump starts afresh with what comes next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.kv_events.frames import (
    AllBlocksCleared,
    Batch,
    FrameError,
    decode_batch,
)
from dynamo_worker_ext.kv_events.normalize import Normalizer
from dynamo_worker_ext.kv_events.router import RouterEvent, StoredBlocks
from dynamo_worker_ext.metrics import Metrics, WarnOnceAMinute

_LOG = logging.getLogger(__name__)

#: How long a stop may go unnoticed.
_TICK_MS: Final = 100

#: Ends an engine's answer to a replay request.
_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)


class EventPublisher(Protocol):
    """What is used of Dynamo's ``KvEventPublisher``."""

    def publish_batch(self, events: Sequence[Any], /) -> None: ...


class KvEventPump:
    """Subscribes to one engine's KV events and publishes them. Lives in the worker process.

    Make and `start` it in the ``on_ready`` of a ``PushSource``; `stop` has to be called before
    the worker's ``cleanup`` returns. Give each data-parallel rank a pump of its own.

    Args:
        endpoint: where to subscribe; see `engine_endpoint`.
        publisher: where to publish.
        normalizer: used by the pump's thread alone from `start` on.
        metrics: ``kv_events`` by kind (``stored``, ``removed``, ``cleared``, ``ignored``,
            ``malformed``) and ``kv_event_gaps``.
        on_failure: called from the pump's thread with the error that ended it. Without events
            the router's picture of this worker only grows older, so the worker should leave.
        replay_endpoint: the engine's, if it has one; engines keep the last 10,000 messages.
        topic: prefix of the topics to subscribe to.
        dp_rank: drop batches that another rank sent; None takes all.
        max_blocks: the engine's number of blocks. More than these cannot be cached, so when
            more are tracked, removals went missing.
        replay_timeout: seconds to wait for a replay.
    """

    def __init__(
        self,
        endpoint: str,
        publisher: EventPublisher,
        normalizer: Normalizer,
        metrics: Metrics,
        *,
        on_failure: Callable[[BaseException], None],
        replay_endpoint: str | None = None,
        topic: str = "",
        dp_rank: int | None = None,
        max_blocks: int | None = None,
        replay_timeout: float = 5.0,
    ) -> None:
        self._endpoint = endpoint
        self._publisher = publisher
        self._normalizer = normalizer
        self._metrics = metrics
        self._on_failure = on_failure
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._max_blocks = max_blocks
        self._replay_timeout = replay_timeout
        self._warn = WarnOnceAMinute(_LOG)
        self._next: int | None = None  # None until the first message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._connected = threading.Event()

    def start(self) -> None:
        """Subscribe and begin to publish. Returns at once; see `wait_connected`.

        Raises:
            StartupError: the endpoint is no endpoint.
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a KvEventPump starts once")
        sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        # No limit on our side: what the engine sent is never dropped here.
        sub.setsockopt(zmq.RCVHWM, 0)
        # The engine may bind a moment later; what it sends before we are back is lost.
        sub.setsockopt(zmq.RECONNECT_IVL, 20)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        if "[" in self._endpoint:
            sub.setsockopt(zmq.IPV6, 1)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            sub.connect(self._endpoint)
        except zmq.ZMQError as error:
            sub.disable_monitor()
            self._context.destroy(linger=0)
            raise StartupError(
                f"cannot subscribe to KV events at {self._endpoint!r}: {error}"
            ) from error
        self._thread = threading.Thread(
            target=self._run, args=(sub, monitor), name="dwx-kv-events", daemon=True
        )
        self._thread.start()

    def wait_connected(self, timeout: float) -> bool:
        """Block until the engine has been reached; False after `timeout` seconds.

        Requests served before that may leave events that only a replay brings.
        """
        return self._connected.wait(timeout)

    @property
    def alive(self) -> bool:
        """Whether events are being carried."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; nothing is published afterwards. May be called more than once."""
        self._stopping.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            _LOG.error("the KV event thread did not end within %.1f s", timeout)

    def _run(self, sub: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(_TICK_MS))
                if monitor in ready:
                    recv_monitor_message(monitor)
                    self._connected.set()
                if sub in ready:
                    self._receive(sub.recv_multipart())
        except BaseException as error:
            # The boundary of the thread: whatever ended it, the worker has to learn of it.
            if not self._stopping.is_set():
                _LOG.exception("KV events are no longer published")
                self._on_failure(error)
        finally:
            sub.disable_monitor()
            self._context.destroy(linger=0)

    def _receive(self, message: list[bytes]) -> None:
        """Take one message, and first whatever is missing before it."""
        batch = self._decode(message[-1]) if len(message) == 3 and len(message[1]) == 8 else None
        if batch is None:
            # Not trusted in anything, its sequence number included. If it was the engine's, the
            # next message shows the gap.
            self._metrics.kv_events.labels("malformed").inc()
            self._warn("malformed", "skipped a KV event message that could not be read")
            return
        sequence = int.from_bytes(message[1], "big")
        if self._next is None:
            # What the engine sent before (start-up checks) is history, not a gap; a replay has
            # it, and without one those blocks count for nothing.
            if sequence and self._replay_endpoint:
                self._recover(0, sequence)
        elif sequence < self._next:
            self._metrics.kv_event_gaps.inc()
            self._warn("gap", "KV events began anew: %d after %d", sequence, self._next - 1)
            self._publish(self._normalizer.forget())
        elif sequence > self._next:
            self._metrics.kv_event_gaps.inc()
            if not self._recover(self._next, sequence):
                self._warn(
                    "gap",
                    "KV events %d to %d are lost; the router has to forget this worker's blocks",
                    self._next,
                    sequence - 1,
                )
                self._publish(self._normalizer.forget())
        self._apply(batch)
        self._next = sequence + 1

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except FrameError as error:
            _LOG.debug("%s", error)
            return None

    def _recover(self, first: int, end: int) -> bool:
        """Make good for the messages from `first` up to, not including, `end`, or do nothing."""
        missed = self._replay(self._replay_endpoint, first, end) if self._replay_endpoint else {}
        if len(missed) != end - first:
            return False
        for sequence in range(first, end):
            self._apply(missed[sequence])
        return True

    def _replay(self, endpoint: str, first: int, end: int) -> dict[int, Batch]:
        """Ask the engine for messages again; what it still has, by sequence number."""
        found: dict[int, Batch] = {}
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            if "[" in endpoint:
                socket.setsockopt(zmq.IPV6, 1)
            socket.connect(endpoint)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            deadline = time.monotonic() + self._replay_timeout
            while not self._stopping.is_set() and time.monotonic() < deadline:
                if not socket.poll(_TICK_MS):
                    continue
                # vLLM sends [empty, topic, sequence, payload]; SGLang leaves out the topic.
                message = socket.recv_multipart()
                if len(message) < 3 or message[-2] == _END_OF_REPLAY:
                    break
                sequence = int.from_bytes(message[-2], "big")
                if not first <= sequence < end:
                    break
                if (batch := self._decode(message[-1])) is not None:
                    found[sequence] = batch
                if sequence == end - 1:
                    break
        finally:
            socket.close(linger=0)
        return found

    def _apply(self, batch: Batch) -> None:
        count = self._metrics.kv_events
        if self._dp_rank is not None and batch.dp_rank not in (None, self._dp_rank):
            self._warn("rank", "KV events of rank %s came to rank %s", batch.dp_rank, self._dp_rank)
            count.labels("ignored").inc(len(batch.events) + batch.unknown)
            return
        events: list[RouterEvent] = []
        for event in batch.events:
            out = self._normalizer.normalize(event)
            events += out
            if isinstance(event, AllBlocksCleared):
                count.labels("cleared").inc()
            elif not out:
                count.labels("ignored").inc()
        if batch.unknown:
            count.labels("ignored").inc(batch.unknown)
        self._publish(events)
        tracked = self._normalizer.statistics().blocks
        if self._max_blocks is not None and tracked > self._max_blocks:
            self._warn(
                "blocks",
                "KV events tell of %d blocks, but the engine has %d: removals are missing",
                tracked,
                self._max_blocks,
            )
            self._publish(self._normalizer.forget())

    def _publish(self, events: list[RouterEvent]) -> None:
        # After `stop` the publisher may be gone.
        if not events or self._stopping.is_set():
            return
        self._publisher.publish_batch([event.to_input() for event in events])
        for event in events:
            kind = "stored" if isinstance(event, StoredBlocks) else "removed"
            self._metrics.kv_events.labels(kind).inc()
