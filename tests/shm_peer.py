"""A second process with shared-memory senders and receivers, which does what a test tells it.

    python -m tests.shm_peer DIRECTORY

`Peer` is the test's side of it; see `told_peer`.
"""
# ruff: noqa: ASYNC110, ASYNC240 - another process is waited for

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from dynamo_worker_ext.errors import TransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.shm import ShmReceiver, ShmSender
from dynamo_worker_ext.wire import ShmRef
from tests.told_peer import WAIT_S, ToldPeer, obey


def payload(size: int, seed: int) -> bytes:
    """Bytes that differ between seeds and between places."""
    return random.Random(seed).randbytes(size)


def summary(data: Any) -> list[Any]:
    """What of a payload fits into an answer."""
    return [len(data), hashlib.blake2b(data, digest_size=8).hexdigest()]


class Peer(ToldPeer):
    """Another process with a sender and a receiver of its own.

    Usage::

        async with Peer(directory) as peer:
            refs = await peer.offer([4096])
    """

    module = "tests.shm_peer"

    async def last_answers(self) -> list[Any]:
        """What a process that has ended had still said; half a line is not counted."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            text = await self.process.stdout.read()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == b"\n"]

    async def offer(self, sizes: Sequence[int], seed: int = 1) -> list[ShmRef]:
        """Let it offer items of `payload`, of seed, seed + 1 and so on."""
        return [ShmRef(*ref) for ref in await self.ask("offer", sizes=sizes, seed=seed)]

    async def withdraw(self, refs: Sequence[ShmRef]) -> None:
        await self.ask("withdraw", refs=[astuple(ref) for ref in refs])

    async def receive(self, refs: Sequence[ShmRef]) -> Any:
        """Let it receive items: the `summary` of each; or the reason of its error."""
        return await self.ask("receive", refs=[astuple(ref) for ref in refs])

    async def stop_after(self, call: str, times: int) -> None:
        """Let it stop, as by SIGSTOP, when it has done a call of `os` so many times from now."""
        await self.ask("stop_after", call=call, times=times)

    async def stopped(self) -> None:
        """Wait until it has stopped."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        async with asyncio.timeout(WAIT_S):
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                await asyncio.sleep(0.002)

    def open_files(self) -> list[str]:
        """Names of the segments that it has open."""
        links = [os.readlink(fd) for fd in Path(f"/proc/{self.process.pid}/fd").iterdir()]
        inside = f"{self._directory}/"
        return sorted(link.removeprefix(inside) for link in links if link.startswith(inside))


class _Commands:
    def __init__(self, sender: ShmSender, receiver: ShmReceiver) -> None:
        self.sender, self.receiver = sender, receiver

    async def offer(self, sizes: list[int], seed: int) -> Any:
        items = [[payload(size, seed + at)] for at, size in enumerate(sizes)]
        return [astuple(ref) for ref in await self.sender.offer(items)]

    async def withdraw(self, refs: list[Any]) -> None:
        await self.sender.withdraw([ShmRef(*ref) for ref in refs])

    async def receive(self, refs: list[Any]) -> Any:
        try:
            received = await self.receiver.receive([ShmRef(*ref) for ref in refs])
        except TransferError as error:
            return error.reason
        return [summary(one.payload) for one in received]

    async def stop_after(self, call: str, times: int) -> None:
        original, left = getattr(os, call), times

        def counting(*args: Any, **options: Any) -> Any:
            nonlocal left
            result = original(*args, **options)
            left -= 1
            if left == 0:
                # To this thread, which could else do some more before another one takes it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return result

        setattr(os, call, counting)

    async def leased(self) -> int:
        gc.collect()
        self.receiver.check()
        return self.receiver.statistics().leased


async def _main(directory: str) -> None:
    async with (
        ShmSender(directory=directory) as sender,
        ShmReceiver(Limits(1 << 30, timeout_s=WAIT_S), Metrics(), directory=directory) as receiver,
    ):
        await obey(_Commands(sender, receiver))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
