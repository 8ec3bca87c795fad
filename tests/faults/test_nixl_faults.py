"""Peers that are dead, late or lying, for real: other processes, other processes' addresses.

What must hold after each fault: an error of ours, a worker that lives and reads from others, and
nothing that stays in its arena or its pool.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.errors import TransferError, TransferTimeoutError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, nixl_agent, nixl_probe, nixl_request
from dynamo_worker_ext.transfer.nixl import NixlReceiver, NixlSender
from dynamo_worker_ext.wire import NixlRef
from tests.nixl_peer import Peer, pattern, summary

pytest.importorskip("nixl")

pytestmark = pytest.mark.timeout(180)

MB = 1 << 20
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


@pytest.fixture(scope="module")
def receiver() -> Iterator[NixlReceiver]:
    """One worker that has to survive everything that is done to it here."""
    receiver = NixlReceiver(Limits(64 * MB, timeout_s=30.0), Metrics(), arena_bytes=64 * MB + 4096)
    yield receiver
    asyncio.run(receiver.close())


@pytest.fixture(scope="module")
def good() -> Iterator[Peer]:
    """A sender that does nothing wrong."""
    with Peer("send") as peer:
        yield peer


@pytest.fixture
def victim() -> Iterator[Peer]:
    with Peer("send") as peer:
        yield peer


@pytest.fixture
def slow() -> Iterator[Peer]:
    """A sender over TCP, where a read needs its help and can be made to hang."""
    with Peer("send", UCX_TLS="tcp") as peer:
        yield peer


async def until(condition: Callable[[], bool], *, collect: bool = True) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)
        if collect:
            gc.collect()


def idle(receiver: NixlReceiver) -> bool:
    thread, arena, pool = receiver.statistics()
    return not (thread.waiting or thread.running or thread.quarantined) and not (
        arena.leased or pool.leased
    )


@pytest_asyncio.fixture(autouse=True)
async def the_worker_is_whole_afterwards(receiver: NixlReceiver, good: Peer) -> AsyncIterator[None]:
    yield
    refs = good.offer(MB, seed=9)
    [one] = await receiver.receive(refs)
    assert bytes(one.payload) == pattern(MB, 9)
    del one
    good.ask(do="withdraw")
    await until(lambda: idle(receiver))
    receiver.check()


async def reason_of(receiver: NixlReceiver, refs: list[NixlRef]) -> str:
    with pytest.raises(TransferError) as caught:
        await receiver.receive(refs)
    return caught.value.reason


def changed(ref: NixlRef, **fields: Any) -> NixlRef:
    """A reference whose descriptor, or another field of the request, says something else."""
    request = dict(ref.descriptor)
    [descriptor] = request["descriptors"]
    for name, value in fields.items():
        if name in descriptor:
            descriptor = descriptor | {name: value}
        else:
            request[name] = value
    return NixlRef(fields.get("size", ref.size), request | {"descriptors": [descriptor]})


def renamed(ref: NixlRef, metadata: bytes, name: str) -> NixlRef:
    """A reference whose metadata is that of another agent, under a name that is not its own."""
    return changed(ref, nixl_metadata=nixl_request.pack(nixl_request.rename(metadata, name)))


# Peers that are dead


async def test_a_peer_killed_before_first_contact_is_dead(
    receiver: NixlReceiver, victim: Peer
) -> None:
    refs = victim.offer(MB)
    victim.kill()
    assert await reason_of(receiver, refs) in ("peer_dead", "peer_refused")


async def test_a_peer_killed_after_a_read_is_dead(receiver: NixlReceiver, victim: Peer) -> None:
    refs = victim.offer(MB, MB)
    await receiver.receive(refs[:1])
    victim.kill()
    assert await reason_of(receiver, refs) in ("peer_dead", "peer_refused")
    assert await reason_of(receiver, refs) in ("peer_dead", "peer_refused")


@pytest.mark.parametrize("kind", ["victim", "slow"])
async def test_a_peer_killed_in_the_middle_of_reads_is_dead(
    receiver: NixlReceiver, kind: str, request: pytest.FixtureRequest
) -> None:
    peer: Peer = request.getfixturevalue(kind)
    refs = peer.offer(*[8 * MB] * 6)
    await receiver.receive(refs[:1])
    reads = [asyncio.create_task(receiver.receive(refs)) for _ in range(20)]
    await until(lambda: receiver.statistics()[0].running > 0)
    peer.kill()
    results = await asyncio.gather(*reads, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, TransferError)
            assert result.reason in ("peer_dead", "peer_refused")
        else:
            assert [bytes(one.payload) for one in result] == [
                pattern(8 * MB, 1 + at) for at in range(6)
            ]
    assert any(isinstance(result, TransferError) for result in results)
    del results, reads


async def test_a_sender_that_was_closed_is_no_source_of_garbage(receiver: NixlReceiver) -> None:
    sender = NixlSender(arena_bytes=MB)
    refs = await sender.offer([[pattern(1000, 1)]])
    await receiver.receive(refs)
    await sender.close()
    assert (await reason_of(receiver, refs)).startswith("peer_")


# Peers that are late


async def test_a_read_from_a_peer_that_hangs_is_a_timeout_and_its_memory_comes_back_later(
    receiver: NixlReceiver, slow: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = slow.offer(16 * MB)
    await receiver.receive(slow.offer(10))
    slow.process.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr(receiver, "limits", Limits(64 * MB, timeout_s=0.3))
        with pytest.raises(TransferTimeoutError):
            await receiver.receive(refs)
        await until(lambda: receiver.statistics()[0].quarantined == 1)
        assert receiver.statistics()[1].leased == 1  # for as long as something may arrive there
        receiver.check()
    finally:
        slow.process.send_signal(signal.SIGCONT)
    await until(lambda: idle(receiver))
    monkeypatch.undo()
    [one] = await receiver.receive(refs)
    assert bytes(one.payload) == pattern(16 * MB, 1)


async def test_a_hanging_read_does_not_keep_a_receiver_from_closing(slow: Peer) -> None:
    receiver = NixlReceiver(Limits(64 * MB, timeout_s=60), Metrics())
    refs = slow.offer(16 * MB)
    await receiver.receive(slow.offer(10))
    slow.process.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(receiver.receive(refs))
    await until(lambda: receiver.statistics()[0].running == 1)
    await receiver.close()
    with pytest.raises(TransferError) as caught:
        await reading
    assert caught.value.reason == "unavailable"


async def test_an_unknown_peer_that_hangs_is_dead_and_keeps_nobody_waiting(
    receiver: NixlReceiver, slow: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_probe, "_SILENT_S", 3.0)
    refs = slow.offer(1000)
    slow.process.send_signal(signal.SIGSTOP)
    assert await reason_of(receiver, refs) == "peer_dead"
    start = time.monotonic()
    for _ in range(5):
        assert await reason_of(receiver, refs) == "peer_dead"
    assert time.monotonic() - start < 3
    slow.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(3)
    [one] = await receiver.receive(refs)
    assert bytes(one.payload) == pattern(1000, 1)


async def test_a_late_read_never_brings_another_items_bytes(
    receiver: NixlReceiver, victim: Peer
) -> None:
    refs = victim.offer(MB)
    await receiver.receive(refs)
    await until(lambda: victim.ask(do="statistics")["unread"] == 0)
    victim.ask(do="withdraw")
    again = victim.offer(MB, seed=5)
    there, before = (ref.descriptor["descriptors"][0]["ptr"] for ref in (*again, *refs))
    assert there // 64 == before // 64
    assert await reason_of(receiver, refs) == "peer_stale"
    [one] = await receiver.receive(again)
    assert bytes(one.payload) == pattern(MB, 5)


async def test_bytes_that_changed_are_corrupt(receiver: NixlReceiver, victim: Peer) -> None:
    refs = victim.offer(MB)
    victim.ask(do="scribble")
    with pytest.raises(TransferError) as caught:
        await receiver.receive(refs)
    assert caught.value.reason == "peer_corrupt"
    # While the error is still held, what it was about is not.
    await until(lambda: idle(receiver), collect=False)


# Peers that lie


async def test_an_address_that_was_not_offered_is_refused(
    receiver: NixlReceiver, victim: Peer
) -> None:
    [ref] = victim.offer(MB)
    at = ref.descriptor["descriptors"][0]["ptr"]
    for known in (False, True):
        for ptr in (0x1000, at - 512 * MB, at + 512 * MB, 2**47):
            assert await reason_of(receiver, [changed(ref, ptr=ptr)]) == "peer_refused", known
        # The arena has room for one of these: what is refused must not keep it.
        assert await reason_of(receiver, [changed(ref, size=64 * MB)]) == "peer_refused"
        assert await reason_of(receiver, [changed(ref, size=64 * MB)]) == "peer_refused"
        await receiver.receive([ref])


async def test_an_address_within_the_arena_but_of_no_item_is_stale(
    receiver: NixlReceiver, victim: Peer
) -> None:
    [ref] = victim.offer(MB)
    at = ref.descriptor["descriptors"][0]["ptr"]
    assert await reason_of(receiver, [changed(ref, ptr=at + 4096)]) == "peer_stale"


async def test_who_uses_anothers_name_does_not_get_its_place(
    receiver: NixlReceiver, good: Peer, victim: Peer
) -> None:
    [ref] = good.offer(MB)
    [other] = victim.offer(MB, seed=2)
    honest, lying = nixl_request.parse(ref), nixl_request.parse(other)
    await receiver.receive([ref])
    with pytest.raises(TransferError):
        # The receiver would read from the liar at the address of the honest one's item.
        await receiver.receive([renamed(ref, lying.metadata, honest.agent)])
    [one] = await receiver.receive([ref])
    assert bytes(one.payload) == pattern(MB, 1)


async def test_who_uses_our_own_name_is_refused(receiver: NixlReceiver, victim: Peer) -> None:
    [ref] = victim.offer(1000)
    own = nixl_request.agent_name(receiver._thread.metadata)
    lie = renamed(ref, nixl_request.parse(ref).metadata, own)
    assert await reason_of(receiver, [lie]) == "peer_refused"


async def test_metadata_that_is_half_taken_does_not_keep_the_real_peer_out(
    receiver: NixlReceiver, victim: Peer
) -> None:
    [ref] = victim.offer(1000)
    metadata = nixl_request.parse(ref).metadata
    at = metadata.index(b"MemSection")
    halves = [metadata[:at], metadata[: at + 60], metadata.replace(b"nixlSDList", b"nixlXDList")]
    lies = [changed(ref, nixl_metadata=nixl_request.pack(half)) for half in halves]
    for known in (False, True):
        for lie in lies:
            assert await reason_of(receiver, [lie]) == "peer_refused", known
        [one] = await receiver.receive([ref])
        assert bytes(one.payload) == pattern(1000, 1)


async def test_metadata_that_crashes_nixl_takes_only_the_probe(
    receiver: NixlReceiver, victim: Peer
) -> None:
    [ref] = victim.offer(1000)
    probe = receiver._probe
    pid = probe.pid
    os.kill(pid, signal.SIGSTOP)  # it takes the question, and then dies of it
    reading = asyncio.create_task(receiver.receive([ref]))
    await until(lambda: receiver._executor._work_queue.empty())
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGSEGV)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(TransferError, match="crashes NIXL") as caught:
        await reading
    assert caught.value.reason == "peer_refused"
    after = probe.pid
    assert after != pid
    assert await reason_of(receiver, [ref]) == "peer_refused"
    assert probe.pid == after  # known by now: not tried again


async def test_a_probe_that_was_killed_while_idle_is_nobodys_fault(
    receiver: NixlReceiver, victim: Peer
) -> None:
    os.kill(receiver._probe.pid, signal.SIGKILL)
    [one] = await receiver.receive(victim.offer(1000))
    assert bytes(one.payload) == pattern(1000, 1)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@given(seed=st.integers(0, 2**32))
def test_mutated_metadata_never_harms_the_worker(
    receiver: NixlReceiver, good: Peer, loop: asyncio.AbstractEventLoop, seed: int
) -> None:
    dice = random.Random(seed)
    [ref] = good.offer(1000, seed=3)
    metadata = bytearray(nixl_request.parse(ref).metadata)
    for _ in range(dice.choice([1, 1, 1, 2, 8, 40])):
        at = dice.randrange(len(metadata))
        match dice.randrange(5):
            case 0:
                del metadata[at]
            case 1:
                metadata.insert(at, dice.randrange(256))
            case 2:
                metadata[at] ^= 1 << dice.randrange(8)
            case _:
                metadata[at] = dice.choice([0, 1, 127, 255, dice.randrange(256)])
    lie = changed(ref, nixl_metadata=nixl_request.pack(bytes(metadata)))
    try:
        [one] = loop.run_until_complete(receiver.receive([lie]))
    except TransferError as error:
        reason = error.reason
        assert reason.startswith(("invalid_", "peer_"))
    else:
        assert bytes(one.payload) == pattern(1000, 3)
    good.ask(do="withdraw")


# Many of them


async def test_a_thousand_cancelled_reads_leave_the_pool_whole(
    receiver: NixlReceiver, good: Peer
) -> None:
    refs = good.offer(MB, 100_000, seed=1)
    [first, _] = await receiver.receive(refs)
    dice = random.Random(0)
    for _ in range(100):
        reads = [asyncio.create_task(receiver.receive(refs)) for _ in range(10)]
        for read in dice.sample(reads, 10):
            await asyncio.sleep(dice.choice([0, 0, 0, 0.0002, 0.001]))
            read.cancel()
        await asyncio.wait(reads)
        assert all(read.cancelled() or read.exception() is None for read in reads)
    assert bytes(first.payload) == pattern(MB, 1)
    del reads, read, first, _
    await until(lambda: idle(receiver))
    good.ask(do="withdraw")


async def test_notifications_do_not_pile_up(receiver: NixlReceiver, good: Peer) -> None:
    rounds = 10_000 if NIGHTLY else 100
    before = good.ask(do="statistics")
    for _ in range(rounds):
        await receiver.receive(good.offer(*[100] * 10))
        good.ask(do="withdraw")
    # Each was seen and taken away. What others here left unread may be seen just now as well.
    await until(lambda: good.ask(do="statistics")["unread"] <= before["unread"])
    after = good.ask(do="statistics")
    assert after["notifications"] >= before["notifications"] + rounds * 10
    assert after["leased"] <= before["leased"]


async def test_two_senders_and_two_receivers_do_not_mix_items(
    receiver: NixlReceiver, good: Peer, victim: Peer
) -> None:
    with Peer("receive") as second:
        refs = [
            ref for seed in (1, 20) for ref in (good, victim)[seed > 1].offer(MB, 77, seed=seed)
        ]
        wanted = [pattern(MB, 1), pattern(77, 2), pattern(MB, 20), pattern(77, 21)]
        for _ in range(10):
            second.tell(do="receive", refs=[[r.size, dict(r.descriptor)] for r in refs])
            received = await receiver.receive(refs)
            assert [bytes(one.payload) for one in received] == wanted
            assert second.answer() == [summary(one) for one in wanted]
    good.ask(do="withdraw")


async def test_only_so_many_peers_are_kept(
    receiver: NixlReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "MAX_PEERS", 2)
    senders = [NixlSender(arena_bytes=4096) for _ in range(4)]
    refs = [(await sender.offer([[b"%d" % at]]))[0] for at, sender in enumerate(senders)]
    for at in (0, 1, 2, 3, 0, 3):
        [one] = await receiver.receive([refs[at]])
        assert bytes(one.payload) == b"%d" % at
        assert receiver.statistics()[0].peers <= 2
    for sender in senders:
        await sender.close()
