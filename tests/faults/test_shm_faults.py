"""Segments that are missing, short, foreign or hostile; memory that is full; reads cut off.

The faults are made for real, on ``/dev/shm`` or on a small tmpfs of the test's own.
"""
# ruff: noqa: ASYNC110, ASYNC240 - files are the subject here, and threads are waited for

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo_worker_ext.errors import TransferError, TransferTimeoutError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.shm import ShmReceiver, ShmSender
from dynamo_worker_ext.wire import ShmRef
from tests.descriptors import descriptors

MB = 1 << 20
NOBODY = 65534


def on_shm(name: str) -> Path:
    return Path("/dev/shm") / name


@pytest.fixture
def segment() -> Iterator[Path]:
    path = on_shm(f"dwe_test_{os.getpid()}_{time.monotonic_ns()}")
    path.write_bytes(b"A" * MB)
    path.chmod(0o600)
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest_asyncio.fixture
async def receiver(limits: Limits, metrics: Metrics) -> AsyncIterator[ShmReceiver]:
    async with ShmReceiver(limits, metrics, inline_bytes=MB // 2, inline_warm_bytes=0) as receiver:
        yield receiver


async def reason_of(receiving: Awaitable[Any]) -> str:
    with pytest.raises(TransferError) as caught:
        await receiving
    return caught.value.reason


@pytest_asyncio.fixture(autouse=True)
async def nothing_is_left_behind(receiver: ShmReceiver) -> AsyncIterator[None]:
    """After each fault: no descriptor more than before, and a whole pool with nothing lent."""
    before = descriptors()
    yield
    for _ in range(500):
        if descriptors() <= before and receiver.statistics().leased == 0:
            break
        # A read that was cut off ends by itself, a little later.
        await asyncio.sleep(0.01)
        gc.collect()
    assert descriptors() <= before
    assert receiver.statistics().leased == 0
    receiver.check()


# What is not there, or not what it should be


async def test_a_segment_of_another_host_is_missing(receiver: ShmReceiver) -> None:
    assert await reason_of(receiver.receive([ShmRef("mm_kwargs_1_2_3", MB)])) == "segment_missing"


async def test_a_segment_truncated_before_it_is_opened_is_short(
    receiver: ShmReceiver, segment: Path
) -> None:
    os.truncate(segment, MB // 2)
    assert await reason_of(receiver.receive([ShmRef(segment.name, MB)])) == "segment_short"


@pytest.mark.parametrize("left", [0, 5, MB // 2])
async def test_a_segment_truncated_after_its_size_was_seen_is_short_and_no_sigbus(
    receiver: ShmReceiver, segment: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat = os.fstat

    def truncate_behind(fd: int) -> os.stat_result:
        info = fstat(fd)
        os.truncate(segment, left)
        return info

    monkeypatch.setattr(os, "fstat", truncate_behind)
    assert await reason_of(receiver.receive([ShmRef(segment.name, MB)])) == "segment_short"


async def test_an_empty_file_is_short(receiver: ShmReceiver, segment: Path) -> None:
    segment.write_bytes(b"")
    assert await reason_of(receiver.receive([ShmRef(segment.name, 1)])) == "segment_short"


async def test_one_bad_segment_of_several_fails_them_all(
    receiver: ShmReceiver, segment: Path
) -> None:
    good = ShmRef(segment.name, MB)
    refs = [good, good, ShmRef("mm_kwargs_gone", MB), good]
    assert await reason_of(receiver.receive(refs)) == "segment_missing"


def symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def hard_link(path: Path) -> None:
    path.unlink()
    victim = path.with_name(path.name + "_victim")
    victim.write_bytes(b"secret" * MB)
    os.link(victim, path)


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "make", [symlink, dangling, directory, fifo, unix_socket, hard_link, of_another_user]
)
@pytest.mark.parametrize("size", [1, MB], ids=["on the loop", "in a thread"])
async def test_what_is_no_plain_file_of_ours_is_foreign(
    receiver: ShmReceiver, segment: Path, make: Callable[[Path], None], size: int
) -> None:
    make(segment)
    try:
        reason = await reason_of(receiver.receive([ShmRef(segment.name, size)]))
    finally:
        segment.with_name(segment.name + "_victim").unlink(missing_ok=True)
    assert reason == "segment_foreign"


async def test_a_trusted_users_segment_is_read(
    limits: Limits, metrics: Metrics, segment: Path
) -> None:
    of_another_user(segment)
    async with ShmReceiver(limits, metrics, trusted_uids=[NOBODY]) as trusting:
        [got] = await trusting.receive([ShmRef(segment.name, MB)])
    assert got.payload == b"A" * MB


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../etc/passwd", "/etc/passwd", "a/b", "a//b", ".hidden", "-rf"],
    ids=ascii,
)
async def test_a_name_with_a_path_is_refused(receiver: ShmReceiver, name: str) -> None:
    assert await reason_of(receiver.receive([ShmRef(name, 1)])) == "invalid_name"


@pytest.mark.parametrize("name", ["a\0b", "a\n", "a b", "x" * 251, "\xe9", "\udcff"], ids=ascii)
async def test_a_name_of_odd_characters_is_refused(receiver: ShmReceiver, name: str) -> None:
    assert await reason_of(receiver.receive([ShmRef(name, 1)])) == "invalid_name"


@pytest.mark.parametrize("size", [-1, 0, 1 << 40])
async def test_a_size_nobody_allowed_is_refused(
    receiver: ShmReceiver, segment: Path, size: int
) -> None:
    assert await reason_of(receiver.receive([ShmRef(segment.name, size)])) == "invalid_size"


async def test_an_operating_system_that_refuses_is_a_transfer_error(
    receiver: ShmReceiver, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(*args: Any, **kwargs: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", too_many)
    receiving = receiver.receive([ShmRef(segment.name, 1)])
    assert await reason_of(receiving) == "segment_refused"


async def test_a_receiver_never_unlinks(receiver: ShmReceiver, segment: Path) -> None:
    await receiver.receive([ShmRef(segment.name, MB)])
    await reason_of(receiver.receive([ShmRef(segment.name, 2 * MB)]))
    await receiver.close()
    assert segment.read_bytes() == b"A" * MB


# Reads that are cut off


class SlowReads:
    """Holds reads at their first byte until they are let go, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = 0
        self.go = False
        preadv = os.preadv

        def slow(*args: Any) -> int:
            self.started += 1
            while not self.go:
                time.sleep(0.001)
            return preadv(*args)

        monkeypatch.setattr(os, "preadv", slow)

    async def wait_for(self, count: int) -> None:
        while self.started < count:
            await asyncio.sleep(0.001)


async def test_a_cancelled_read_lets_go_of_everything(
    receiver: ShmReceiver, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowReads(monkeypatch)
    task = asyncio.create_task(receiver.receive([ShmRef(segment.name, MB)] * 6))
    await slow.wait_for(4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    slow.go = True  # the threads end now; the fixture waits for what they held
    # Those that had not started never do.
    await receiver.receive([ShmRef(segment.name, MB)])
    assert slow.started == 5


async def test_a_read_that_takes_too_long_is_a_timeout(
    metrics: Metrics, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowReads(monkeypatch)
    async with ShmReceiver(Limits(MB, timeout_s=0.05), metrics, inline_bytes=0) as receiver:
        with pytest.raises(TransferTimeoutError):
            await receiver.receive([ShmRef(segment.name, MB)])
        slow.go = True
    assert receiver.statistics().leased == 0


async def test_closing_ends_reads_in_flight_with_an_error(
    limits: Limits, metrics: Metrics, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowReads(monkeypatch)
    receiver = ShmReceiver(limits, metrics, threads=1, inline_bytes=0)
    task = asyncio.create_task(receiver.receive([ShmRef(segment.name, MB)] * 3))
    await slow.wait_for(1)
    closing = asyncio.create_task(receiver.close())
    await asyncio.sleep(0.01)
    slow.go = True
    await closing
    assert await reason_of(task) == "unavailable"
    del task
    gc.collect()
    assert receiver.statistics().leased == 0


async def test_memory_of_a_failed_receive_is_free_while_its_error_is_still_held(
    receiver: ShmReceiver, segment: Path
) -> None:
    with pytest.raises(TransferError) as caught:
        await receiver.receive([ShmRef(segment.name, MB)] * 3 + [ShmRef("gone", MB)])
    for _ in range(100):
        if receiver.statistics().leased == 0:
            break
        await asyncio.sleep(0.01)
    assert receiver.statistics().leased == 0
    assert caught.value.reason == "segment_missing"


# Memory that is full


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB. Without the right to mount one, the tests that need it are skipped."""
    where = tmp_path / "shm"
    where.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)],
        capture_output=True,
        check=False,
    )
    if not made or made.returncode:
        pytest.skip("needs the right to mount a small tmpfs (run as root)")
    yield where
    subprocess.run(["umount", str(where)], check=True)


async def test_a_full_memory_is_an_error_of_the_sender_and_leaves_nothing(
    small_memory: Path,
) -> None:
    async with ShmSender(directory=small_memory) as sender:
        held = await sender.offer([[b"\0" * (3 * MB)]])
        assert await reason_of(sender.offer([[b"\0" * (3 * MB)]] * 2)) == "segment_full"
        assert [path.name for path in small_memory.iterdir()] == [held[0].name]
        await sender.withdraw(held)
        assert len(await sender.offer([[b"\0" * (3 * MB)]] * 2)) == 2
    assert not list(small_memory.iterdir())


async def test_a_memory_filled_by_others_is_an_error_of_the_sender(small_memory: Path) -> None:
    (small_memory / "others").write_bytes(b"\0" * (8 * MB))
    async with ShmSender(directory=small_memory) as sender:
        assert await reason_of(sender.offer([[b"tiny"]])) == "segment_full"
    assert [path.name for path in small_memory.iterdir()] == ["others"]


# Offers that are cut off


async def test_a_cancelled_offer_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, go, started = os.posix_fallocate, False, 0

    def slow(*args: Any) -> None:
        nonlocal started
        started += 1
        while not go:
            time.sleep(0.001)
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    async with ShmSender(directory=tmp_path) as sender:
        running = asyncio.create_task(sender.offer([[b"\0" * MB]] * 2))
        waiting = asyncio.create_task(sender.offer([[b"\0" * MB]] * 2))
        while not started:
            await asyncio.sleep(0.001)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go = True
        for _ in range(500):
            if not sender._live:
                break
            await asyncio.sleep(0.01)
        assert not list(tmp_path.iterdir())
    assert started == 1


async def test_closing_during_an_offer_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def slow(*args: Any) -> None:
        time.sleep(0.05)
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    sender = ShmSender(directory=tmp_path)
    offering = asyncio.create_task(sender.offer([[b"\0" * MB]]))
    await asyncio.sleep(0.01)
    await sender.close()
    assert not list(tmp_path.iterdir())
    await asyncio.wait([offering])
    assert await reason_of(sender.offer([[b"x"]])) == "unavailable"
