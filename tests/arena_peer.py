"""A second process at the other end of an arena, which does what a test tells it.

    python -m tests.arena_peer DIRECTORY

`Peer` is the test's side of it; see `told_peer`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from dynamo_worker_ext.errors import TransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.arena import ArenaReceiver, ArenaSender
from dynamo_worker_ext.wire import ArenaRef
from tests.told_peer import ToldPeer, obey


class Peer(ToldPeer):
    """Another process with a sender and a receiver of its own.

    Usage::

        async with Peer(directory) as peer:
            refs = await peer.offer([4096])
    """

    module = "tests.arena_peer"

    async def offer(self, sizes: Sequence[int], fill: int = 0) -> list[ArenaRef]:
        """Let it offer items of `sizes` bytes; item i is filled with ``fill + i``."""
        return [ArenaRef(*ref) for ref in await self.ask("offer", sizes=sizes, fill=fill)]

    async def receive(self, refs: Sequence[ArenaRef]) -> Any:
        """Let it receive and hold: of each item its size and its set of bytes; or the reason."""
        return await self.ask("receive", refs=[astuple(ref) for ref in refs])


class _Commands:
    def __init__(self, sender: ArenaSender, receiver: ArenaReceiver) -> None:
        self.sender, self.receiver = sender, receiver
        self.held: list[Any] = []

    async def offer(self, sizes: list[int], fill: int) -> Any:
        payloads = [[bytes([(fill + at) % 256]) * size] for at, size in enumerate(sizes)]
        return [astuple(ref) for ref in await self.sender.offer(payloads)]

    async def withdraw(self, refs: list[Any]) -> None:
        await self.sender.withdraw([ArenaRef(*ref) for ref in refs])

    async def receive(self, refs: list[Any]) -> Any:
        try:
            received = await self.receiver.receive([ArenaRef(*ref) for ref in refs])
        except TransferError as error:
            return error.reason
        self.held += received
        return [[one.payload.nbytes, sorted(set(bytes(one.payload)))] for one in received]

    async def drop(self) -> None:
        self.held.clear()
        gc.collect()

    async def statistics(self) -> Any:
        self.sender.check()
        return self.sender.statistics()._asdict()


async def _main(directory: str) -> None:
    limits = Limits(1 << 30)
    async with (
        ArenaSender(directory=directory, step_bytes=16 << 20) as sender,
        ArenaReceiver(limits, Metrics(), directory=directory) as receiver,
    ):
        await obey(_Commands(sender, receiver))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
