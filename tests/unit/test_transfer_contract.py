"""What every transport promises, tried on each that is built."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo_worker_ext import transfer
from dynamo_worker_ext.card import host_identity
from dynamo_worker_ext.errors import (
    InvalidTransferError,
    SegmentError,
    StartupError,
    TransferError,
    TransferTimeoutError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, MmKwargsReceiver, MmKwargsSender
from dynamo_worker_ext.transfer.fake import FakeReceiver, FakeSender, Fault
from dynamo_worker_ext.wire import ArenaRef, ShmRef

PAYLOADS = [b"first" * 100, b"s", b"third" * 200_000, bytes(range(256)) * 1024]
Pair = tuple[MmKwargsSender[Any], MmKwargsReceiver[Any]]


NEVER_OFFERED: dict[str, Any] = {
    "arena": ArenaRef("arena_0123456789abcdef", host_identity(), 9, 9, 1 << 20, 2**50, 1),
    "shm": ShmRef("never_offered", 2**50),
    "fake": ShmRef("never_offered", 2**50),
}


@pytest_asyncio.fixture(params=["arena", "shm", "fake"])
async def pair(
    request: pytest.FixtureRequest, limits: Limits, metrics: Metrics, tmp_path: Path
) -> AsyncIterator[Pair]:
    if request.param == "arena":
        own = tmp_path / "own"
        sender = transfer.open_sender(
            "arena", directory=own, step_bytes=4 << 20, inline_bytes=1000, metrics=metrics
        )
        receiver = transfer.open_receiver("arena", limits, metrics, directory=own)
    elif request.param == "shm":
        sender = transfer.open_sender("shm", directory=tmp_path, metrics=metrics)
        receiver = transfer.open_receiver(
            "shm", limits, metrics, directory=tmp_path, inline_bytes=1000
        )
    else:
        sender = transfer.open_sender("fake", metrics=metrics)
        receiver = transfer.open_receiver("fake", limits, metrics, sender=sender)
    async with sender, receiver:
        yield sender, receiver


async def test_payloads_arrive_whole_and_in_order(pair: Pair, metrics: Metrics) -> None:
    sender, receiver = pair
    refs = await sender.offer([[p[:3], memoryview(p)[3:]] for p in PAYLOADS])
    received = await receiver.receive(list(reversed(refs)))
    assert [bytes(r.payload) for r in received] == PAYLOADS[::-1]
    assert [ref.size for ref in refs] == [len(p) for p in PAYLOADS]
    for counter in (metrics.bytes, metrics.sent_bytes):
        assert counter.labels(receiver.transport)._value.get() == sum(map(len, PAYLOADS))
    for stage in ("send", "receive"):
        seen = metrics.registry.get_sample_value(
            "dynamo_worker_ext_mm_stage_seconds_count", {"stage": stage}
        )
        assert seen == 1


async def test_nothing_is_received_for_no_references(pair: Pair) -> None:
    assert await pair[1].receive([]) == []


async def test_a_payload_is_ours_to_write(pair: Pair) -> None:
    sender, receiver = pair
    refs = await sender.offer([[PAYLOADS[0]]])
    [first] = await receiver.receive(refs)
    first.payload[:] = b"\0" * len(first.payload)
    [second] = await receiver.receive(refs)
    assert bytes(second.payload) == PAYLOADS[0]


async def test_a_payload_outlives_the_offer_and_the_receiver(pair: Pair) -> None:
    sender, receiver = pair
    refs = await sender.offer([[p] for p in PAYLOADS])
    received = await receiver.receive(refs)
    await sender.withdraw(refs)
    await receiver.close()
    assert [bytes(r.payload) for r in received] == PAYLOADS


async def test_a_withdrawn_item_is_missing(pair: Pair) -> None:
    sender, receiver = pair
    kept, gone = await sender.offer([[b"kept"], [b"gone"]])
    await sender.withdraw([gone, gone, NEVER_OFFERED[sender.transport]])
    with pytest.raises(SegmentError) as caught:
        await receiver.receive([kept, gone])
    assert caught.value.reason in ("segment_missing", "segment_stale")
    assert len(await receiver.receive([kept])) == 1


async def test_an_item_shorter_than_it_claims_is_short(pair: Pair) -> None:
    sender, receiver = pair
    [ref] = await sender.offer([[b"twelve bytes"]])
    with pytest.raises(SegmentError) as caught:
        await receiver.receive([replace(ref, size=ref.size + 1)])
    assert caught.value.reason == "segment_short"


@pytest.mark.parametrize("size", [-1, 0, 2**40, 2**70])
async def test_a_size_outside_the_limits_is_refused(pair: Pair, size: int) -> None:
    with pytest.raises(InvalidTransferError) as caught:
        await pair[1].receive([replace(NEVER_OFFERED[pair[1].transport], size=size)])
    assert caught.value.reason == "invalid_size"


async def test_an_offer_that_takes_too_long_is_a_timeout_and_leaves_nothing() -> None:
    sender = FakeSender(timeout_s=0.05)
    sender.fault = Fault(delay_s=5)
    with pytest.raises(TransferTimeoutError, match=r"within 0\.05 s"):
        await sender.offer([[b"slow"]])
    assert not sender.payloads


async def test_closing_twice_is_closing_once(pair: Pair) -> None:
    for end in pair:
        await end.close()
        await end.close()
    with pytest.raises(TransferError):
        await pair[1].receive([replace(NEVER_OFFERED[pair[1].transport], size=1)])
    with pytest.raises(TransferError):
        await pair[0].offer([[b"late"]])


# By name


def test_only_what_is_built_is_receivable() -> None:
    assert transfer.usable() == ("arena", "shm", "nixl")


def test_a_host_without_an_identity_has_no_arena(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, metrics: Metrics
) -> None:
    monkeypatch.setattr(transfer, "host_identity", lambda: "")
    assert transfer.usable() == ("shm", "nixl")
    for open_it in (
        lambda: transfer.open_receiver("arena", limits, metrics, host_id=""),
        lambda: transfer.open_sender("arena", host_id=""),
    ):
        with pytest.raises(TransportUnavailableError, match="boot id"):
            open_it()


def test_a_transport_that_nobody_knows_is_an_error_at_start(
    limits: Limits, metrics: Metrics
) -> None:
    with pytest.raises(StartupError, match="'carrier-pigeon'; there is arena"):
        transfer.open_receiver("carrier-pigeon", limits, metrics)


def test_a_host_without_shared_memory_is_an_unavailable_transport(
    limits: Limits, metrics: Metrics, tmp_path: Path
) -> None:
    with pytest.raises(TransportUnavailableError, match="needs the directory"):
        transfer.open_receiver("shm", limits, metrics, directory=tmp_path / "none")


# The fake's faults


@pytest.fixture
def fake(metrics: Metrics) -> FakeReceiver:
    return FakeReceiver(Limits(1000, timeout_s=0.1), metrics, FakeSender())


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("timeout", TransferTimeoutError),
        ("unavailable", TransportUnavailableError),
        ("segment_missing", SegmentError),
        ("invalid_frame", InvalidTransferError),
    ],
)
async def test_a_fake_fails_with_the_reason_given(
    fake: FakeReceiver, reason: str, kind: type[TransferError]
) -> None:
    good, bad = await fake.sender.offer([[b"good"], [b"bad"]])
    fake.faults[bad.name] = Fault(reason=reason)
    with pytest.raises(kind) as caught:
        await fake.receive([good, bad])
    assert caught.value.reason == reason
    assert fake.in_flight == 0
    assert len(await fake.receive([good])) == 1


async def test_a_fake_that_is_too_slow_runs_into_the_deadline(fake: FakeReceiver) -> None:
    refs = await fake.sender.offer([[b"slow"]])
    fake.fault = Fault(delay_s=5)
    with pytest.raises(TransferTimeoutError, match=r"within 0\.1 s"):
        await fake.receive(refs)
    assert fake.in_flight == 0


async def test_a_fake_lets_go_when_it_is_cancelled(fake: FakeReceiver) -> None:
    refs = await fake.sender.offer([[b"a"], [b"b"]])
    fake.fault = Fault(delay_s=5)
    task = asyncio.create_task(fake.receive(refs))
    await asyncio.sleep(0.01)
    assert fake.in_flight == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.in_flight == 0


async def test_a_fake_truncates_what_it_hands_on(fake: FakeReceiver) -> None:
    refs = await fake.sender.offer([[b"long enough"]])
    fake.fault = Fault(truncate=4)
    [received] = await fake.receive(refs)
    assert bytes(received.payload) == b"long"


async def test_a_fake_that_completes_in_reverse_keeps_the_order(fake: FakeReceiver) -> None:
    refs = await fake.sender.offer([[b"a"], [b"b"], [b"c"]])
    fake.reverse = True
    received = await fake.receive(refs)
    assert [bytes(r.payload) for r in received] == [b"a", b"b", b"c"]
    assert fake.completed == [ref.name for ref in reversed(refs)]


@pytest.mark.parametrize("reason", ["segment_full", "unavailable"])
async def test_a_fake_sender_fails_with_the_reason_given(reason: str) -> None:
    sender = FakeSender()
    sender.fault = Fault(reason=reason)
    with pytest.raises(TransferError) as caught:
        await sender.offer([[b"x"]])
    assert caught.value.reason == reason
    assert not sender.payloads


# What a subclass must not do without


def test_the_contract_is_two_methods_and_a_size() -> None:
    for kind, methods in (
        (MmKwargsReceiver, {"_receive", "_size", "close"}),
        (MmKwargsSender, {"_offer", "withdraw", "close"}),
    ):
        assert vars(kind)["__abstractmethods__"] == methods
