"""The arena: its memory, its books, and what its two ends promise each other."""
# ruff: noqa: ASYNC240 - files are the subject here

from __future__ import annotations

import asyncio
import gc
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from dynamo_worker_ext.errors import TransferError, TransportUnavailableError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, codec
from dynamo_worker_ext.transfer.arena import ArenaReceiver, ArenaSender, meeting
from dynamo_worker_ext.transfer.arena.memory import SLOTS, TABLE_BYTES, OwnPart
from dynamo_worker_ext.transfer.arena.slots import SlotPool
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem

MB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "own"


@pytest_asyncio.fixture
async def sender(directory: Path) -> AsyncIterator[ArenaSender]:
    async with ArenaSender(directory=directory, step_bytes=8 * MB, max_bytes=24 * MB) as sender:
        yield sender
        sender.check()


@pytest_asyncio.fixture
async def receiver(
    directory: Path, limits: Limits, metrics: Metrics
) -> AsyncIterator[ArenaReceiver]:
    async with ArenaReceiver(limits, metrics, directory=directory) as receiver:
        yield receiver


async def reason_of(doing: Awaitable[Any]) -> str:
    with pytest.raises(TransferError) as caught:
        await doing
    return caught.value.reason


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the other end, or a thread, does in its own time."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
            gc.collect()


# Leases


async def test_a_slot_is_used_again_only_when_nobody_holds_its_view(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    first = await sender.offer([[b"A" * MB]])
    [held] = await receiver.receive(first)
    slice_of_it = np.frombuffer(held.payload, np.uint8)[10:20]
    del held
    await sender.withdraw(first)
    assert sender.statistics().quarantined == 1
    second = await sender.offer([[b"B" * MB]])
    assert second[0].slot != first[0].slot
    assert bytes(slice_of_it) == b"A" * 10
    del slice_of_it
    assert sender.statistics()[2:5] == (1, 0, 0)
    third = await sender.offer([[b"C" * MB]])
    assert (third[0].slot, third[0].offset // 4096) == (first[0].slot, first[0].offset // 4096)
    assert await reason_of(receiver.receive(first)) == "segment_stale"


async def test_memory_comes_back_when_the_offer_is_withdrawn_after_the_reader_let_go(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    refs = await sender.offer([[b"A" * MB]])
    for _ in range(3):  # a retry finds it still there
        [got] = await receiver.receive(refs)
        del got
    assert sender.statistics().used_bytes > MB
    await sender.withdraw(refs)
    assert sender.statistics().used_bytes == 0


async def test_an_offer_nobody_withdrew_ends_when_its_room_is_needed(directory: Path) -> None:
    async with ArenaSender(
        directory=directory, step_bytes=8 * MB, max_bytes=8 * MB, offer_s=0.0
    ) as sender:
        for _ in range(5):
            await sender.offer([[b"x" * 3 * MB], [b"y" * 3 * MB]])
            assert sender.statistics().offered == 2
        sender.check()


async def test_an_overdue_offer_that_is_being_read_is_kept_from_reuse(
    directory: Path, receiver: ArenaReceiver
) -> None:
    async with ArenaSender(
        directory=directory, step_bytes=8 * MB, max_bytes=8 * MB, offer_s=0.0
    ) as sender:
        first = await sender.offer([[b"A" * 4 * MB]])
        [held] = await receiver.receive(first)
        assert await reason_of(sender.offer([[b"B" * 4 * MB]])) == "segment_full"
        assert sender.statistics().quarantined == 1
        assert await reason_of(receiver.receive(first)) == "segment_stale"
        assert held.payload == b"A" * 4 * MB
        del held
        await sender.offer([[b"B" * 4 * MB]])


async def test_a_view_let_go_in_another_thread_is_let_go(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    refs = await sender.offer([[b"A" * MB]])
    box = await receiver.receive(refs)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert sender.statistics().held == 0


async def test_what_one_reader_holds_another_gets_apart(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    refs = await sender.offer([[b"A" * MB]])
    [first] = await receiver.receive(refs)
    [second] = await receiver.receive(refs)
    first.payload[:] = b"1" * MB
    second.payload[:] = b"2" * MB
    assert first.payload == b"1" * MB
    [third] = await receiver.receive(refs)
    assert third.payload == b"A" * MB
    del first, second, third
    await sender.withdraw(refs)
    assert sender.statistics().used_bytes == 0


@pytest.mark.parametrize("settled", [True, False])
async def test_what_a_reader_wrote_is_not_seen_in_the_next_payload(
    sender: ArenaSender, receiver: ArenaReceiver, settled: bool
) -> None:
    for fill in (b"A", b"B", b"C"):
        refs = await sender.offer([[fill * (MB // 2)], [fill * (MB // 2)]])
        got = await receiver.receive(refs)
        assert [bytes(one.payload) for one in got] == [fill * (MB // 2)] * 2
        got[0].payload[4096:9000] = b"!" * 4904
        got[1].payload[-1:] = b"!"
        del got
        await sender.withdraw(refs)
        if settled:
            [link] = receiver._links.values()
            part = await link._part(0)
            await until(lambda part=part: not part._shown)


async def test_a_kernel_that_tells_nothing_about_pages_costs_only_time(
    sender: ArenaSender, receiver: ArenaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "preadv", refuse)
    for fill in (b"A", b"B"):
        refs = await sender.offer([[fill * MB]])
        [got] = await receiver.receive(refs)
        assert got.payload == fill * MB
        got.payload[:] = b"!" * MB
        del got
        await sender.withdraw(refs)


async def test_settling_leaves_alone_what_is_held(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    held, dropped = await receiver.receive(await sender.offer([[b"A" * MB], [b"B" * MB]]))
    held.payload[:] = b"!" * MB
    del dropped
    [link] = receiver._links.values()
    part = await link._part(0)
    await until(lambda: len(part._shown) == 1)
    assert held.payload == b"!" * MB


# Generations


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ref: {"generation": ref.generation + 1}, "segment_stale"),
        (lambda ref: {"generation": 0}, "segment_stale"),
        (lambda ref: {"slot": ref.slot + 1}, "segment_stale"),
        (lambda ref: {"slot": SLOTS}, "invalid_slot"),
        (lambda ref: {"slot": -1}, "invalid_slot"),
        (lambda ref: {"part": 1}, "invalid_slot"),
        (lambda ref: {"part": 65535}, "invalid_slot"),
        (lambda ref: {"offset": ref.offset + 4096}, "invalid_slot"),
        (lambda ref: {"offset": 0}, "invalid_slot"),
        (lambda ref: {"offset": 2**60}, "invalid_slot"),
        (lambda ref: {"size": 8 * MB}, "invalid_slot"),
        (lambda ref: {"size": ref.size + 1}, "segment_short"),
        (lambda ref: {"size": ref.size - 1}, "invalid_size"),
    ],
)
async def test_a_reference_that_was_never_given_is_refused_and_holds_nothing(
    sender: ArenaSender, receiver: ArenaReceiver, change: Any, reason: str
) -> None:
    [ref] = await sender.offer([[b"A" * MB]])
    assert await reason_of(receiver.receive([ref, replace(ref, **change(ref))])) == reason
    assert sender.statistics().held == 0
    assert receiver.held == 0


async def test_a_slot_withdrawn_between_the_two_checks_is_stale_and_not_held(
    sender: ArenaSender, receiver: ArenaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await sender.offer([[b"A" * MB]])
    [got] = await receiver.receive(refs)
    del got
    [link] = receiver._links.values()
    said = link._said

    def withdraw_first(record: bytes) -> bool:
        slot = sender._pool.find(0, refs[0].slot, refs[0].generation)
        sender._end([slot] if slot else [])
        return said(record)

    monkeypatch.setattr(link, "_said", withdraw_first)
    assert await reason_of(receiver.receive(refs)) == "segment_stale"
    assert sender.statistics()[1:5] == (0, 0, 0, 0)


async def test_a_reader_that_said_so_in_time_keeps_a_slot_that_is_withdrawn_after(
    sender: ArenaSender, receiver: ArenaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await sender.offer([[b"A" * MB]])
    [got] = await receiver.receive(refs)
    del got
    [link] = receiver._links.values()
    part = await link._part(0)
    view = part.view

    def withdraw_first(*args: Any) -> memoryview:
        # Without a turn of the event loop: the sender has to ask for what it has not heard.
        sender._end(
            [slot for slot in [sender._pool.find(0, refs[0].slot, refs[0].generation)] if slot]
        )
        return view(*args)

    monkeypatch.setattr(part, "view", withdraw_first)
    [held] = await receiver.receive(refs)
    assert sender.statistics().quarantined == 1
    await sender.offer([[b"B" * MB]])
    assert held.payload == b"A" * MB


# Hosts, directories, users


async def test_a_sender_of_another_host_is_refused_before_anything_is_opened(
    receiver: ArenaReceiver, sender: ArenaSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    [ref] = await sender.offer([[b"A"]])
    monkeypatch.setattr(meeting, "connect", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(TransportUnavailableError, match="cannot be mapped here"):
        await receiver.receive([replace(ref, host_id="0" * 16)])


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "/dev/shm/x", "arena_0123456789abcde", "arena_0123456789ABCDEF", "a\0b",
     "arena_0123456789abcdef\n", "arena_0123456789abcdef/x", "x" * 300],
    ids=ascii,
)  # fmt: skip
async def test_a_socket_of_another_form_is_refused(
    sender: ArenaSender, receiver: ArenaReceiver, name: str
) -> None:
    [ref] = await sender.offer([[b"A"]])
    assert await reason_of(receiver.receive([replace(ref, socket=name)])) == "invalid_name"


async def test_a_socket_that_nobody_made_is_missing(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    [ref] = await sender.offer([[b"A"]])
    unknown = replace(ref, socket="arena_0123456789abcdef")
    assert await reason_of(receiver.receive([unknown])) == "segment_missing"


async def test_the_directory_is_ours_alone_and_goes_with_the_last_sender(directory: Path) -> None:
    async with ArenaSender(directory=directory) as one, ArenaSender(directory=directory) as two:
        await one.offer([[b"A"]])
        await two.offer([[b"A"]])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        await one.close()
        assert len(list(directory.iterdir())) == 1
    assert not directory.exists()


async def test_a_directory_open_to_others_is_not_used(
    directory: Path, receiver: ArenaReceiver, sender: ArenaSender
) -> None:
    [ref] = await sender.offer([[b"A"]])
    directory.chmod(0o755)
    assert await reason_of(receiver.receive([ref])) == "segment_foreign"
    async with ArenaSender(directory=directory) as other:
        assert await reason_of(other.offer([[b"A"]])) == "unavailable"
    directory.chmod(0o700)


async def test_a_directory_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    async with ArenaSender(directory=tmp_path / "link") as sender:
        assert await reason_of(sender.offer([[b"A"]])) == "unavailable"


@pytest.mark.parametrize("foreign", ["sender", "receiver"])
async def test_nothing_passes_between_two_users(
    directory: Path, metrics: Metrics, sender: ArenaSender, foreign: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    [ref] = await sender.offer([[b"A"]])
    receiver = ArenaReceiver(Limits(MB, timeout_s=30), metrics, directory=directory)
    calls = 0

    def somebody_else(_: Any) -> int:
        nonlocal calls
        calls += 1
        # The receiver looks first, when it has connected; the sender when it accepts.
        return os.geteuid() + (calls == (1 if foreign == "sender" else 2))

    monkeypatch.setattr(meeting, "peer_uid", somebody_else)
    reason = await reason_of(receiver.receive([ref]))
    assert reason == ("segment_foreign" if foreign == "sender" else "segment_missing")
    assert sender.statistics().readers == 0
    await receiver.close()


# Memory


async def test_the_arena_grows_in_steps_to_its_limit_and_then_refuses(sender: ArenaSender) -> None:
    held = [await sender.offer([[b"x" * 5 * MB]])]
    assert sender.statistics().bytes == 8 * MB
    held.append(await sender.offer([[b"x" * 5 * MB]]))
    assert sender.statistics().bytes == 16 * MB
    held.append(await sender.offer([[b"x" * 5 * MB]]))
    before = sender.statistics()
    assert before.bytes == 24 * MB
    assert await reason_of(sender.offer([[b"x"], [b"x" * 5 * MB]])) == "segment_full"
    assert sender.statistics() == before, "what was offered with it is taken back"
    await sender.withdraw(held[1])
    [again] = await sender.offer([[b"x" * 5 * MB]])
    assert again.part == 1


async def test_an_item_larger_than_a_step_gets_a_larger_part(
    directory: Path, receiver: ArenaReceiver
) -> None:
    async with ArenaSender(directory=directory, step_bytes=2 * MB) as sender:
        refs = await sender.offer([[b"a" * 1000], [b"b" * 9 * MB], [b"c" * 1000]])
        assert [ref.part for ref in refs] == [0, 1, 0]
        got = await receiver.receive(refs)
        assert [bytes(one.payload[:1]) + bytes(one.payload[-1:]) for one in got] == [
            b"aa", b"bb", b"cc",
        ]  # fmt: skip


async def test_memory_that_cannot_be_had_is_an_error_of_the_offer(
    sender: ArenaSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert await reason_of(sender.offer([[b"x" * MB]])) == "segment_full"
    await until(lambda: arena_descriptors() == 0)
    await sender.offer([[b"x" * MB]])
    assert arena_descriptors() > 0


def arena_descriptors() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "dwe_arena" in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


async def test_the_memory_can_neither_shrink_nor_be_written_by_others() -> None:
    import mmap

    part = OwnPart(2 * MB)
    try:
        for size in (0, 4 * MB):
            with pytest.raises(PermissionError):
                os.ftruncate(part.fd, size)
        with pytest.raises(PermissionError):
            mmap.mmap(part.fd, 2 * MB)
        with pytest.raises(PermissionError):
            os.pwrite(part.fd, b"x", 0)
        assert os.fstat(part.fd).st_blocks * 512 >= 2 * MB, "it is all there from the start"
    finally:
        part.close()


async def test_tensors_of_wide_elements_are_views(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    torch = pytest.importorskip("torch")
    for length in range(1, 9):
        item = KwargsItem({"n" * length: KwargsField(torch.ones(MB // 8), "batched", {})})
        [got] = await receiver.receive(await sender.offer([codec.encode(item)]))
        tensor: Any = codec.decode(got.payload).fields["n" * length].data
        got.payload[-4:] = b"\0\0\0\0"
        assert tensor[-1] == 0, "a copy was made"
        assert tensor.data_ptr() % 64 == 0


# What has not to be waited for


async def test_known_memory_takes_no_turn_of_the_event_loop(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    """Where a request is not to wait for what else the loop does."""
    await receiver.receive(await sender.offer([[b"A" * MB]]))
    refs = at_once(sender.offer([[b"B" * MB], [b"C" * 9]]))
    first, second = at_once(receiver.receive(refs))
    assert (first.payload, second.payload) == (b"B" * MB, b"C" * 9)
    at_once(sender.withdraw(refs))
    # What cannot be had at once holds nothing meanwhile.
    elsewhere = replace(refs[0], host_id="0" * 64)
    assert await reason_of(receiver.receive([*await sender.offer([[b"D"]]), elsewhere]))
    del first, second
    await until(lambda: receiver.held == 0)


def at_once(doing: Coroutine[Any, Any, Any]) -> Any:
    """The result of what never waits."""
    with pytest.raises(StopIteration) as done:
        doing.send(None)
    return done.value.value


async def test_an_offer_that_cannot_be_copied_gives_its_slots_back(sender: ArenaSender) -> None:
    await sender.withdraw(await sender.offer([[b"A"]]))
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        await sender.offer([[b"good"], [b"head", memoryview(b"abcdef")[::2]]])
    assert sender.statistics().used_bytes == 0


# Offers that are cut off


async def test_a_cancelled_offer_gives_its_slots_back_when_nothing_writes_to_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, started = threading.Event(), threading.Event()
    fill = OwnPart.fill

    def slow(self: OwnPart, *args: Any) -> None:
        started.set()
        go.wait(60)
        fill(self, *args)

    monkeypatch.setattr(OwnPart, "fill", slow)
    async with ArenaSender(directory=directory, step_bytes=8 * MB, inline_bytes=0) as sender:
        offering = asyncio.create_task(sender.offer([[b"x" * MB], [b"y" * MB]]))
        await until(started.is_set)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering
        now = sender.statistics()
        assert now.used_bytes > 2 * MB, "a thread still writes there"
        assert now.offered == 0
        go.set()
        await until(lambda: sender.statistics().used_bytes == 0)
        sender.check()


async def test_an_offer_cancelled_while_memory_is_made_leaves_none_behind(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, started, closed = threading.Event(), threading.Event(), threading.Event()
    allocate, close = os.posix_fallocate, OwnPart.close

    def slow(*args: Any) -> None:
        started.set()
        go.wait(60)
        allocate(*args)

    def watched(self: OwnPart) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(os, "posix_fallocate", slow)
    monkeypatch.setattr(OwnPart, "close", watched)
    async with ArenaSender(directory=directory, step_bytes=2 * MB) as sender:
        offering = asyncio.create_task(sender.offer([[b"x"]]))
        await until(started.is_set)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering
        go.set()
        await until(closed.is_set)
        assert sender.statistics().bytes == 0
        await sender.offer([[b"x"]])


async def test_closing_during_an_offer_ends_it_with_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    allocate = os.posix_fallocate

    def slow(*args: Any) -> None:
        started.set()
        time.sleep(0.05)
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    sender = ArenaSender(directory=directory, step_bytes=2 * MB)
    offering = [asyncio.create_task(sender.offer([[b"x"], [b"y" * 3 * MB]])) for _ in range(2)]
    await until(started.is_set)
    await sender.close()
    for one in offering:
        assert await reason_of(one) == "unavailable"
    assert not directory.exists()


# The receiver's event loop


async def test_nothing_is_copied_to_receive_64_mb(directory: Path, receiver: ArenaReceiver) -> None:
    async with ArenaSender(directory=directory) as sender:
        refs = await sender.offer([[bytes(64 * MB)]])
        [got] = await receiver.receive(refs)
        refs2 = await sender.offer([[b"x"]])
        await receiver.receive(refs2)
        before = anonymous_kb()
        del got
        [got] = await receiver.receive(refs)
        assert anonymous_kb() - before < 8 << 10
        assert got.payload.nbytes == 64 * MB


def anonymous_kb() -> int:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("RssAnon:") + 1])


# The books


def test_the_pool_keeps_its_books_whatever_the_order() -> None:
    import random

    chance = random.Random(0)
    pool = SlotPool(time.monotonic)
    pool.add(OwnPart(4 * MB))
    pool.add(OwnPart(2 * MB))
    slots: list[Any] = []
    generations = set()
    for turn in range(3000):
        if slots and chance.random() < 0.5:
            pool.end(slots.pop(chance.randrange(len(slots))))
        elif (slot := pool.take(chance.choice([1, 4096, 4097, 50_000, 900_000]))) is not None:
            assert slot.generation not in generations
            generations.add(slot.generation)
            slots.append(slot)
        if turn % 50 == 0:
            pool.check()
    for slot in slots:
        pool.end(slot)
    pool.check()
    assert pool.statistics().used_bytes == 0
    assert [books.free for books in pool._books] == [
        [(TABLE_BYTES, 4 * MB - TABLE_BYTES)],
        [(TABLE_BYTES, 2 * MB - TABLE_BYTES)],
    ]
    pool.close()


def test_a_part_has_so_many_slots_and_no_more() -> None:
    pool = SlotPool(time.monotonic)
    pool.add(OwnPart(16 * MB))
    slots = [pool.take(1) for _ in range(SLOTS)]
    assert all(slots)
    assert pool.take(1) is None
    pool.check()
    pool.close()


def test_books_that_do_not_add_up_are_found() -> None:
    pool = SlotPool(time.monotonic)
    pool.add(OwnPart(2 * MB))
    slot = pool.take(4096)
    assert slot is not None
    pool._books[0].free.append((slot.start, slot.capacity))
    with pytest.raises(RuntimeError, match="not whole"):
        pool.check()
    pool._books[0].free.pop()
    pool.offer(slot, slot.start, 4096, 1)
    pool.end(slot)  # without `retract`
    with pytest.raises(RuntimeError, match="offers a free slot"):
        pool.check()
    pool.close()
