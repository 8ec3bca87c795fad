"""NIXL between processes: ours with ours and with upstream's other half, over each way of UCX."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from dynamo_worker_ext import transfer
from dynamo_worker_ext.errors import (
    SegmentError,
    TransferError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, codec
from dynamo_worker_ext.transfer.buffers import BufferPool
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.transfer.nixl import NixlReceiver, NixlSender
from dynamo_worker_ext.transfer.nixl_thread import AgentThread
from dynamo_worker_ext.wire import NixlRef, ShmRef
from tests.nixl_peer import Peer, pattern, summary

pytest.importorskip("nixl")

pytestmark = pytest.mark.timeout(240)

MB = 1 << 20
SIZES = (5 * MB, 1, 100_000, MB)


@pytest.fixture(scope="module")
def receiver() -> Iterator[NixlReceiver]:
    """One for all tests here, as in a worker; nothing may be left in it at the end."""
    receiver = NixlReceiver(Limits(64 * MB, timeout_s=30.0), Metrics())
    yield receiver
    asyncio.run(receiver.close())
    gc.collect()
    receiver.check()
    _, arena, pool = receiver.statistics()
    assert (arena.leased, pool.leased) == (0, 0)


@pytest_asyncio.fixture
async def sender() -> AsyncIterator[NixlSender]:
    async with NixlSender(arena_bytes=16 * MB) as sender:
        yield sender
    sender.check()


@pytest.fixture(scope="module")
def ours() -> Iterator[Peer]:
    with Peer("send") as peer:
        yield peer


async def until(condition: Callable[[], bool]) -> None:
    """Wait, patiently, for what happens in a thread or in another process."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


async def reason_of(receiver: NixlReceiver, refs: list[Any]) -> str:
    with pytest.raises(TransferError) as caught:
        await receiver.receive(refs)
    return caught.value.reason


# What every transport promises


def test_its_threads_give_way_to_the_event_loop(receiver: NixlReceiver) -> None:
    ours = {one.native_id: one.name for one in threading.enumerate() if one.native_id is not None}
    everyone = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    batch = [one for one in everyone if os.sched_getscheduler(one) == os.SCHED_BATCH]
    assert "dwe-nixl" in {ours[one] for one in batch if one in ours}
    assert any(one not in ours for one in batch)  # NIXL's own, which makes progress


async def test_payloads_arrive_whole_and_in_order(receiver: NixlReceiver, ours: Peer) -> None:
    refs = ours.offer(*SIZES, seed=3)
    received = await receiver.receive(refs[::-1])
    wanted = [pattern(size, 3 + at) for at, size in enumerate(SIZES)]
    assert [bytes(one.payload) for one in received] == wanted[::-1]
    assert [ref.size for ref in refs] == list(SIZES)
    counted = receiver.metrics.bytes.labels("nixl")._value.get()
    assert counted >= sum(SIZES)
    ours.ask(do="withdraw")


async def test_nothing_is_received_for_no_references(receiver: NixlReceiver) -> None:
    assert await receiver.receive([]) == []


async def test_a_payload_is_ours_to_write(receiver: NixlReceiver, sender: NixlSender) -> None:
    refs = await sender.offer([[b"abc" * 1000]])
    [first] = await receiver.receive(refs)
    first.payload[:] = bytes(3000)
    [second] = await receiver.receive(refs)
    assert bytes(second.payload) == b"abc" * 1000


async def test_a_payload_outlives_the_offer_and_the_receiver(sender: NixlSender) -> None:
    refs = await sender.offer([[b"first"], [b"second" * 100_000]])
    async with NixlReceiver(Limits(MB), Metrics()) as receiver:
        received = await receiver.receive(refs)
    await sender.withdraw(refs)
    assert [bytes(one.payload) for one in received] == [b"first", b"second" * 100_000]


async def test_a_payload_is_laid_so_that_decoding_copies_nothing(
    receiver: NixlReceiver, sender: NixlSender
) -> None:
    torch = pytest.importorskip("torch")
    from dynamo_worker_ext.transfer import codec
    from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem

    pixels = torch.arange(100_000, dtype=torch.float32)
    field = KwargsField(pixels, "batched", {"keep_on_cpu": False})
    refs = await sender.offer([codec.encode(KwargsItem({"pixel_values": field}))])
    [one] = await receiver.receive(refs)
    decoded: Any = codec.decode(one.payload).fields["pixel_values"].data
    assert torch.equal(decoded, pixels)
    start = torch.frombuffer(one.payload, dtype=torch.uint8).data_ptr()
    assert start < decoded.data_ptr() < start + len(one.payload)


async def test_a_withdrawn_item_is_stale_and_the_others_are_not(
    receiver: NixlReceiver, sender: NixlSender
) -> None:
    kept, gone = await sender.offer([[b"kept"], [b"gone"]])
    await sender.withdraw([gone, gone, ShmRef("other", 1), NixlRef(1, {})])  # type: ignore[list-item]
    assert await reason_of(receiver, [kept, gone]) == "peer_stale"
    [one] = await receiver.receive([kept])
    assert bytes(one.payload) == b"kept"


@pytest.mark.parametrize("size", [-1, 0, 2**40])
async def test_a_size_outside_the_limits_is_refused(receiver: NixlReceiver, size: int) -> None:
    assert await reason_of(receiver, [NixlRef(size, {})]) == "invalid_size"


async def test_an_item_larger_than_the_arena_is_refused(sender: NixlSender) -> None:
    refs = await sender.offer([[bytes(2 * MB)]])
    async with NixlReceiver(Limits(64 * MB), Metrics(), arena_bytes=MB) as receiver:
        assert await reason_of(receiver, refs) == "invalid_size"


async def test_reads_that_find_no_room_wait_for_it(sender: NixlSender) -> None:
    refs = await sender.offer([[pattern(MB, at)] for at in range(8)])
    async with NixlReceiver(Limits(MB), Metrics(), arena_bytes=MB + 4096) as receiver:
        received = await receiver.receive(refs)
        assert [bytes(one.payload) for one in received] == [pattern(MB, at) for at in range(8)]
        receiver.check()


async def test_held_payloads_leave_room_for_the_largest(sender: NixlSender) -> None:
    limits = Limits(3 * MB, timeout_s=30.0)
    async with NixlReceiver(limits, Metrics(), arena_bytes=6 * MB) as receiver:
        refs = await sender.offer([_tensor_payload(MB) for _ in range(5)])
        held = [await receiver.receive([ref]) for ref in refs]

        def leased() -> tuple[int, int]:
            _, arena, pool = receiver.statistics()
            return arena.leased, pool.leased

        await until(lambda: leased() == (2, 3))
        [largest] = await sender.offer([_tensor_payload(3 * MB - 4096)])
        await receiver.receive([largest])
        for [one] in held:
            tensor = codec.decode(one.payload).fields["x"].data
            assert (tensor.numpy() == 7).all()
        del tensor, one, held
        gc.collect()
        await until(lambda: leased() == (0, 0))


def _tensor_payload(nbytes: int) -> list[codec.Piece]:
    tensor = torch.full((nbytes,), 7, dtype=torch.uint8)
    return codec.encode(KwargsItem({"x": KwargsField(tensor, "batched", {})}))


async def test_closing_twice_is_closing_once(sender: NixlSender) -> None:
    receiver = NixlReceiver(Limits(MB), Metrics())
    refs = await sender.offer([[b"x"]])
    for end in (receiver, sender):
        await end.close()
        await end.close()
    assert await reason_of(receiver, refs) == "unavailable"
    with pytest.raises(TransportUnavailableError):
        await sender.offer([[b"x"]])


async def test_closing_leaves_no_process_and_no_thread(sender: NixlSender) -> None:
    refs = await sender.offer([[bytes(MB)]])
    before = {thread.name for thread in threading.enumerate()}
    receiver = NixlReceiver(Limits(MB), Metrics())
    await receiver.receive(refs)
    pid = receiver._probe.pid
    await receiver.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    started = {t.name for t in threading.enumerate() if t.name.startswith("dwe-nixl")}
    assert started <= before


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_the_probe_loads_nixl_and_not_torch(
    sender: NixlSender, receiver: NixlReceiver
) -> None:
    """100 MB, in a process that most workers start and never use."""
    await receiver.receive(await sender.offer([[b"x"]]))
    loaded = mapped(receiver._probe.pid)
    assert "libnixl" in loaded
    assert "libtorch" not in loaded


async def test_the_probe_ends_with_its_parent() -> None:
    code = (
        "import os, sys; from dynamo_worker_ext.transfer.nixl_probe import Probe\n"
        "print(Probe().pid, flush=True); os._exit(0)"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
    )
    await until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


# The sender


async def test_a_full_arena_is_an_error_of_the_sender(sender: NixlSender) -> None:
    held = await sender.offer([[bytes(10 * MB)]])
    with pytest.raises(SegmentError) as caught:
        await sender.offer([[bytes(3 * MB)], [bytes(4 * MB)]])
    assert caught.value.reason == "segment_full"
    assert sender.statistics()[1].leased == 1
    await sender.withdraw(held)
    assert len(await sender.offer([[bytes(7 * MB)], [bytes(7 * MB)]])) == 2


async def test_what_was_read_is_free_at_once_and_what_was_not_only_when_needed(
    receiver: NixlReceiver, sender: NixlSender
) -> None:
    read, unread = await sender.offer([[b"read"], [b"unread"]])
    await receiver.receive([read])
    await until(lambda: len(sender._unread) == 1)
    await sender.withdraw([read, unread])
    assert sender.statistics()[1].leased == 1
    large = await sender.offer([[bytes(12 * MB)]])
    assert sender.statistics()[1].leased == 2
    await sender.withdraw(large)
    await sender.offer([[bytes(12 * MB)]])
    assert sender.statistics()[1].leased == 1


async def test_a_cancelled_offer_leaves_nothing(sender: NixlSender) -> None:
    offering = asyncio.create_task(sender.offer([[bytes(4 * MB)]] * 2))
    await asyncio.sleep(0)
    offering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offering
    await until(lambda: gc.collect() >= 0 and sender.statistics()[1].leased == 0)
    assert not sender._offers


# With upstream's other half


@pytest.fixture(scope="module")
def has_upstream() -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("dynamo.common.multimodal.mm_kwargs_transfer")


@pytest.fixture(scope="module")
def upstreams(has_upstream: None) -> Iterator[dict[str, Peer]]:
    with Peer("send", "--upstream") as sender, Peer("receive", "--upstream") as receiver:
        yield {"sender": sender, "receiver": receiver}


def at_work(peer: Peer) -> Iterator[Peer]:
    """Upstream's agents take a core each, so they are stopped while nobody needs them."""
    peer.process.send_signal(signal.SIGCONT)
    yield peer
    peer.process.send_signal(signal.SIGSTOP)


@pytest.fixture
def upstreams_sender(upstreams: dict[str, Peer]) -> Iterator[Peer]:
    yield from at_work(upstreams["sender"])


@pytest.fixture
def upstreams_receiver(upstreams: dict[str, Peer]) -> Iterator[Peer]:
    yield from at_work(upstreams["receiver"])


async def test_upstreams_sender_is_read_and_told_so(
    receiver: NixlReceiver, upstreams_sender: Peer
) -> None:
    for seed in range(3):  # each item has other metadata, under the same agent's name
        refs = upstreams_sender.offer(2 * MB, 999, seed=seed)
        received = await receiver.receive(refs)
        wanted = [pattern(2 * MB, seed), pattern(999, seed + 1)]
        assert [bytes(one.payload) for one in received] == wanted
        assert upstreams_sender.ask(do="withdraw") < 30  # else it waits for a minute


async def test_upstreams_sender_is_told_of_what_will_not_be_read(
    receiver: NixlReceiver, upstreams_sender: Peer
) -> None:
    refs = upstreams_sender.offer(MB, 1000)
    broken = NixlRef(5, refs[1].descriptor)
    assert await reason_of(receiver, [refs[0], broken]) == "invalid_size"
    [one] = await receiver.receive(refs[1:])
    assert bytes(one.payload) == pattern(1000, 2)
    # So that the first was not read, and its sender does not wait for that.
    assert upstreams_sender.ask(do="withdraw") < 30


async def test_upstreams_sender_is_told_of_what_was_declined(
    receiver: NixlReceiver, upstreams_sender: Peer
) -> None:
    refs = upstreams_sender.offer(MB, MB)
    receiver.decline([refs[0], NixlRef(5, {}), refs[1]])
    assert await asyncio.to_thread(upstreams_sender.ask, do="withdraw") < 30


async def test_upstreams_sender_is_told_of_a_read_that_was_cancelled(
    receiver: NixlReceiver, upstreams_sender: Peer
) -> None:
    refs = upstreams_sender.offer(MB, MB, MB)
    reading = asyncio.create_task(receiver.receive(refs))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await asyncio.to_thread(upstreams_sender.ask, do="withdraw") < 30


async def test_upstreams_receiver_reads_ours(sender: NixlSender, upstreams_receiver: Peer) -> None:
    data = [pattern(MB, 1), pattern(12_345, 2)]
    refs = await sender.offer([[one] for one in data])
    assert upstreams_receiver.receive(refs) == [summary(one) for one in data]
    await until(lambda: not sender._unread)
    await sender.withdraw(refs)
    assert sender.statistics()[1].leased == 0


async def test_upstreams_receiver_still_reads_what_was_just_withdrawn(
    sender: NixlSender, upstreams_receiver: Peer
) -> None:
    refs = await sender.offer([[pattern(MB, 1)]])
    await sender.withdraw(refs)
    await sender.offer([[pattern(MB, 2)]])
    assert upstreams_receiver.receive(refs) == [summary(pattern(MB, 1))]


# Ways of UCX, and what waiting costs


def test_plain_tcp_carries_it_too() -> None:
    with Peer("send", UCX_TLS="tcp") as peer, Peer("receive", UCX_TLS="tcp") as reader:
        for seed in range(3):
            refs = peer.offer(3 * MB, 10, seed=seed)
            assert reader.receive(refs) == [
                summary(pattern(3 * MB, seed)),
                summary(pattern(10, seed + 1)),
            ]
        peer.ask(do="withdraw")
        assert reader.receive(refs) == "peer_stale"


def test_waiting_costs_next_to_nothing(receiver: NixlReceiver, ours: Peer) -> None:
    def seconds(pid: int | str) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    asyncio.run(receiver.receive(ours.offer(1000)))
    processes = ["self", ours.process.pid, receiver._probe.pid]
    before = [seconds(pid) for pid in processes]
    start = time.monotonic()
    time.sleep(2)  # what is measured here is doing nothing
    used = [(seconds(pid) - was) for pid, was in zip(processes, before, strict=True)]
    # The bound is 3 % of a core; a thread that spins takes all that it can get.
    assert max(used) / (time.monotonic() - start) < 0.1, used


# By name


async def test_nixl_is_the_last_choice_and_opened_by_name(
    metrics: Metrics, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transfer.usable() == ("arena", "shm", "nixl")
    async with (
        transfer.open_sender("nixl", arena_bytes=MB) as sender,
        transfer.open_receiver("nixl", limits, metrics, arena_bytes=MB) as receiver,
    ):
        [one] = await receiver.receive(await sender.offer([[b"x"]]))
        assert bytes(one.payload) == b"x"
    monkeypatch.setattr(transfer, "find_spec", lambda name: None)
    assert "nixl" not in transfer.usable()


def test_a_host_without_nixl_is_an_unavailable_transport(
    metrics: Metrics, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._bindings", None)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransportUnavailableError, match="needs the packages nixl"):
        transfer.open_receiver("nixl", limits, metrics)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [TypeError("8 arguments"), AttributeError("no nixlAgentConfig")])
def test_bindings_of_another_version_are_an_unavailable_transport(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("nixl._bindings.nixlAgentConfig", other)
    with pytest.raises(TransportUnavailableError, match=r"nixl 1\.4\.1 to 1\.5\.1.*Error: "):
        AgentThread(MB, BufferPool(MB))


def test_a_probe_that_cannot_be_started_is_an_unavailable_transport(
    metrics: Metrics, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(*args: Any, **kwargs: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    before = threading.active_count()
    monkeypatch.setattr(subprocess, "Popen", too_many)
    with pytest.raises(TransportUnavailableError, match="cannot be started"):
        NixlReceiver(limits, metrics, arena_bytes=MB)
    assert threading.active_count() <= before


def test_an_arena_that_there_is_no_memory_for_is_an_unavailable_transport(
    metrics: Metrics, limits: Limits
) -> None:
    with pytest.raises(TransportUnavailableError, match="no memory for an arena"):
        NixlReceiver(limits, metrics, arena_bytes=1 << 60)
