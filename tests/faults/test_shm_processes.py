"""Segments whose other end is another process, which dies, stops or finds other files there.

The folder of each test is one in ``/dev/shm``, so that no other sender sweeps it meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import InvalidTransferError, TransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.shm import ShmReceiver, ShmSender
from dynamo_worker_ext.wire import ShmRef
from tests.descriptors import descriptors
from tests.shm_peer import Peer, payload, summary
from tests.told_peer import WAIT_S

pytestmark = pytest.mark.timeout(180)

MB = 1 << 20
LARGE = 40 * MB  # three chunks of a read
ON_THE_LOOP, IN_A_THREAD = 5000, 3 * MB


async def reason_of(doing: Awaitable[Any]) -> str:
    with pytest.raises(TransferError) as caught:
        await doing
    return caught.value.reason


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Wait for what another process or thread does in its own time."""
    async with asyncio.timeout(wait_s):
        while not condition():
            await asyncio.sleep(0.002)
            gc.collect()


async def next_sender(directory: Path) -> None:
    """A sender starts, sweeps and ends."""
    async with ShmSender(directory=directory):
        pass


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dwe_test_", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest_asyncio.fixture(autouse=True)
async def nothing_is_left_behind(directory: Path) -> AsyncIterator[None]:
    """After each fault: no descriptor more than before, and no file once a sender has come by."""
    before = descriptors()
    yield
    await until(lambda: descriptors() <= before, 10)
    await next_sender(directory)
    assert os.listdir(directory) == []


@pytest_asyncio.fixture
async def sender(directory: Path) -> AsyncIterator[ShmSender]:
    async with ShmSender(directory=directory) as sender:
        yield sender


@pytest_asyncio.fixture
async def receiver(directory: Path) -> AsyncIterator[ShmReceiver]:
    limits = Limits(256 * MB, timeout_s=WAIT_S)
    async with ShmReceiver(limits, Metrics(), directory=directory) as receiver:
        yield receiver
        await until(lambda: receiver.statistics().leased == 0)
        receiver.check()


@pytest_asyncio.fixture
async def peer(directory: Path) -> AsyncIterator[Peer]:
    async with Peer(directory) as peer:
        yield peer


class PausedReads:
    """Lets the receiver of this process read so many chunks, then holds it until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        self.held = 0
        self.go_on = threading.Event()
        left, lock, preadv = chunks, threading.Lock(), os.preadv

        def paused(*args: Any) -> int:
            nonlocal left
            with lock:
                left -= 1
                wait = left < 0
                self.held += wait
            if wait:
                self.go_on.wait(WAIT_S)
            return preadv(*args)

        monkeypatch.setattr(os, "preadv", paused)


# A sender that dies


async def test_what_a_sender_killed_before_the_read_left_is_whole_until_the_next_one_sweeps(
    peer: Peer, receiver: ShmReceiver, directory: Path
) -> None:
    sizes = [1, ON_THE_LOOP, IN_A_THREAD]
    refs = await peer.offer(sizes)
    await peer.kill()
    received = await receiver.receive(refs)
    assert [one.payload for one in received] == [payload(s, 1 + i) for i, s in enumerate(sizes)]
    async with Peer(directory) as following:
        await following.offer([1])  # it has swept
        for ref in refs:
            assert await reason_of(receiver.receive([ref])) == "segment_missing"
    assert [one.payload for one in received] == [payload(s, 1 + i) for i, s in enumerate(sizes)]


@pytest.mark.parametrize("swept", [False, True])
async def test_a_sender_killed_while_a_large_item_is_read_costs_not_a_byte(
    peer: Peer,
    receiver: ShmReceiver,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    swept: bool,
) -> None:
    refs = await peer.offer([LARGE])
    pause = PausedReads(monkeypatch, chunks=1)
    receiving = asyncio.create_task(receiver.receive(refs))
    await until(lambda: pause.held == 1)
    await peer.kill()
    if swept:
        await next_sender(directory)
        assert os.listdir(directory) == []
    pause.go_on.set()
    [one] = await receiving
    assert one.payload == payload(LARGE, 1)
    del receiving
    if swept:
        assert await reason_of(receiver.receive(refs)) == "segment_missing"


async def test_a_sender_killed_and_swept_between_items_fails_them_all_and_no_earlier_ones(
    peer: Peer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await peer.offer([100_000 + at for at in range(12)])
    async with ShmReceiver(
        Limits(MB, timeout_s=WAIT_S), Metrics(), directory=directory, threads=1, inline_bytes=0
    ) as receiver:
        earlier = await receiver.receive(refs[:3])
        pause = PausedReads(monkeypatch, chunks=5)
        receiving = asyncio.create_task(receiver.receive(refs))
        await until(lambda: pause.held == 1)
        await peer.kill()
        await next_sender(directory)
        pause.go_on.set()
        assert await reason_of(receiving) == "segment_missing"
        del receiving
        await until(lambda: receiver.statistics().leased == 3)
        receiver.check()
        for at, one in enumerate(earlier):
            assert one.payload == payload(100_000 + at, 1 + at)


async def test_a_sender_killed_after_the_read_leaves_what_was_read(
    peer: Peer, receiver: ShmReceiver, directory: Path
) -> None:
    refs = await peer.offer([ON_THE_LOOP, IN_A_THREAD])
    first, second = await receiver.receive(refs)
    await peer.kill()
    await next_sender(directory)
    assert os.listdir(directory) == []
    assert first.payload == payload(ON_THE_LOOP, 1)
    assert second.payload == payload(IN_A_THREAD, 2)
    first.payload[:] = bytes(ON_THE_LOOP)  # and is the reader's own


@pytest.mark.parametrize(
    ("call", "times"), [("posix_fallocate", 1), ("pwritev", 1), ("posix_fallocate", 3)]
)
async def test_what_a_sender_killed_while_it_wrote_left_is_swept(
    peer: Peer, directory: Path, call: str, times: int
) -> None:
    await peer.stop_after(call, times)
    await peer.tell("offer", sizes=[IN_A_THREAD] * 3, seed=1)
    await peer.stopped()
    left = os.listdir(directory)
    assert len(left) == times
    await next_sender(directory)
    assert os.listdir(directory) == left, "its owner lives"
    await peer.kill()
    await next_sender(directory)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("size", [ON_THE_LOOP, IN_A_THREAD])
async def test_a_sender_killed_while_it_withdraws_leaves_whole_items_or_none(
    peer: Peer, receiver: ShmReceiver, size: int
) -> None:
    refs = await peer.offer([size] * 4)
    await peer.stop_after("unlink", 2)
    await peer.tell("withdraw", refs=[[ref.name, ref.size] for ref in refs])
    await peer.stopped()
    await peer.kill()
    for ref in refs[:2]:
        assert await reason_of(receiver.receive([ref])) == "segment_missing"
    for at, one in enumerate(await receiver.receive(refs[2:])):
        assert one.payload == payload(size, 3 + at)


async def test_a_sender_killed_at_any_moment_never_leaves_a_false_byte(
    receiver: ShmReceiver, directory: Path
) -> None:
    dice = random.Random(0)
    for _ in range(3):
        async with Peer(directory) as peer:
            offered = [(await peer.offer([50_000, 400_000], seed=0))]
            for turn in range(1, 100):
                await peer.tell("offer", sizes=[50_000, 400_000], seed=2 * turn)
            await asyncio.sleep(dice.uniform(0, 0.05))
            await peer.kill()
            answers = await peer.last_answers()
            offered += [[ShmRef(*ref) for ref in refs] for refs in answers]
        for turn, refs in enumerate(offered):
            first, second = await receiver.receive(refs)
            assert first.payload == payload(50_000, 2 * turn)
            assert second.payload == payload(400_000, 2 * turn + 1)
            del first, second
        # What follows may have been written half, and was offered to nobody.
        await next_sender(directory)
        assert os.listdir(directory) == []
        for refs in offered:
            assert await reason_of(receiver.receive(refs)) == "segment_missing"


async def test_senders_that_start_at_once_sweep_together(peer: Peer, directory: Path) -> None:
    await peer.offer([10] * 500)
    await peer.kill()
    starting = [asyncio.to_thread(ShmSender, directory=directory) for _ in range(8)]
    started = await asyncio.gather(*starting)
    assert os.listdir(directory) == []
    for sender in started:
        await sender.close()


# A receiver that dies


async def test_a_receiver_killed_in_mid_read_leaves_the_item_to_others(
    peer: Peer, sender: ShmSender, receiver: ShmReceiver, directory: Path
) -> None:
    refs = await sender.offer([[payload(LARGE, 1)]])
    await peer.stop_after("preadv", 2)
    await peer.tell("receive", refs=[[ref.name, ref.size] for ref in refs])
    await peer.stopped()
    assert peer.open_files() == [refs[0].name]
    await peer.kill()
    assert os.listdir(directory) == [refs[0].name]
    [one] = await receiver.receive(refs)
    assert one.payload == payload(LARGE, 1)
    async with Peer(directory) as another:
        assert await another.receive(refs) == [summary(one.payload)]
        assert await another.ask("leased") == 0
        await sender.withdraw(refs)
        assert os.listdir(directory) == []
        assert await another.receive(refs) == "segment_missing"


async def test_an_item_withdrawn_while_another_process_reads_it_arrives_there_whole(
    peer: Peer, sender: ShmSender, directory: Path
) -> None:
    refs = await sender.offer([[payload(LARGE, 1)]])
    await peer.stop_after("preadv", 1)
    await peer.tell("receive", refs=[[ref.name, ref.size] for ref in refs])
    await peer.stopped()
    await sender.withdraw(refs)
    assert os.listdir(directory) == []
    peer.process.send_signal(signal.SIGCONT)
    assert await peer.answer() == [summary(payload(LARGE, 1))]
    assert peer.open_files() == []


# Another file of the same name


def shorter(path: Path, aside: Path) -> None:
    path.write_bytes(aside.read_bytes()[:-1])


def longer(path: Path, aside: Path) -> None:
    path.write_bytes(b"x" * MB)


def empty(path: Path, aside: Path) -> None:
    path.touch()


def folder(path: Path, aside: Path) -> None:
    path.mkdir()


def fifo(path: Path, aside: Path) -> None:
    os.mkfifo(path)


def symlink(path: Path, aside: Path) -> None:
    path.symlink_to(aside)


def symlink_to_itself(path: Path, aside: Path) -> None:
    path.symlink_to(path)


def hard_link(path: Path, aside: Path) -> None:
    path.hardlink_to(aside)


Make = Callable[[Path, Path], None]
REPLACED = [
    (shorter, "segment_short"),
    (empty, "segment_short"),
    (folder, "segment_foreign"),
    (fifo, "segment_foreign"),
    (symlink, "segment_foreign"),
    (symlink_to_itself, "segment_foreign"),
    (hard_link, "segment_foreign"),
]


def replace(segment: Path, make: Make) -> None:
    """Move a segment aside and put something else in its place."""
    aside = segment.with_name("aside")
    segment.rename(aside)
    make(segment, aside)


def tidy(directory: Path) -> None:
    """Remove what `replace` made, and what it moved aside."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


@pytest.mark.parametrize(("make", "reason"), REPLACED)
@pytest.mark.parametrize("size", [ON_THE_LOOP, IN_A_THREAD])
async def test_a_segment_that_was_replaced_is_an_error(
    peer: Peer, receiver: ShmReceiver, directory: Path, make: Make, reason: str, size: int
) -> None:
    refs = await peer.offer([size, size])
    replace(directory / refs[1].name, make)
    assert await reason_of(receiver.receive(refs)) == reason
    [one] = await receiver.receive(refs[:1])
    assert one.payload == payload(size, 1)
    await peer.kill()
    tidy(directory)


async def test_of_a_longer_file_no_more_is_read_than_was_offered(
    peer: Peer, receiver: ShmReceiver, directory: Path
) -> None:
    refs = await peer.offer([ON_THE_LOOP])
    replace(directory / refs[0].name, longer)
    [one] = await receiver.receive(refs)
    assert one.payload == b"x" * ON_THE_LOOP
    (directory / "aside").unlink()


@pytest.mark.parametrize("make", [make for make, _ in REPLACED])
async def test_a_segment_replaced_while_it_is_read_arrives_as_it_was(
    peer: Peer,
    receiver: ShmReceiver,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
) -> None:
    refs = await peer.offer([17 * MB])
    pause = PausedReads(monkeypatch, chunks=1)
    receiving = asyncio.create_task(receiver.receive(refs))
    await until(lambda: pause.held == 1)
    replace(directory / refs[0].name, make)
    pause.go_on.set()
    assert (await receiving)[0].payload == payload(17 * MB, 1)
    del receiving
    await peer.kill()
    tidy(directory)


@pytest.mark.parametrize("size", [ON_THE_LOOP, IN_A_THREAD])
@pytest.mark.parametrize("make", [make for make, _ in REPLACED])
async def test_a_sender_whose_segment_was_replaced_takes_back_the_others(
    sender: ShmSender, directory: Path, make: Make, size: int
) -> None:
    refs = await sender.offer([[bytes(size)] for _ in range(3)])
    replace(directory / refs[0].name, make)
    try:
        await sender.withdraw(refs)
        assert set(os.listdir(directory)) <= {refs[0].name, "aside"}
    finally:
        tidy(directory)


async def test_a_sender_whose_segments_were_replaced_closes_and_lets_go(directory: Path) -> None:
    before = descriptors()
    sender = ShmSender(directory=directory)
    refs = await sender.offer([[b"x"] for _ in range(8)])
    for ref in refs[::2]:
        replace(directory / ref.name, folder)
    try:
        await sender.close()
        assert not {ref.name for ref in refs[1::2]} & set(os.listdir(directory))
        await until(lambda: descriptors() <= before, 5)
    finally:
        tidy(directory)


# Many reads, and several ends


async def test_a_thousand_cancelled_reads_leave_the_pool_whole(peer: Peer, directory: Path) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[Any] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    refs = await peer.offer([MB, 200_000, 3000])
    wanted = [payload(MB, 1), payload(200_000, 2), payload(3000, 3)]
    limits = Limits(MB, timeout_s=WAIT_S)
    async with ShmReceiver(
        limits, Metrics(), directory=directory, pool_bytes=8 * MB, inline_bytes=0
    ) as receiver:
        receiver._inline_warm_bytes = 0  # each read is one in threads
        first = await receiver.receive(refs)
        before = descriptors()
        dice = random.Random(0)
        cancelled = busy = 0
        while cancelled < 1000:
            reads = [asyncio.create_task(receiver.receive(refs)) for _ in range(10)]
            for _ in range(dice.randrange(10)):
                await asyncio.sleep(0)
            if dice.random() < 0.5:
                await until(lambda: receiver.statistics().leased > 3)
                busy += 1
            for read in dice.sample(reads, 10):
                read.cancel()
                await asyncio.sleep(0)
            await asyncio.wait(reads)
            assert all(read.cancelled() or read.exception() is None for read in reads)
            cancelled += sum(read.cancelled() for read in reads)
        assert busy > 20, "they were cancelled before they held anything"
        del reads, read
        await until(lambda: receiver.statistics().leased == 3)
        await until(lambda: descriptors() <= before)
        receiver.check()
        assert receiver.statistics().free_bytes <= 8 * MB
        for held in (first, await receiver.receive(refs)):
            assert [one.payload for one in held] == wanted
        del first, held
        await until(lambda: receiver.statistics().leased == 0)
        receiver.check()
    assert not complaints


async def test_two_senders_and_two_receivers_at_once(
    peer: Peer, sender: ShmSender, receiver: ShmReceiver, directory: Path
) -> None:
    sizes = [1, 4095, 4097, 300_000, 3 * MB, 17 * MB]
    dice = random.Random(0)
    for turn in range(2):
        dice.shuffle(sizes)
        wanted = [payload(size, turn + at) for at, size in enumerate(sizes * 2)]
        ours, theirs = await asyncio.gather(
            sender.offer([[data[: len(data) // 3], data[len(data) // 3 :]] for data in wanted[:6]]),
            peer.offer(sizes, seed=turn + 6),
        )
        order = list(range(12))
        dice.shuffle(order)
        mixed = [(ours + theirs)[at] for at in order]
        await peer.tell("receive", refs=[[ref.name, ref.size] for ref in mixed])
        both = await asyncio.gather(receiver.receive(mixed), receiver.receive(mixed[::-1]))
        assert [one.payload for one in both[0]] == [wanted[at] for at in order]
        assert [one.payload for one in both[1]] == [wanted[at] for at in order[::-1]]
        assert await peer.answer() == [summary(wanted[at]) for at in order]
        del both
        await asyncio.gather(sender.withdraw(ours), peer.withdraw(theirs))
        assert os.listdir(directory) == []
        assert peer.open_files() == []
    assert await peer.ask("leased") == 0


# Any metadata


PARSED = {f"invalid_{what}" for what in (
    "metadata", "hash", "size", "name", "count", "placeholder", "tokens",
)}  # fmt: skip
READ = {"invalid_name", "invalid_size", "segment_missing", "segment_short", "segment_foreign"}


def metadata(refs: list[ShmRef]) -> dict[str, Any]:
    """A request's ``extra_args`` for three images."""
    hashes = [f"{at:064x}" for at in range(3)]
    places: list[Any] = [[0, 5], [10, 5]]
    places.append({"offset": 20, "length": 4, "is_embed": [True, False, True, True]})
    return {
        **wire.write_offer("shm", ["image"] * 3, hashes, dict(enumerate(refs))),
        "expanded_token_ids": list(range(40)),
        "mm_hashes": hashes,
        "mm_hashes_by_modality": {"image": hashes},
        "mm_placeholders": places,
        "mm_placeholders_by_modality": {"image": places},
    }


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**12, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, -(2**63)]),
    st.integers(),
)  # fmt: skip
NAMES = st.sampled_from(
    ["", ".", "..", "../x", "/etc/passwd", "a\0", "a\n", "x" * 251, "folder", "fifo", "symlink"]
)
HASHES = st.one_of(st.sampled_from(["a" * 16, "a" * 64, "A" * 16, "a" * 17]), st.text(max_size=20))
JUNK = st.one_of(
    NUMBERS,
    NAMES,
    HASHES,
    st.sampled_from(["image", "video", "audio", "hologram"]),
    st.none(),
    st.booleans(),
    st.floats(),
    st.binary(max_size=5),
    st.lists(st.one_of(NUMBERS, HASHES), max_size=3),
    st.dictionaries(st.text(max_size=8), NUMBERS, max_size=3),
)


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all that can be changed."""
    result = []
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        result.append((*at, key))
        if isinstance(entry, (dict, list)) and key != "expanded_token_ids":
            result += places_in(entry, (*at, key))
    return result


def mutate(extra: dict[str, Any], data: st.DataObject) -> None:
    """Change, leave out, repeat or swap one thing."""
    *path, last = data.draw(st.sampled_from(places_in(extra)))
    target: Any = extra
    for key in path:
        target = target[key]
    what = data.draw(st.integers(0, 9))
    if what == 0:
        target.pop(last)
    elif what == 1 and isinstance(target, list):
        target.append(deepcopy(target[last]))
    elif what == 2 and isinstance(target, list):
        other = data.draw(st.integers(0, len(target) - 1))
        target[last], target[other] = target[other], target[last]
    elif isinstance(target[last], int):
        target[last] = data.draw(st.one_of(NUMBERS, NUMBERS, JUNK))
    elif isinstance(target[last], str):
        target[last] = data.draw(st.one_of(NAMES, HASHES, JUNK))
    else:
        target[last] = data.draw(JUNK)


class House:
    """A sender, a receiver and their event loop, for many requests."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.sender = ShmSender(directory=directory)
        self.receiver = ShmReceiver(Limits(MB, timeout_s=WAIT_S), Metrics(), directory=directory)
        self.payloads = [bytes([65 + at]) * (1000 * at + 60) for at in range(3)]
        self.refs = self.run(self.sender.offer([[payload] for payload in self.payloads]))

    def run(self, doing: Any) -> Any:
        return self.loop.run_until_complete(doing)

    def close(self) -> None:
        self.run(self.receiver.close())
        self.run(self.sender.close())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture
def house(directory: Path) -> Iterator[House]:
    (directory / "folder").mkdir()
    os.mkfifo(directory / "fifo")
    (directory / "symlink").symlink_to("/etc/hostname")
    made = House(directory)
    yield made
    made.close()
    tidy(directory)


@given(data=st.data())
def test_mutated_metadata_gives_the_payloads_meant_or_an_error_of_ours(
    house: House, data: st.DataObject
) -> None:
    extra = deepcopy(metadata(house.refs))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(extra, data)
    media = wire.parse({"token_ids": [1], "extra_args": extra}, max_item_bytes=MB)
    if media.transfer is None:
        if extra.get("mm_kwargs_shm") is None:
            assert media.transfer_error is None
        else:
            assert isinstance(media.transfer_error, InvalidTransferError)
            assert media.transfer_error.reason in PARSED
        return
    assert media.transfer_error is None
    items, offered = media.transfer.items, media.transfer.offers["shm"]
    assert set(offered) in (set(), set(range(len(items))))
    places = sorted((item.placeholder.offset, item.placeholder.end) for item in items)
    edges = [edge for place in places for edge in place]
    assert edges == sorted(edges)
    assert not edges or 0 <= edges[0] <= edges[-1] <= len(media.transfer.expanded_token_ids)
    refs = [ref for ref in offered.values() if isinstance(ref, ShmRef)]
    assert all(0 < ref.size <= MB for ref in refs)
    by_name = {ref.name: p for ref, p in zip(house.refs, house.payloads, strict=True)}
    try:
        received = house.run(house.receiver.receive(refs))
    except TransferError as error:
        reason = error.reason
        assert reason in READ
    else:
        wanted = [by_name[ref.name][: ref.size] for ref in refs]
        assert [one.payload for one in received] == wanted
        del received
    assert house.receiver.statistics().leased == 0
    house.receiver.check()
