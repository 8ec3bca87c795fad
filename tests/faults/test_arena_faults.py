"""Arenas whose other end dies, lies, hangs or is cut off; made for real, with a second process."""
# ruff: noqa: ASYNC240 - files are the subject here

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import random
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext import wire
from dynamo_worker_ext.card import host_identity
from dynamo_worker_ext.errors import TransferError, TransferTimeoutError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.arena import ArenaReceiver, ArenaSender, meeting
from dynamo_worker_ext.transfer.arena.memory import TABLE_BYTES
from dynamo_worker_ext.wire import ArenaRef
from tests.arena_peer import Peer
from tests.descriptors import descriptors
from tests.told_peer import WAIT_S

pytestmark = pytest.mark.timeout(180)

MB = 1 << 20
NAME = "arena_0123456789abcdef"


async def reason_of(doing: Awaitable[Any]) -> str:
    with pytest.raises(TransferError) as caught:
        await doing
    return caught.value.reason


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process or thread does in its own time."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)
            gc.collect()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "own"


@pytest_asyncio.fixture(autouse=True)
async def nothing_is_left_behind(directory: Path) -> AsyncIterator[None]:
    """After each fault: no descriptor more than before, and no socket once a sender has come by."""
    before = descriptors()
    yield
    await until(lambda: descriptors() <= before)
    if directory.exists():  # a sender was killed
        async with ArenaSender(directory=directory, step_bytes=MB) as sender:
            await sender.offer([[b"x"]])
    assert not directory.exists()


@pytest_asyncio.fixture
async def sender(directory: Path) -> AsyncIterator[ArenaSender]:
    async with ArenaSender(directory=directory, step_bytes=8 * MB, max_bytes=16 * MB) as sender:
        yield sender
        sender.check()


@pytest_asyncio.fixture
async def receiver(directory: Path) -> AsyncIterator[ArenaReceiver]:
    async with ArenaReceiver(Limits(256 * MB), Metrics(), directory=directory) as receiver:
        yield receiver


@pytest_asyncio.fixture
async def peer(directory: Path) -> AsyncIterator[Peer]:
    async with Peer(directory) as peer:
        yield peer


# A sender that dies


async def test_a_sender_killed_before_the_read_is_missing(
    peer: Peer, receiver: ArenaReceiver
) -> None:
    refs = await peer.offer([MB])
    await peer.kill()
    assert await reason_of(receiver.receive(refs)) == "segment_missing"


async def test_a_sender_killed_while_its_memory_is_asked_for_is_missing(
    peer: Peer, receiver: ArenaReceiver
) -> None:
    refs = await peer.offer([MB])
    peer.process.send_signal(signal.SIGSTOP)
    receiving = asyncio.create_task(receiver.receive(refs))
    await until(lambda: any(link._answers for link in receiver._links.values()))
    await peer.kill()
    assert await reason_of(receiving) == "segment_missing"


async def test_a_sender_killed_during_and_after_the_read_leaves_what_was_read(
    peer: Peer, receiver: ArenaReceiver
) -> None:
    refs = await peer.offer([8 * MB, MB], fill=65)
    [first] = await receiver.receive(refs[:1])
    half = bytes(first.payload[: 4 * MB])
    await peer.kill()
    assert half + bytes(first.payload[4 * MB :]) == b"A" * 8 * MB
    await until(lambda: not receiver._links)
    assert await reason_of(receiver.receive(refs[1:])) == "segment_missing"
    assert first.payload == b"A" * 8 * MB


async def test_a_sender_that_hangs_runs_into_the_deadline(peer: Peer, directory: Path) -> None:
    refs = await peer.offer([MB])
    peer.process.send_signal(signal.SIGSTOP)
    async with ArenaReceiver(
        Limits(MB, timeout_s=0.05), Metrics(), directory=directory
    ) as receiver:
        with pytest.raises(TransferTimeoutError):
            await receiver.receive(refs)
    peer.process.send_signal(signal.SIGCONT)


async def test_a_sender_that_starts_sweeps_what_killed_ones_left_and_no_more(
    peer: Peer, directory: Path, receiver: ArenaReceiver, sender: ArenaSender
) -> None:
    [ref] = await peer.offer([MB])
    await peer.kill()
    other = directory / "not_a_socket_of_ours"
    other.write_bytes(b"x")
    async with Peer(directory) as living:
        refs = await living.offer([MB])
        assert not (directory / ref.socket).exists()
        await sender.offer([[b"x"]])
        assert len(await receiver.receive(refs)) == 1, "a living one was swept away"
    assert other.exists()
    other.unlink()


# A receiver that dies


async def test_slots_of_a_receiver_killed_in_mid_read_come_back(
    peer: Peer, sender: ArenaSender
) -> None:
    refs = await sender.offer([[b"A" * MB], [b"B" * MB]])
    assert await peer.receive(refs) == [[MB, [65]], [MB, [66]]]
    await sender.withdraw(refs)
    assert sender.statistics().quarantined == 2
    await peer.kill()
    await until(lambda: sender.statistics().readers == 0)
    assert sender.statistics()[1:5] == (0, 0, 0, 0)
    assert len(await sender.offer([[b"C" * MB], [b"D" * MB]])) == 2


async def test_a_receiver_killed_at_any_moment_costs_nothing(
    sender: ArenaSender, directory: Path
) -> None:
    for delay in (0.0, 0.002, 0.01):
        async with Peer(directory) as peer:
            assert await peer.ask("statistics")  # it is up
            refs = await sender.offer([[b"A" * MB]] * 3)
            for _ in range(5):
                await peer.tell("receive", refs=[list(vars_of(ref)) for ref in refs])
                await peer.tell("drop")
            await asyncio.sleep(delay)
            await peer.kill()
        await sender.withdraw(refs)
        await until(lambda: sender.statistics().readers == 0)
        assert sender.statistics().used_bytes == 0
        sender.check()


def vars_of(ref: ArenaRef) -> tuple[Any, ...]:
    return (ref.socket, ref.host_id, ref.part, ref.slot, ref.offset, ref.size, ref.generation)


async def test_a_receiver_that_closes_tells_when_the_last_view_is_gone(
    sender: ArenaSender, directory: Path
) -> None:
    receiver = ArenaReceiver(Limits(MB), Metrics(), directory=directory)
    refs = await sender.offer([[b"A" * MB]])
    held = await receiver.receive(refs)
    await receiver.close()
    await sender.withdraw(refs)
    await sender.offer([[b"B" * MB]])
    assert held[0].payload == b"A" * MB
    assert sender.statistics()[4:] == (1, 1)
    held.clear()
    await until(lambda: sender.statistics().readers == 0)
    assert sender.statistics().quarantined == 0


# Late reads


async def test_a_late_read_is_an_error_and_never_the_next_image(
    peer: Peer, sender: ArenaSender
) -> None:
    late = await sender.offer([[b"A" * MB]])
    assert await peer.receive(late) == [[MB, [65]]]
    await peer.ask("drop")
    await sender.withdraw(late)
    now = await sender.offer([[b"B" * MB]])
    assert now[0].slot == late[0].slot
    assert await peer.receive(late) == "segment_stale"
    forged = replace(late[0], generation=now[0].generation + 1)
    assert await peer.receive([forged]) == "segment_stale"
    assert await peer.receive(now) == [[MB, [66]]]


async def test_what_a_process_is_shown_is_never_what_was_not_meant(
    peer: Peer, sender: ArenaSender
) -> None:
    """Reads race with the end of offers: each is whole, or stale."""
    chance = random.Random(0)
    outcomes: set[bool] = set()
    turn = 0
    while turn < 120 or (len(outcomes) < 2 and turn < 5000):
        turn += 1
        fill = turn % 256
        refs = await sender.offer([[bytes([fill]) * (64 << 10)] for _ in range(4)])
        await peer.tell("receive", refs=[list(vars_of(ref)) for ref in refs])
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        await asyncio.sleep(chance.choice((0, 0, 0.0005, 0.005)))
        await sender.withdraw(refs)
        answer = await peer.answer()
        if answer != "segment_stale":
            assert answer == [[64 << 10, [fill]]] * 4
        outcomes.add(isinstance(answer, str))
        await peer.ask("drop")
    assert outcomes == {True, False}, "the race was not one"
    assert sender.statistics().used_bytes == 0


# Cancelled reads


async def test_a_thousand_cancelled_reads_leave_the_pool_whole(
    sender: ArenaSender, receiver: ArenaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await sender.offer([[b"A" * 4096] for _ in range(20)])
    await receiver.receive(refs)
    [link] = receiver._links.values()
    lease = link.lease

    async def pausing(ref: ArenaRef) -> memoryview:
        await asyncio.sleep(0)
        return await lease(ref)

    monkeypatch.setattr(link, "lease", pausing)
    monkeypatch.setattr(link, "lease_now", lambda _: None)
    chance = random.Random(0)
    cancelled = most_held = 0
    while cancelled < 1000:
        tasks = [asyncio.create_task(receiver.receive(refs)) for _ in range(20)]
        for task in tasks:
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        most_held = max(most_held, receiver.held)
        for task in tasks:
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
    assert most_held > 100, "they were cancelled before they held anything"
    del tasks, task
    await until(lambda: receiver.held == 0)
    await until(lambda: sender.statistics().held == 0)
    await sender.withdraw(refs)
    assert sender.statistics().used_bytes == 0


async def test_a_cancelled_first_contact_leaves_nothing(peer: Peer, directory: Path) -> None:
    refs = await peer.offer([MB])
    peer.process.send_signal(signal.SIGSTOP)
    async with ArenaReceiver(Limits(MB), Metrics(), directory=directory) as receiver:
        receiving = [asyncio.create_task(receiver.receive(refs)) for _ in range(3)]
        await until(lambda: any(link._answers for link in receiver._links.values()))
        receiving[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving[0]
        peer.process.send_signal(signal.SIGCONT)
        for task in receiving[1:]:  # they asked for the same and get it
            assert (await task)[0].payload.nbytes == MB
        del receiving, task
    assert await peer.ask("statistics")


async def test_closing_while_memory_is_asked_for_ends_the_read(peer: Peer, directory: Path) -> None:
    refs = await peer.offer([MB])
    peer.process.send_signal(signal.SIGSTOP)
    receiver = ArenaReceiver(Limits(MB), Metrics(), directory=directory)
    receiving = asyncio.create_task(receiver.receive(refs))
    await until(lambda: any(link._answers for link in receiver._links.values()))
    await receiver.close()
    assert await reason_of(receiving) == "segment_missing"
    peer.process.send_signal(signal.SIGCONT)


async def test_a_flood_that_the_sender_does_not_hear_is_waited_out(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    """Thousands of leases begin and end before the sender's event loop has a turn."""
    refs = await sender.offer([[b"A" * 64]])
    await receiver.receive(refs)
    for _ in range(3000):
        await receiver.receive(refs)
    await until(lambda: receiver.held == 0)
    [link] = receiver._links.values()
    await until(lambda: not link._unsaid and not link._waiting)
    await until(lambda: sender.statistics().held == 0)
    await sender.withdraw(refs)
    assert sender.statistics().used_bytes == 0


async def test_more_is_let_go_at_once_than_the_sender_can_be_told_at_once(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    refs = await sender.offer([[b"A"]] * 1500)
    held = await receiver.receive(refs)
    assert sender.statistics().held == 1500
    held.clear()
    [link] = receiver._links.values()
    assert link._unsaid, "the sender was told at once"
    await until(lambda: sender.statistics().held == 0)
    await sender.withdraw(refs)
    assert sender.statistics().used_bytes == 0


# Several ends


async def test_two_senders_and_two_receivers_at_once(
    peer: Peer, sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    for turn in range(10):
        ours = await sender.offer([[bytes([at + turn]) * 300_000] for at in range(4)])
        theirs = await peer.offer([300_000] * 4, fill=100 + turn)
        mixed = [ref for both in zip(ours, theirs, strict=True) for ref in both]
        expected = [value for at in range(4) for value in (at + turn, 100 + turn + at)]
        there = asyncio.create_task(peer.receive(mixed))
        here = await receiver.receive(mixed)
        assert [one.payload[0] for one in here] == expected
        assert [one.payload[-1] for one in here] == expected
        assert await there == [[300_000, [value]] for value in expected]
        del here
        await peer.ask("drop")
        await sender.withdraw(ours)
        await peer.ask("withdraw", refs=[list(vars_of(ref)) for ref in theirs])
    assert sender.statistics()[1:] == (0, 0, 0, 0, 2)
    assert (await peer.ask("statistics"))["used_bytes"] == 0


async def test_many_items_cost_no_memory_descriptors_or_slots(
    peer: Peer, sender: ArenaSender
) -> None:
    async def round_of_16() -> None:
        refs = [await sender.offer([[payload]]) for _ in range(8)]
        for one in refs:
            assert await peer.receive(one) == [[MB, [7]]]
        await peer.ask("drop")
        for one in refs:
            await sender.withdraw(one)

    payload = b"\x07" * MB
    for _ in range(5):
        await round_of_16()
    before, memory = descriptors(), sender.statistics().bytes
    for _ in range(25):
        await round_of_16()
    assert descriptors() == before
    assert sender.statistics() == (memory, 0, 0, 0, 0, 1)


# Senders that lie


class LyingSender:
    """Something that listens where a sender would and answers as it is told."""

    def __init__(self, directory: Path, answer: bytes, fd: int | None) -> None:
        directory.mkdir(mode=0o700)
        self._path = directory / NAME
        self._answer, self._fd = answer, fd
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(self._path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            if connection.recv(64):
                if self._fd is None:
                    connection.send(self._answer)
                else:
                    socket.send_fds(connection, [self._answer], [self._fd])
                connection.recv(64)  # until the receiver leaves

    def __enter__(self) -> ArenaRef:
        self._thread.start()
        return ArenaRef(NAME, host_identity(), 0, 0, TABLE_BYTES, 10, 1)

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self._socket.close()
        self._path.unlink()
        self._path.parent.rmdir()
        if self._fd is not None:
            os.close(self._fd)


def object_of(nbytes: int, *, seal: bool = True, sparse: bool = False) -> int:
    fd = os.memfd_create("test_dwe", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if not sparse:
        os.posix_fallocate(fd, 0, nbytes)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def part(nbytes: int, magic: bytes = meeting.MAGIC) -> bytes:
    return meeting.PART.pack(magic, 0, nbytes)


@pytest.mark.parametrize(
    ("answer", "make", "reason"),
    [
        (part(MB), lambda: object_of(MB), "segment_stale"),
        (part(MB), lambda: object_of(MB, seal=False), "segment_foreign"),
        (part(MB), lambda: object_of(MB, sparse=True), "segment_foreign"),
        (part(2 * MB), lambda: object_of(MB), "segment_foreign"),
        (part(2**60), lambda: object_of(MB), "segment_foreign"),
        (part(4096), lambda: object_of(4096), "segment_foreign"),
        (part(MB), lambda: os.open("/dev/zero", os.O_RDWR), "segment_foreign"),
        (part(MB), lambda: os.open("/proc/self/maps", os.O_RDONLY), "segment_foreign"),
        (part(MB, b"DWA9"), lambda: object_of(MB), "segment_foreign"),
        (part(MB, b"DWA9"), None, "segment_foreign"),
        (part(MB), None, "invalid_slot"),
        (b"nonsense", None, "segment_missing"),
        (b"nonsense", lambda: object_of(MB), "segment_missing"),
        (part(MB) + b"more", None, "segment_missing"),
    ],
)
async def test_a_sender_that_lies_is_an_error_and_nothing_is_kept(
    directory: Path, answer: bytes, make: Callable[[], int] | None, reason: str
) -> None:
    async with ArenaReceiver(Limits(MB), Metrics(), directory=directory) as receiver:
        with LyingSender(directory, answer, make() if make else None) as ref:
            assert await reason_of(receiver.receive([ref])) == reason
            await receiver.close()


async def test_a_receiver_that_talks_nonsense_is_ignored(
    sender: ArenaSender, receiver: ArenaReceiver, directory: Path
) -> None:
    refs = await sender.offer([[b"A"]])
    [ref] = refs
    with meeting.connect(directory, ref.socket) as liar:
        for record in (
            b"x",
            b"x" * 60,
            meeting.RECORD.pack(9, 0, ref.slot, ref.generation),
            meeting.RECORD.pack(meeting.Kind.RELEASE, 0, ref.slot, ref.generation),
            meeting.RECORD.pack(meeting.Kind.HOLD, 7, ref.slot, ref.generation),
            meeting.RECORD.pack(meeting.Kind.HOLD, 0, 2**16 - 1, ref.generation),
            meeting.RECORD.pack(meeting.Kind.HOLD, 0, ref.slot, 2**63),
            meeting.RECORD.pack(meeting.Kind.WANT, 2**16 - 1, 0, 0),
            *[meeting.RECORD.pack(meeting.Kind.WANT, 0, 0, 0)] * 200,  # and reads no answer
        ):
            while True:
                try:
                    liar.send(record)
                except BlockingIOError:
                    await asyncio.sleep(0.001)
                else:
                    break
        await until(lambda: sender.statistics().readers == 1)
        assert bytes((await receiver.receive(refs))[0].payload) == b"A"
        assert sender.statistics().held == 0
    await until(lambda: sender.statistics().readers == 1)


# Any metadata


def metadata(refs: list[ArenaRef]) -> dict[str, Any]:
    """A request's ``extra_args`` for two images and a video."""
    kinds: list[wire.Modality] = ["image", "image", "video"]
    items = [
        wire.MediaItem(kind, f"{at:064x}", wire.Placeholder(at * 10, 5))
        for at, kind in enumerate(kinds)
    ]
    return {
        **wire.write_offer(
            "arena",
            [item.modality for item in items],
            [item.mm_hash for item in items],
            dict(enumerate(refs)),
        ),
        "expanded_token_ids": list(range(40)),
        "mm_hashes_by_modality": {"image": [f"{0:064x}", f"{1:064x}"], "video": [f"{2:064x}"]},
        "mm_placeholders_by_modality": {"image": [[0, 5], [10, 5]], "video": [[20, 5]]},
    }


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**12, 2**16 - 1, 2**16, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, -(2**63)]),
    st.integers(),
)  # fmt: skip
JUNK = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=30),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.text(max_size=8), NUMBERS, max_size=3),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all that can be changed."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    result = []
    for key, entry in inner:
        result.append((*at, key))
        if isinstance(entry, (dict, list)) and key != "expanded_token_ids":
            result += places(entry, (*at, key))
    return result


class House:
    """A sender, a receiver and their event loop, for many requests."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.sender = ArenaSender(directory=directory, step_bytes=2 * MB)
        limits = Limits(MB, timeout_s=30)
        self.receiver = ArenaReceiver(limits, Metrics(), directory=directory)
        self.payloads = [bytes([65 + at]) * (1000 * at + 1) for at in range(3)]
        self.refs = self.run(self.sender.offer([[payload] for payload in self.payloads]))

    def run(self, doing: Any) -> Any:
        return self.loop.run_until_complete(doing)

    def close(self) -> None:
        self.run(self.receiver.close())
        self.run(self.sender.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture
def house(directory: Path) -> Any:
    made = House(directory)
    yield made
    made.close()


@given(data=st.data())
def test_mutated_metadata_gives_the_payloads_meant_or_an_error_of_ours(
    house: House, data: st.DataObject
) -> None:
    extra: Any = deepcopy(metadata(house.refs))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(extra)))
        target = extra
        for key in path:
            target = target[key]
        if data.draw(st.integers(0, 9)) == 0:
            target.pop(last)
        elif isinstance(target[last], int):
            target[last] = data.draw(st.one_of(NUMBERS, NUMBERS, JUNK))
        else:
            target[last] = data.draw(JUNK)
    media = wire.parse({"token_ids": [1], "extra_args": extra}, max_item_bytes=MB)
    if media.transfer is None:
        return
    offered = media.transfer.offers["arena"]
    with suppress(TransferError):
        received = house.run(house.receiver.receive(list(offered.values())))
        assert {bytes(one.payload) for one in received} <= set(house.payloads)
        del received
    assert house.receiver.held == 0
    assert house.sender.statistics().held == 0
