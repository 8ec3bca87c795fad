"""A second process at the other end of an arena, which does what a test tells it.

    python -m tests.arena_peer DIRECTORY

One JSON command a line on stdin, one JSON answer a line on stdout; it ends with its stdin. `Peer`
is the test's side of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Self

from dynamo_worker_ext.errors import TransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits
from dynamo_worker_ext.transfer.arena import ArenaReceiver, ArenaSender
from dynamo_worker_ext.wire import ArenaRef

WAIT_S = 60  # for anything at all, on a machine that does much else


class Peer:
    """Another process with a sender and a receiver of its own.

    Usage::

        async with Peer(directory) as peer:
            refs = await peer.offer([4096])
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.arena_peer", str(self._directory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                async with asyncio.timeout(WAIT_S):
                    await self.process.wait()
            except TimeoutError:
                await self.kill()

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """End it without a chance to tidy up."""
        self.process.send_signal(number)
        await self.process.wait()

    async def tell(self, do: str, **arguments: Any) -> None:
        """Give a command whose answer is fetched later, or never."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        await self.process.stdin.drain()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return json.loads(await self.process.stdout.readline())

    async def ask(self, do: str, **arguments: Any) -> Any:
        await self.tell(do, **arguments)
        return await self.answer()

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
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    limits = Limits(1 << 30)
    async with (
        ArenaSender(directory=directory, step_bytes=16 << 20) as sender,
        ArenaReceiver(limits, Metrics(), directory=directory) as receiver,
    ):
        commands = _Commands(sender, receiver)
        while line := await lines.readline():
            command = json.loads(line)
            answer = await getattr(commands, command.pop("do"))(**command)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
