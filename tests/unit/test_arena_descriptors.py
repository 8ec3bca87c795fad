"""An arena where the process has no file descriptor left."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo_worker_ext.errors import TransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.arena import ArenaReceiver, ArenaSender

MB = 1 << 20


@pytest_asyncio.fixture
async def sender(tmp_path: Path) -> AsyncIterator[ArenaSender]:
    async with ArenaSender(directory=tmp_path / "own", step_bytes=2 * MB) as sender:
        yield sender
        sender.check()


@pytest_asyncio.fixture
async def receiver(
    tmp_path: Path, limits: Limits, metrics: Metrics
) -> AsyncIterator[ArenaReceiver]:
    async with ArenaReceiver(limits, metrics, directory=tmp_path / "own") as receiver:
        yield receiver


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


async def test_a_receiver_without_a_descriptor_to_connect_is_refused(
    sender: ArenaSender, receiver: ArenaReceiver
) -> None:
    refs = await sender.offer([[b"A"]])
    with pytest.raises(TransferError, match="Too many open files") as caught, no_descriptor_left():
        await receiver.receive(refs)
    assert caught.value.reason == "segment_refused"
    [got] = await receiver.receive(refs)
    assert got.payload == b"A"


async def test_a_sender_without_a_descriptor_to_listen_is_unavailable(sender: ArenaSender) -> None:
    with pytest.raises(TransferError, match="Too many open files") as caught, no_descriptor_left():
        await sender.offer([[b"A"]])
    assert caught.value.reason == "unavailable"
    await sender.offer([[b"A"]])


async def test_memory_that_the_kernel_cannot_hand_over_is_refused(
    sender: ArenaSender, receiver: ArenaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await sender.offer([[b"A"]])
    take = socket.recv_fds

    def starved(*args: Any) -> Any:
        with no_descriptor_left():
            return take(*args)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", starved)
        with pytest.raises(TransferError, match="too many open files") as caught:
            await receiver.receive(refs)
    assert caught.value.reason == "segment_refused"
    [got] = await receiver.receive(refs)
    assert got.payload == b"A"


async def test_a_sender_that_cannot_accept_looks_again_later(
    sender: ArenaSender, receiver: ArenaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await sender.offer([[b"A"]])
    accept = socket.socket.accept
    tried = asyncio.Event()
    calls, starved = 0, True

    def count(self: socket.socket) -> Any:
        nonlocal calls
        calls += 1
        tried.set()
        with no_descriptor_left() if starved else nullcontext():
            return accept(self)

    monkeypatch.setattr(socket.socket, "accept", count)
    receiving = asyncio.create_task(receiver.receive(refs))
    await tried.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert calls == 1
    starved = False
    [got] = await receiving
    assert got.payload == b"A"
    assert calls == 2


async def test_a_sender_closed_before_it_looks_again_stays_closed(sender: ArenaSender) -> None:
    await sender.offer([[b"A"]])
    await sender.close()
    sender._accept_again()
