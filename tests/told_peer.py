"""A second process that does what a test tells it: the test's side, and the process's loop.

One JSON command a line on stdin, one JSON answer a line on stdout; the process ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

WAIT_S = 60  # for anything at all, on a machine that does much else

_LIMIT = 1 << 24


class ToldPeer:
    """Another process with ends of a transport of its own.

    Args:
        directory: where they meet those of the test.
    """

    #: What is run, with the directory as its argument.
    module: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self.module, str(self._directory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LIMIT,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.send_signal(signal.SIGCONT)  # a test may have stopped it
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


async def obey(commands: object) -> None:
    """In the process: call the methods of `commands` until stdin ends."""
    lines = asyncio.StreamReader(limit=_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := await lines.readline():
        command = json.loads(line)
        answer = await getattr(commands, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
