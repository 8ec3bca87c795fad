"""The other end of a NIXL transfer, as a process of its own that does as it is told.

    python -m tests.nixl_peer send [--upstream]     offers items
    python -m tests.nixl_peer receive [--upstream]  reads them

One JSON object a line on stdin, one in answer on stdout. It ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dynamo_worker_ext.wire import NixlRef

#: Loopback only, and no backtraces of peers that are killed on purpose.
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_PATIENCE_S = 90.0


@functools.cache
def pattern(size: int, seed: int) -> bytes:
    """Bytes that differ between seeds and between places."""
    head = bytes((seed * 7 + at * 13 + at // 251) % 256 for at in range(min(size, 8191)))
    return (head * (size // len(head) + 1))[:size]


class Peer:
    """A started peer. Synchronous; a test kills it by its `process` or asks it things.

    Raises:
        RuntimeError: it ended, or did not answer in a minute.
    """

    def __init__(self, role: str, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nixl_peer", role, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **ENVIRONMENT, **environment},
        )

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        data = json.dumps(command).encode() + b"\n"
        while data:
            data = data[self.process.stdin.write(data) :]

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line, until = b"", time.monotonic() + _PATIENCE_S
        poll = select.poll()  # `select.select` ends at descriptor 1023
        poll.register(self.process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            ready = poll.poll(1000 * max(0.0, until - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
            if not more:
                raise RuntimeError(f"the peer gave no answer: {self.process.poll()}")
            line += more
        return json.loads(line)

    def offer(self, *sizes: int, seed: int = 1) -> list[NixlRef]:
        """Have a sender offer items of `pattern`, of seed, seed + 1 and so on."""
        return [NixlRef(s, d) for s, d in self.ask(do="offer", sizes=sizes, seed=seed)]

    def receive(self, refs: list[NixlRef]) -> Any:
        """Have a receiver read items: a list of [size, digest], or the reason of its error."""
        return self.ask(do="receive", refs=[[r.size, dict(r.descriptor)] for r in refs])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


# In the process


class OurSender:
    def __init__(self) -> None:
        from dynamo_worker_ext.transfer.nixl import NixlSender

        self.sender = NixlSender(arena_bytes=int(os.environ.get("ARENA_MB", "64")) << 20)
        self.refs: list[NixlRef] = []

    async def offer(self, command: dict[str, Any]) -> Any:
        seed = command["seed"]
        items = [[pattern(size, seed + at)] for at, size in enumerate(command["sizes"])]
        refs = await self.sender.offer(items)
        self.refs += refs
        return [[ref.size, dict(ref.descriptor)] for ref in refs]

    async def withdraw(self, command: dict[str, Any]) -> Any:
        await self.sender.withdraw(self.refs)
        self.refs.clear()

    async def scribble(self, command: dict[str, Any]) -> Any:
        """Change one byte of everything on offer, behind the sender's back."""
        for slot in self.sender._offers.values():
            slot[-1] ^= 1

    async def statistics(self, command: dict[str, Any]) -> Any:
        self.sender.check()
        thread, arena = self.sender.statistics()
        return {**thread._asdict(), **arena._asdict(), "unread": len(self.sender._unread)}


class UpstreamSender:
    def __init__(self) -> None:
        from dynamo.common.multimodal import mm_kwargs_transfer as upstream

        self.sender = upstream.MmKwargsNixlSender()
        self.operations: list[Any] = []

    async def offer(self, command: dict[str, Any]) -> Any:
        refs = []
        for at, size in enumerate(command["sizes"]):
            data = pattern(size, command["seed"] + at)
            spec, operation = await self.sender._encode_item(at, data)
            extra = self.sender._assemble_extra_args("image", [spec], ["0" * 64])
            [spec] = extra["mm_kwargs_nixl"]["tensor_specs"]
            refs.append([spec["shape"][0], spec["serialized_request"]])
            self.operations.append(operation)
        return refs

    async def withdraw(self, command: dict[str, Any]) -> Any:
        """Upstream's cleanup waits until everything was read; seconds that took."""
        start = time.monotonic()
        await self.sender.cleanup(self.operations)
        self.operations.clear()
        return time.monotonic() - start


class OurReceiver:
    def __init__(self) -> None:
        from dynamo_worker_ext.metrics import Metrics
        from dynamo_worker_ext.transfer import Limits
        from dynamo_worker_ext.transfer.nixl import NixlReceiver

        self.receiver = NixlReceiver(Limits(64 << 20, timeout_s=_PATIENCE_S), Metrics())

    async def receive(self, command: dict[str, Any]) -> Any:
        from dynamo_worker_ext.errors import TransferError

        try:
            received = await self.receiver.receive([NixlRef(s, d) for s, d in command["refs"]])
        except TransferError as error:
            return error.reason
        return [summary(one.payload) for one in received]

    async def time(self, command: dict[str, Any]) -> float:
        """Seconds to receive an item and copy it once."""
        [(size, descriptor)] = command["refs"]
        start = time.perf_counter()
        [one] = await self.receiver.receive([NixlRef(size, descriptor)])
        copied(one.payload)
        return time.perf_counter() - start


class UpstreamReceiver:
    def __init__(self) -> None:
        from dynamo.common.multimodal import mm_kwargs_transfer as upstream

        self.upstream = upstream
        self.receiver: Any = None

    async def receive(self, command: dict[str, Any]) -> Any:
        return [summary(one) for one in await self._receive(command)]

    async def time(self, command: dict[str, Any]) -> float:
        start = time.perf_counter()
        [one] = await self._receive(command)
        copied(one)
        return time.perf_counter() - start

    async def _receive(self, command: dict[str, Any]) -> list[Any]:
        if self.receiver is None:
            make = self.upstream.MmKwargsNixlReceiver
            self.receiver = await asyncio.to_thread(make, 16 << 20, 2)
        specs = [
            {
                "field_name": "__pickled_kwargs_item__",
                "shape": [size],
                "dtype_str": "uint8",
                "serialized_request": descriptor,
            }
            for size, descriptor in command["refs"]
        ]
        metadata = self.upstream.MmKwargsTransferMetadata.model_validate(
            {"modality": "image", "tensor_specs": specs, "mm_hashes": []}
        )
        result = await self.receiver.receive(metadata)
        items: list[Any] = result["__pickled_kwargs_item__"]
        return items


_COPY = bytearray(64 << 20)


def copied(data: Any) -> None:
    """Use a payload once, by copying it to memory that was touched before."""
    import numpy as np

    np.frombuffer(_COPY, np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)


def summary(data: Any) -> list[Any]:
    """What of a payload fits into an answer."""
    import hashlib

    return [len(data), hashlib.blake2b(data, digest_size=8).hexdigest()]


async def serve(end: Any, out: int) -> None:
    loop = asyncio.get_running_loop()
    reader: Callable[[], Awaitable[bytes]] = lambda: loop.run_in_executor(  # noqa: E731
        None, sys.stdin.buffer.readline
    )
    while line := await reader():
        command = json.loads(line)
        start = time.perf_counter()
        result = await getattr(end, command["do"])(command)
        if command.get("timed"):
            result = [time.perf_counter() - start, result]
        answer = json.dumps(result).encode() + b"\n"
        while answer:
            answer = answer[os.write(out, answer) :]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["send", "receive"])
    parser.add_argument("--upstream", action="store_true")
    options = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # upstream logs there
    ends: dict[tuple[str, bool], Callable[[], Any]] = {
        ("send", False): OurSender,
        ("send", True): UpstreamSender,
        ("receive", False): OurReceiver,
        ("receive", True): UpstreamReceiver,
    }
    asyncio.run(serve(ends[options.role, options.upstream](), out))
    os._exit(0)  # native destructors are not what is tested


if __name__ == "__main__":
    main()
