"""Shared memory between real senders and receivers, upstream's and ours."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, codec, owner
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.transfer.shm import ShmReceiver, ShmSender
from dynamo_worker_ext.wire import ShmRef

torch = pytest.importorskip("torch")

Same = Callable[[KwargsItem, KwargsItem], None]
MB = 1 << 20


def image(megabytes: float, seed: int = 0) -> KwargsItem:
    rows = int(megabytes * MB) // 2352
    pixels = torch.randint(
        0, 255, (rows, 1176), dtype=torch.int16, generator=torch.manual_seed(seed)
    ).to(torch.bfloat16)
    options: dict[str, Any] = {"keep_on_cpu": False}
    return KwargsItem(
        {
            "pixel_values": KwargsField(
                pixels, "flat", {**options, "slices": [slice(0, rows)], "dim": 0}
            ),
            "image_grid_thw": KwargsField(torch.tensor([1, 1, rows]), "batched", options),
        }
    )


@pytest_asyncio.fixture
async def receiver(limits: Limits, metrics: Metrics) -> AsyncIterator[ShmReceiver]:
    async with ShmReceiver(limits, metrics) as receiver:
        yield receiver


@pytest_asyncio.fixture
async def sender() -> AsyncIterator[ShmSender]:
    async with ShmSender() as sender:
        yield sender


async def received(receiver: ShmReceiver, refs: list[ShmRef]) -> list[KwargsItem]:
    return [codec.decode(r.payload) for r in await receiver.receive(refs)]


def field_named(length: int) -> KwargsItem:
    return KwargsItem({"x" * length: KwargsField(torch.zeros(512), "batched", {})})


async def test_a_payload_never_lies_where_the_kernel_copies_slowly(
    receiver: ShmReceiver, sender: ShmSender
) -> None:
    # Names of these lengths ask for every lead that there is.
    for length in range(1, 65):
        [ref] = await sender.offer([codec.encode(field_named(length))])
        [payload] = [one.payload for one in await receiver.receive([ref])]
        address = np.frombuffer(payload, np.uint8).ctypes.data
        assert address % 4096 not in range(1, 64)
        # And still so that a tensor of any dtype can be a view of it.
        assert (address + len(payload) - 2048) % 64 == 0


# With upstream's other half


@pytest.fixture(scope="module")
def upstream() -> Any:
    pytest.importorskip("vllm")
    return pytest.importorskip("dynamo.common.multimodal.mm_kwargs_transfer")


class Feature:
    """What upstream's sender reads of vLLM's ``MultiModalFeatureSpec``."""

    def __init__(self, data: Any, mm_hash: str) -> None:
        self.data, self.mm_hash = data, mm_hash


def as_vllm(upstream: Any, item: KwargsItem) -> Any:
    payload = b"".join(codec.encode(item))
    return upstream.decode_mm_kwargs_item(bytearray(payload))


async def test_what_upstream_sends_arrives(
    upstream: Any, receiver: ShmReceiver, assert_same_item: Same
) -> None:
    items = [image(0.05, 1), image(3, 2), image(8, 3)]
    features = [Feature(as_vllm(upstream, item), f"{at:064x}") for at, item in enumerate(items)]
    theirs = upstream.MmKwargsShmSender()
    extra, handles = await theirs.prepare(features, "image")
    try:
        refs = [ShmRef(i["name"], i["size"]) for i in extra["mm_kwargs_shm"]["items"]]
        got = await received(receiver, refs)
    finally:
        await theirs.cleanup(handles)
    for item, original in zip(got, items, strict=True):
        assert_same_item(item, original)


async def test_upstream_receives_what_we_send(upstream: Any, sender: ShmSender) -> None:
    items = [image(0.05, 1), image(3, 2)]
    refs = await sender.offer([codec.encode(item) for item in items])
    metadata = upstream.MmKwargsShmTransferMetadata(
        modality="image",
        items=[{"name": ref.name, "size": ref.size} for ref in refs],
        mm_hashes=["0" * 64, "1" * 64],
    )
    result = await upstream.MmKwargsShmReceiver().receive(metadata)
    payloads = result["__pickled_kwargs_item__"]
    assert [upstream.decode_mm_kwargs_item(p) for p in payloads] == [
        as_vllm(upstream, item) for item in items
    ]


READ_AND_EXIT = """
import asyncio, sys
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, open_receiver
from dynamo_worker_ext.wire import ShmRef
async def main():
    async with open_receiver("shm", Limits(1 << 30), Metrics()) as receiver:
        [got] = await receiver.receive([ShmRef(sys.argv[1], int(sys.argv[2]))])
        print(got.payload.nbytes)
asyncio.run(main())
"""


async def test_a_segment_survives_the_exit_of_a_process_that_read_it(
    receiver: ShmReceiver, sender: ShmSender, assert_same_item: Same
) -> None:
    item = image(2)
    [ref] = await sender.offer([codec.encode(item)])
    for _ in range(2):  # a retry, or another worker
        reader = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", READ_AND_EXIT, ref.name, str(ref.size)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (reader.stdout, reader.stderr) == (f"{ref.size}\n", "")
    assert_same_item((await received(receiver, [ref]))[0], item)


# The receiver


async def test_tensors_of_wide_elements_are_views_wherever_their_buffer_stands(
    receiver: ShmReceiver, sender: ShmSender
) -> None:
    for length in range(1, 9):
        item = KwargsItem({"n" * length: KwargsField(torch.ones(MB // 8), "batched", {})})
        refs = await sender.offer([codec.encode(item)])
        [got] = await receiver.receive(refs)
        tensor: Any = codec.decode(got.payload).fields["n" * length].data
        got.payload[-4:] = b"\0\0\0\0"
        assert tensor[-1] == 0, "a copy was made"
        assert tensor.data_ptr() % 64 == 0


async def test_memory_is_used_again_only_when_nobody_holds_it(
    receiver: ShmReceiver, sender: ShmSender, assert_same_item: Same
) -> None:
    items = [image(1, seed) for seed in range(4)]
    refs = await sender.offer([codec.encode(item) for item in items])
    held = []
    for ref in refs:
        held += await received(receiver, [ref])
    for got, item in zip(held, items, strict=True):
        assert_same_item(got, item)
    assert receiver.statistics().leased == 4
    del held[:], got
    assert receiver.statistics()[:2] == (4, 0)
    await received(receiver, refs[:1])
    assert receiver.statistics()[:2] == (4, 0)
    receiver.check()


async def test_a_segment_rounded_up_to_pages_is_read_as_far_as_its_size(
    receiver: ShmReceiver, sender: ShmSender
) -> None:
    [ref] = await sender.offer([[b"payload"]])
    os.truncate(f"/dev/shm/{ref.name}", 4096)
    [got] = await receiver.receive([ref])
    assert bytes(got.payload) == b"payload"


async def test_a_segment_unlinked_while_it_is_read_still_arrives(
    receiver: ShmReceiver, sender: ShmSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    [ref] = await sender.offer([[b"x" * MB]])
    fstat = os.fstat

    def unlink_first(fd: int) -> os.stat_result:
        Path(f"/dev/shm/{ref.name}").unlink(missing_ok=True)
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", unlink_first)
    [got] = await receiver.receive([ref])
    assert bytes(got.payload) == b"x" * MB


async def test_the_event_loop_turns_while_64_mb_are_read(
    receiver: ShmReceiver, sender: ShmSender
) -> None:
    refs = await sender.offer([[b"\0" * (64 * MB)]])
    turns = 0
    reading = asyncio.create_task(receiver.receive(refs))
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await reading)[0].payload.nbytes == 64 * MB
    assert turns > 10  # a read on the loop allows two


async def test_small_items_are_read_without_a_thread(
    receiver: ShmReceiver, sender: ShmSender
) -> None:
    refs = await sender.offer([[b"small"], [b"smaller"]])
    await receiver.receive(refs)
    assert not receiver._executor._threads
    assert not sender._executor._threads


async def test_larger_items_are_read_without_a_thread_into_memory_used_before(
    receiver: ShmReceiver, sender: ShmSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    read = receiver._read

    def watched(ref: ShmRef, stop: Any = None) -> memoryview:
        threads.append(threading.current_thread() is not threading.main_thread())
        return read(ref, stop)

    monkeypatch.setattr(receiver, "_read", watched)
    refs = await sender.offer([[b"a" * (3 * MB)], [b"b" * (3 * MB)]])
    await receiver.receive(refs[:1])
    assert threads == [True]
    await receiver.receive(refs[:1])
    assert threads == [True, False]
    await receiver.receive(refs)  # of the two buffers that this takes, one is new
    assert threads == [True, False, True, True]
    await receiver.receive(refs)
    assert threads == [True, False, True, True, False, False]


# The sender


async def test_a_segment_is_ours_alone_and_named_after_the_process(sender: ShmSender) -> None:
    refs = await sender.offer([[b"a"], [b"b"]])
    info = os.stat(f"/dev/shm/{refs[0].name}")
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_uid == os.geteuid()
    kind, pid, started, where, mark, index = refs[1].name.split("_")
    assert where == owner.identity()
    assert (kind, int(pid), index) == ("dwe", os.getpid(), "1")
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    age = up - int(started) / os.sysconf("SC_CLK_TCK")
    assert 0 <= age < 24 * 3600
    assert refs[0].name.split("_")[4] == mark


async def test_withdrawing_and_closing_leave_no_segment(sender: ShmSender) -> None:
    small = await sender.offer([[b"a"], [b"b"]])
    large = await sender.offer([[b"\0" * MB], [b"\0" * MB]])
    there = [Path(f"/dev/shm/{ref.name}") for ref in small + large]
    assert all(path.exists() for path in there)
    await sender.withdraw([small[0], large[0]])
    assert [path.exists() for path in there] == [False, True, False, True]
    await sender.close()
    assert not any(path.exists() for path in there)


async def test_a_withdrawal_that_is_cancelled_still_happens(tmp_path: Path) -> None:
    async with ShmSender(directory=tmp_path) as sender:
        refs = await sender.offer([[b"\0" * MB]])
        go = threading.Event()
        before = sender._executor.submit(go.wait, 30)  # what is withdrawn waits behind it
        withdrawing = asyncio.create_task(sender.withdraw(refs))
        await asyncio.sleep(0)
        withdrawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await withdrawing
        go.set()
        await asyncio.wrap_future(before)
        await asyncio.wrap_future(sender._executor.submit(int))
        assert os.listdir(tmp_path) == []


async def test_a_sender_does_not_unlink_what_is_not_its_own(tmp_path: Path) -> None:
    other = tmp_path / "dwe_other"
    other.write_bytes(b"x")
    async with ShmSender(directory=tmp_path) as sender:
        await sender.withdraw([ShmRef("dwe_other", 1), ShmRef("../x", 1)])
    assert other.exists()


async def test_thousands_of_pieces_are_written_in_order(
    receiver: ShmReceiver, sender: ShmSender
) -> None:
    pieces = [bytes([at % 251]) * (at % 7) for at in range(5000)]
    refs = await sender.offer([pieces])
    [got] = await receiver.receive(refs)
    assert bytes(got.payload) == b"".join(pieces)


# What a killed sender leaves behind


KILLED = """
import asyncio, os, signal, sys
from dynamo_worker_ext.transfer.shm import ShmSender

async def main():
    sender = ShmSender(directory=sys.argv[1])
    print(*[ref.name for ref in await sender.offer([[b"x" * 5000]] * 2)], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_starting_sender_sweeps_what_a_killed_one_left_and_nothing_else(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        left = process.stdout.readline().split()
        async with ShmSender(directory=tmp_path):
            assert set(os.listdir(tmp_path)) == set(left), "its owner lives"
        process.kill()
    assert set(os.listdir(tmp_path)) == set(left)
    dead = left[0].rsplit("_", 2)[0]
    pid, start, _ = dead.removeprefix("dwe_").split("_")
    others = [
        "mm_kwargs_1_abc_0",  # Dynamo's
        f"{dead}_nothex_0",
        f"dwe_{pid}_{start}_00000000_0123456789ab_0",  # of another boot or namespace
        owner.names(1)[0],  # of a process that lives: this one
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f"{dead}_0123456789ab_7").symlink_to("elsewhere")
    (tmp_path / f"{dead}_0123456789ab_8").mkdir()
    async with ShmSender(directory=tmp_path):
        found = set(os.listdir(tmp_path))
    assert found == {*others, f"{dead}_0123456789ab_7", f"{dead}_0123456789ab_8"}


async def test_what_an_owner_left_that_we_may_not_look_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"dwe_1_2_{owner.identity()}_0123456789ab_0"
    (tmp_path / name).write_bytes(b"x")

    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted", f"/proc/{pid}/stat")

    monkeypatch.setattr(owner, "start_time", refuse)
    async with ShmSender(directory=tmp_path):
        assert os.listdir(tmp_path) == [name]
    monkeypatch.undo()
    async with ShmSender(directory=tmp_path):
        assert os.listdir(tmp_path) == []


def test_a_pid_that_is_used_again_does_not_keep_what_its_last_owner_left() -> None:
    [mine] = owner.names(1)
    assert not owner.is_abandoned(mine)
    start = str(owner.start_time(os.getpid()))
    assert owner.is_abandoned(mine.replace(f"_{start}_", f"_{int(start) - 1}_"))
