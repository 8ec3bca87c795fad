"""The way of KV events from an engine's socket to the router, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import zmq

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventPump,
    Normalizer,
    private_endpoint,
)
from dynamo_worker_ext.metrics import Metrics

BLOCK = 16
END = (-1).to_bytes(8, "big", signed=True)


def stored(key: int, parent: int | None = None) -> BlockStored:
    return BlockStored([key], parent, [key] * BLOCK, BLOCK, medium="GPU")


def removed(key: int) -> BlockRemoved:
    return BlockRemoved([key], medium="GPU")


class Engine:
    """The publishing side, as vLLM 0.31 and SGLang do it."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, replay_topic: bool = True) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pub: zmq.Socket[bytes] = self.context.socket(zmq.PUB)
        self.pub.bind(endpoint)
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.router.bind(replay_endpoint)
        self.replay_topic = replay_topic
        self.sequence = 0
        self.buffer: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def send(self, *events: Any, lost: bool = False, rank: int | None = 0) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), rank])
        self.buffer[self.sequence] = payload
        if not lost:
            self.raw(b"kv", self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1

    def raw(self, *parts: bytes) -> None:
        self.pub.send_multipart(parts)

    def _serve(self) -> None:
        while not self.closing.is_set():
            if not self.router.poll(20):
                continue
            client, empty, first = self.router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            topic = [b"kv"] if self.replay_topic else []
            for sequence, payload in sorted(self.buffer.items()):
                if sequence >= self.asked[-1]:
                    parts = [client, empty, *topic, sequence.to_bytes(8, "big"), payload]
                    self.router.send_multipart(parts)
            self.router.send_multipart([client, empty, *([b""] if topic else []), END, b""])

    def close(self) -> None:
        self.closing.set()
        self.thread.join()
        self.context.destroy(linger=0)


class Publisher:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def publish_batch(self, events: Sequence[dict[str, Any]]) -> None:
        if self.error is not None:
            raise self.error
        self.events += events

    def kinds(self) -> list[tuple[str, int]]:
        """(kind, blocks) of each event."""
        return [(event["type"], len(event["block_hashes"])) for event in self.events]


class Stage:
    """An engine, a pump and a router; see `line`."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self.metrics = Metrics()
        self.publisher = Publisher()
        self.normalizer = Normalizer(HashMode.PAD_VALUE, frozenset(), BLOCK)
        self.failures: list[BaseException] = []
        self.closers: list[Callable[[], None]] = []

    def engine(self, **how: Any) -> Engine:
        engine = Engine(self.endpoint, self.replay_endpoint, **how)
        self.closers.append(engine.close)
        return engine

    def pump(self, *, replay: bool = False, **how: Any) -> KvEventPump:
        pump = KvEventPump(
            self.endpoint,
            self.publisher,
            self.normalizer,
            self.metrics,
            on_failure=self.failures.append,
            replay_endpoint=self.replay_endpoint if replay else None,
            **how,
        )
        self.closers.insert(0, pump.stop)
        return pump

    def line(self, *, replay: bool = False, **how: Any) -> tuple[Engine, KvEventPump]:
        """Both, connected."""
        engine = self.engine()
        pump = self.pump(replay=replay, **how)
        pump.start()
        assert pump.wait_connected(5)
        time.sleep(0.05)  # the subscription itself follows the handshake
        return engine, pump

    def wait(self, *kinds: tuple[str, int]) -> None:
        """Until the router has been told exactly this."""
        until(lambda: self.publisher.kinds() == list(kinds), lambda: self.publisher.kinds())

    def count(self, kind: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "dynamo_worker_ext_kv_events_total", {"kind": kind}
        )
        return value or 0

    @property
    def gaps(self) -> float | None:
        return self.metrics.registry.get_sample_value("dynamo_worker_ext_kv_event_gaps_total")


def until(check: Callable[[], bool], what: Callable[[], Any] = lambda: None) -> None:
    deadline = time.monotonic() + 5
    while not check():
        assert time.monotonic() < deadline, what()
        time.sleep(0.005)


@pytest.fixture
def stage() -> Iterator[Stage]:
    events, replay = private_endpoint(), private_endpoint()
    stage = Stage(events.endpoint, replay.endpoint)
    yield stage
    for close in stage.closers:
        close()
    events.cleanup()
    replay.cleanup()


STORED, REMOVED = ("stored", 1), ("removed", 1)


def test_events_are_published_in_order_and_counted(stage: Stage) -> None:
    engine, _ = stage.line()
    engine.send(stored(1), stored(2, parent=1), removed(2))
    engine.send(AllBlocksCleared())
    stage.wait(STORED, STORED, REMOVED, REMOVED)
    assert [stage.count(kind) for kind in ("stored", "removed", "cleared")] == [2, 2, 1]
    assert stage.gaps == 0


def test_a_pump_that_is_up_before_its_engine_finds_it(stage: Stage) -> None:
    pump = stage.pump()
    pump.start()
    assert not pump.wait_connected(0.1)
    engine = stage.engine()
    assert pump.wait_connected(5)
    time.sleep(0.05)
    engine.send(stored(1))
    stage.wait(STORED)


def test_events_for_nobody_are_counted_as_ignored(stage: Stage) -> None:
    engine, _ = stage.line()
    engine.send(stored(2, parent=1), {"type": "BlockMoved"}, removed(7))
    engine.send(stored(1))
    stage.wait(STORED)
    assert stage.count("ignored") == 3


# Gaps.


def test_a_gap_without_replay_takes_back_everything(stage: Stage) -> None:
    engine, _ = stage.line()
    engine.send(stored(1), stored(2, parent=1))
    engine.send(removed(2), lost=True)
    engine.send(stored(3, parent=2), stored(4))
    stage.wait(STORED, STORED, ("removed", 2), STORED)
    assert stage.gaps == 1
    assert stage.normalizer.statistics().dropped == {"orphan": 1}


@pytest.mark.parametrize("topic", [True, False], ids=["vllm", "sglang"])
def test_a_gap_is_filled_from_the_replay(stage: Stage, topic: bool) -> None:
    engine, _ = stage.line(replay=True)
    engine.replay_topic = topic
    engine.send(stored(1), stored(2, parent=1))
    engine.send(removed(2), lost=True)
    engine.send(stored(3, parent=1), lost=True)
    engine.send(stored(4, parent=3))
    engine.send(stored(5))
    stage.wait(STORED, STORED, REMOVED, STORED, STORED, STORED)
    assert engine.asked == [1]
    assert stage.gaps == 1
    assert stage.normalizer.statistics().dropped == {}


def test_a_replay_that_has_not_everything_any_more_takes_back_everything(stage: Stage) -> None:
    engine, _ = stage.line(replay=True)
    engine.send(stored(1))
    engine.send(stored(2), lost=True)
    engine.send(stored(3), lost=True)
    del engine.buffer[1]
    engine.send(stored(4))
    stage.wait(STORED, REMOVED, STORED)


def test_a_replay_that_does_not_answer_takes_back_everything(stage: Stage) -> None:
    engine, _ = stage.line(replay=True, replay_timeout=0.2)
    engine.closing.set()
    engine.thread.join()
    engine.send(stored(1))
    engine.send(stored(2), lost=True)
    engine.send(stored(3))
    stage.wait(STORED, REMOVED, STORED)


def test_what_was_sent_before_the_pump_is_no_gap(stage: Stage) -> None:
    engine = stage.engine()
    engine.send(stored(1))
    pump = stage.pump()
    pump.start()
    assert pump.wait_connected(5)
    time.sleep(0.05)
    engine.send(stored(2))
    stage.wait(STORED)
    assert stage.gaps == 0


def test_what_was_sent_before_the_pump_comes_by_replay(stage: Stage) -> None:
    engine = stage.engine()
    engine.send(stored(1))
    pump = stage.pump(replay=True)
    pump.start()
    assert pump.wait_connected(5)
    time.sleep(0.05)
    engine.send(stored(2, parent=1))
    stage.wait(STORED, STORED)
    assert stage.gaps == 0


def test_a_sequence_that_begins_anew_takes_back_everything(stage: Stage) -> None:
    engine, _ = stage.line()
    engine.send(stored(1))
    engine.send(stored(2))
    engine.sequence = 0
    engine.send(stored(3))
    stage.wait(STORED, STORED, ("removed", 2), STORED)
    assert stage.gaps == 1


def test_more_blocks_than_the_engine_has_take_back_everything(stage: Stage) -> None:
    engine, _ = stage.line(max_blocks=2)
    engine.send(stored(1), stored(2))
    engine.send(stored(3))
    engine.send(stored(4))
    stage.wait(STORED, STORED, STORED, ("removed", 3), STORED)


# Messages that are none.


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"kv", bytes(8)],
        [b"kv", b"\0", b"\x93"],
        [b"kv", bytes(8), b"garbage"],
        [b"kv", b"\xff" * 8, b""],
        [b"kv", bytes(8), bytes(8), b"\x92\x01\x90"],
        [b"kv", bytes(8), msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}], 0])],
    ],
)
def test_what_cannot_be_read_is_counted_and_skipped(
    stage: Stage, parts: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    engine, pump = stage.line()
    engine.send(stored(1))
    for _ in range(3):
        engine.raw(*parts)
    engine.send(stored(2))
    stage.wait(STORED, STORED)
    assert stage.count("malformed") == 3
    assert stage.gaps == 0
    assert pump.alive
    assert sum("could not be read" in record.message for record in caplog.records) == 1


def test_a_message_of_the_engine_that_cannot_be_read_leaves_a_gap(stage: Stage) -> None:
    engine, _ = stage.line()
    engine.send(stored(1))
    engine.send({"type": "BlockRemoved", "block_hashes": "?"})
    engine.send(stored(2))
    stage.wait(STORED, REMOVED, STORED)
    assert stage.gaps == 1


def test_events_of_another_rank_are_not_published(stage: Stage) -> None:
    engine, _ = stage.line(dp_rank=1)
    engine.send(stored(1), rank=0)
    engine.send(stored(2), rank=1)
    engine.send(stored(3), rank=None)
    stage.wait(STORED, STORED)
    assert stage.count("ignored") == 1


def test_only_the_topic_asked_for_is_read(stage: Stage) -> None:
    engine, _ = stage.line(topic="kv")
    engine.raw(b"other", bytes(8), b"garbage")
    engine.send(stored(1))
    stage.wait(STORED)
    assert stage.count("malformed") == 0


# The end.


def test_an_error_ends_the_pump_and_the_worker_learns_of_it(stage: Stage) -> None:
    engine, pump = stage.line()
    stage.publisher.error = RuntimeError("the publisher is gone")
    engine.send(stored(1))
    until(lambda: bool(stage.failures))
    until(lambda: not pump.alive)
    assert stage.failures == [stage.publisher.error]


def test_nothing_is_published_after_a_stop(stage: Stage) -> None:
    engine, pump = stage.line()
    engine.send(stored(1))
    stage.wait(STORED)
    pump.stop()
    engine.send(stored(2))
    time.sleep(0.05)
    stage.wait(STORED)
    assert not pump.alive
    assert stage.failures == []


def test_a_stop_is_prompt_and_may_be_repeated(stage: Stage) -> None:
    _, pump = stage.line()
    begin = time.monotonic()
    pump.stop()
    pump.stop()
    assert time.monotonic() - begin < 1


def test_a_stop_does_not_wait_for_a_replay(stage: Stage) -> None:
    engine, pump = stage.line(replay=True, replay_timeout=60)
    engine.closing.set()
    engine.thread.join()
    engine.send(stored(1))
    engine.send(stored(2), lost=True)
    engine.send(stored(3))
    stage.wait(STORED)
    until(lambda: stage.gaps == 1)
    begin = time.monotonic()
    pump.stop()
    assert time.monotonic() - begin < 1
    assert not pump.alive


def test_a_stop_from_the_pumps_own_thread_does_not_lock_up(stage: Stage) -> None:
    engine = stage.engine()
    pump = KvEventPump(
        stage.endpoint, stage.publisher, stage.normalizer, stage.metrics,
        on_failure=lambda error: pump.stop(),
    )  # fmt: skip
    pump.start()
    assert pump.wait_connected(5)
    time.sleep(0.05)
    stage.publisher.error = RuntimeError()
    engine.send(stored(1))
    until(lambda: not pump.alive)


def test_a_pump_that_never_started_can_be_stopped(stage: Stage) -> None:
    stage.pump().stop()


def test_a_pump_starts_once(stage: Stage) -> None:
    _, pump = stage.line()
    with pytest.raises(RuntimeError, match="once"):
        pump.start()


def test_an_endpoint_that_is_none_is_an_error_at_start_up(stage: Stage) -> None:
    stage.endpoint = "tcp://127.0.0.1:none"
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:none"):
        stage.pump().start()
