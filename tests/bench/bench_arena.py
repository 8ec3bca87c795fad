"""The arena between two processes, beside our shm, upstream's classes and a plain memory copy.

    python tests/bench/bench_arena.py [--rounds 100] [--items 10000]

One round is: send, receive, one copy out of what was received, free; the times that each process
spent on it are added up, what passes the commands between them is left out. The ways take turns
after every 10 rounds, and ratios are of medians of the same run. Then the longest time for which
the receiver's event loop stood still while 64 MB arrived, and what many items leave behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from dynamo.common.multimodal import mm_kwargs_transfer as upstream

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, open_receiver, open_sender

MB = 1 << 20
SIZES = (1, 4, 25, 64)
WAYS = ("arena", "shm", "upstream")
BLOCK = 10
IN_FLIGHT = 16
NAME = "0" * 16

now = time.perf_counter


class Channel:
    """Passes Python objects between the two processes of this benchmark."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    async def send(self, value: object) -> None:
        data = pickle.dumps(value)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._end, struct.pack("<I", len(data)) + data)

    async def receive(self) -> Any:
        (length,) = struct.unpack("<I", await self._exactly(4))
        return pickle.loads(await self._exactly(length))

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await asyncio.get_running_loop().sock_recv(self._end, count - len(data))
            if not more:
                raise EOFError
            data += more
        return data


def footprint() -> dict[str, int]:
    fields = Path("/proc/self/status").read_text().split()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "private_kb": int(fields[fields.index("RssAnon:") + 1]),
        "shared_kb": int(fields[fields.index("RssShmem:") + 1]),
    }


# The receiver's process


class Watch:
    """Turns an event loop and remembers the longest time that a turn took."""

    def __init__(self) -> None:
        self.longest, self.done = 0.0, False

    async def tick(self) -> None:
        while not self.done:
            before = now()
            await asyncio.sleep(0)
            self.longest = max(self.longest, now() - before)


async def receive(channel: Channel) -> None:
    limits, metrics = Limits(1 << 30), Metrics()
    theirs = upstream.MmKwargsShmReceiver()
    warm = np.zeros(max(SIZES) * MB + 4096, np.uint8)
    receivers = {way: open_receiver(way, limits, metrics) for way in WAYS[:2]}

    async def fetch(way: str, refs: Any) -> Any:
        if way == "upstream":
            metadata = upstream.MmKwargsShmTransferMetadata.model_validate(refs)
            return (await theirs.receive(metadata))["__pickled_kwargs_item__"][0]
        [received] = await receivers[way].receive(refs)
        return received.payload

    while True:
        try:
            what, way, refs = await channel.receive()
        except EOFError:
            break
        if what == "footprint":
            await channel.send(footprint())
            continue
        watch = Watch()
        ticking = asyncio.create_task(watch.tick()) if what == "stall" else None
        await asyncio.sleep(0)
        start = now()
        payload = await fetch(way, refs)
        received = now()
        watch.done = True
        if ticking:
            await ticking
        consume = now()
        np.copyto(warm[: len(payload)], np.frombuffer(payload, np.uint8))
        consumed = now()
        del payload
        freed = now()
        await channel.send((received - start, consumed - consume, freed - consumed, watch.longest))
    for receiver in receivers.values():
        await receiver.close()


# The sender's process


class Bench:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._theirs = upstream.MmKwargsShmSender()
        self.ours = {"arena": open_sender("arena"), "shm": open_sender("shm")}

    async def one(self, what: str, way: str, payload: bytes) -> tuple[float, ...]:
        """Seconds of: send, receive, copy out, free, and the longest stall."""
        start = now()
        if way == "upstream":
            entry, handle = await self._theirs._encode_item(0, payload)
            refs: Any = {"modality": "image", "items": [entry.model_dump()], "mm_hashes": [NAME]}
        else:
            refs = await self.ours[way].offer([[payload]])
        sent = now() - start
        await self._channel.send((what, way, refs))
        receive_s, consume_s, free_s, stall = await self._channel.receive()
        start = now()
        if way == "upstream":
            await self._theirs.cleanup([handle])
        else:
            await self.ours[way].withdraw(refs)
        return sent, receive_s, consume_s, free_s + now() - start, stall

    async def compare(self, rounds: int, sizes: Sequence[int]) -> None:
        print(f"{'MB':>3} {'way':>9} {'ms':>7} {'x memcpy':>9} {'send':>7} {'recv':>7} "
              f"{'copy':>7} {'free':>7}")  # fmt: skip
        for megabytes in sizes:
            payload = np.full(megabytes * MB, 7, np.uint8).tobytes()
            source, target = np.frombuffer(payload, np.uint8), np.zeros(len(payload), np.uint8)
            seconds: dict[str, list[tuple[float, ...]]] = defaultdict(list)
            for turn in range(max(1, rounds // BLOCK)):
                for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                    for at in range(BLOCK + 1):
                        np.copyto(target, source)
                        start = now()
                        np.copyto(target, source)
                        copied = now() - start
                        times = await self.one("time", way, payload)
                        if at:  # the first finds the caches as another way has left them
                            seconds["memcpy"].append((copied,))
                            seconds[way].append((sum(times[:4]), *times[:4]))
            unit = median(one[0] for one in seconds["memcpy"])
            for way in ("memcpy", *WAYS):
                ms = [1e3 * median(column) for column in zip(*seconds[way], strict=True)]
                print(f"{megabytes:>3} {way:>9} {ms[0]:7.3f} {ms[0] / unit / 1e3:9.2f}",
                      *(f"{one:7.3f}" for one in ms[1:]), flush=True)  # fmt: skip

    async def stalls(self, rounds: int) -> None:
        payload = bytes(64 * MB)
        for way in WAYS:
            longest = [(await self.one("stall", way, payload))[4] for _ in range(rounds + 2)][2:]
            print(f"longest stall while 64 MB arrive over {way:>9}: median "
                  f"{1e3 * median(longest):.2f} ms, worst {1e3 * max(longest):.2f} ms")  # fmt: skip

    async def endure(self, count: int) -> None:
        """Many items of 1 MB, 16 in flight. What is there after 1,000 must do for the rest."""
        payload = np.full(MB, 7, np.uint8).tobytes()
        sender: Any = self.ours["arena"]
        print(f"{'items':>6} {'':>9} descriptors, private KB, shared KB | parts' bytes, in use")
        begin = now()
        for done in range(0, count, IN_FLIGHT):
            offers = [await sender.offer([[payload]]) for _ in range(IN_FLIGHT)]
            for refs in offers:
                await self._channel.send(("time", "arena", refs))
                await self._channel.receive()
                await sender.withdraw(refs)
            if (done and done % 1000 < IN_FLIGHT) or done + IN_FLIGHT >= count:
                await self._channel.send(("footprint", "", None))
                there = await self._channel.receive()
                if done % 3000 < 1000 or done + IN_FLIGHT >= count:
                    print(f"{done + IN_FLIGHT:>6} {'sender':>9} {[*footprint().values()]} | "
                          f"{[*sender.statistics()[:2]]}")  # fmt: skip
                    print(f"{'':>6} {'receiver':>9} {[*there.values()]}")
        print(f"{count / (now() - begin):.0f} items/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="MB, at most 64")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive is not None:
        await receive(Channel(socket.socket(fileno=args.receive)))
        return
    here, there = socket.socketpair()
    command = [sys.executable, __file__, "--receive", str(there.fileno())]
    # Upstream's reader destroys segments; its resource tracker complains about each.
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "DYN_LOG": "error"}
    with subprocess.Popen(command, pass_fds=[there.fileno()], env=env):  # noqa: ASYNC220
        there.close()
        bench = Bench(Channel(here))
        try:
            steps: list[Callable[[], Awaitable[None]]] = [
                lambda: bench.compare(args.rounds, args.sizes),
                lambda: bench.stalls(max(3, args.rounds // 4)),
                lambda: bench.endure(args.items),
            ]
            for step in steps:
                await step()
        finally:
            here.close()
            for sender in bench.ours.values():
                await sender.close()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    print(f"load {os.getloadavg()[0]:.1f}; preempted {switches} times")


if __name__ == "__main__":
    asyncio.run(main())
