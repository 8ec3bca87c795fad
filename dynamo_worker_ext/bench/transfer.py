"""Transports between two processes: how long items take, and what they leave behind.

One round is: encode and offer, receive and decode, one copy out of what was received, free; the
times that the two ends spent on it are added up. Ways take turns, in another order each time; the
processes of a way are stopped while it is not its turn, and the first round of a turn, which finds
the caches as another way has left them, does not count. So ratios of one run can be relied on, also
on a busy machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median, quantiles
from types import TracebackType
from typing import Any, Final, Self

from dynamo_worker_ext.errors import WorkerExtError

MB: Final = 1 << 20

#: Upstream's class that takes the same way.
UPSTREAM: Final[Mapping[str, str]] = {
    "arena": "upstream-shm",
    "shm": "upstream-shm",
    "nixl": "upstream-nixl",
}

_IDLE_S: Final = 2.0
_IN_FLIGHT: Final = 16
_ROUNDS_A_TURN: Final = 5
_STEPS: Final = ("offer", "receive", "copy", "free")


class BenchError(WorkerExtError):
    """A process of the measurement failed; its own words are on stderr."""


@dataclass
class Row:
    """One way with items of one size.

    Attributes:
        way: a transport's name, or that of upstream's.
        megabytes: of one item.
        items: in one offer.
        seconds: of each round, the steps `_STEPS`.
        memcpy: of each turn, seconds for one copy of all its bytes.
        faults: page faults of both ends in a round, on average.
        idle_cpu: part of a core that both ends use together while nothing is asked.
    """

    way: str
    megabytes: float
    items: int
    seconds: list[tuple[float, ...]] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    faults: float = 0.0
    idle_cpu: float = 0.0

    def totals(self) -> list[float]:
        return [sum(steps) for steps in self.seconds]

    def to_json(self) -> dict[str, Any]:
        """All that is in the table, in milliseconds, GB/s and multiples."""
        totals = self.totals()
        p50, p99 = median(totals), quantiles(totals, n=100)[98] if len(totals) > 1 else totals[0]
        steps = zip(_STEPS, zip(*self.seconds, strict=True), strict=True)
        return {
            "way": self.way,
            "megabytes": self.megabytes,
            "items": self.items,
            "rounds": len(totals),
            "p50_ms": 1e3 * p50,
            "p99_ms": 1e3 * p99,
            "gb_per_s": self.megabytes * self.items * MB / p50 / 1e9,
            "times_memcpy": p50 / median(self.memcpy),
            "page_faults": self.faults,
            "idle_cpu": self.idle_cpu,
            **{f"{name}_ms": 1e3 * median(values) for name, values in steps},
        }


class End:
    """One process; see `dynamo_worker_ext.bench.end`. Use it as a context manager."""

    def __init__(self, role: str, way: str) -> None:
        self._name = f"the {role} of {way}"
        self.process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "dynamo_worker_ext.bench.end", role, way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Upstream's reader frees segments; its resource tracker complains about each.
            env={"DYN_LOG": "error", "UCX_NET_DEVICES": "lo", **os.environ,
                 "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have it do something.

        Raises:
            BenchError: it has ended.
        """
        if self.process.stdin is None or self.process.stdout is None:
            raise BenchError(f"{self._name} was not started")
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchError(f"{self._name} has ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class Way:
    """Both ends of one way, stopped while it is not its turn."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self.sender = stack.enter_context(End("sender", name))
        self.receiver = stack.enter_context(End("receiver", name))

    def signal(self, number: int) -> None:
        for end in (self.sender, self.receiver):
            end.process.send_signal(number)

    def round(self, size: int, items: int, *, watch: bool = False) -> tuple[list[float], float]:
        """Seconds of each step, and by how much the receiver's event loop was late at most."""
        offered = self.sender.ask("offer", size=size, items=items)
        there = self.receiver.ask(
            "receive", extra=offered["extra"], tag=offered["tag"], watch=watch
        )
        gone = self.sender.ask("withdraw")["seconds"]
        steps = [offered["seconds"], there["receive"], there["copy"], there["free"] + gone]
        return steps, there["stall"]

    def usage(self) -> dict[str, float]:
        """Of both ends together."""
        both = self.sender.ask("usage"), self.receiver.ask("usage")
        return {name: both[0][name] + both[1][name] for name in both[0]}


class Measurement:
    """Several ways side by side. Use it as a context manager.

    Args:
        names: the ways.
        seed: of the order in which they take turns.
    """

    def __init__(self, names: Sequence[str], seed: int = 3) -> None:
        self._names = names
        self._random = random.Random(seed)  # noqa: S311 - the order of turns
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.ways = [Way(name, stack) for name in self._names]
            for way in self.ways:
                way.round(1, 1)
                way.signal(signal.SIGSTOP)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def compare(self, megabytes: float, items: int, rounds: int) -> list[Row]:
        """A row a way."""
        size = max(1, int(megabytes * MB))
        rows = {way.name: Row(way.name, megabytes, items) for way in self.ways}
        for done in range(0, rounds, _ROUNDS_A_TURN):
            for way in self._random.sample(self.ways, len(self.ways)):
                row = rows[way.name]
                with _Turn(way):
                    way.round(size, items)
                    copied = way.sender.ask("copy", size=size)["seconds"] * items
                    before = way.usage()["faults"]
                    for _ in range(min(_ROUNDS_A_TURN, rounds - done)):
                        steps, _stall = way.round(size, items)
                        row.seconds.append(tuple(steps))
                    row.memcpy.append(copied)
                    row.faults += (way.usage()["faults"] - before) / rounds
        for way in self.ways:
            with _Turn(way):
                before = way.usage()["cpu"]
                time.sleep(_IDLE_S)
                rows[way.name].idle_cpu = (way.usage()["cpu"] - before) / _IDLE_S
        return list(rows.values())

    def stalls(self, megabytes: float, rounds: int) -> dict[str, list[float]]:
        """Of each way, by how many ms the receiver's event loop was late at most while one item of
        that size arrived."""
        result: dict[str, list[float]] = {way.name: [] for way in self.ways}
        for number in range(rounds + 2):
            for way in self._random.sample(self.ways, len(self.ways)):
                with _Turn(way):
                    _, stall = way.round(int(megabytes * MB), 1, watch=True)
                if number >= 2:
                    result[way.name].append(1e3 * stall)
        return result

    def growth(self, items: int) -> dict[str, dict[str, float]]:
        """Of each way, by how much what both ends hold grew after the first tenth of so many
        items of 1 MB, 16 in flight."""
        result = {}
        for way in self.ways:
            with _Turn(way):
                marks = []
                for count in (items // 10, items - items // 10):
                    for _ in range(max(1, count // _IN_FLIGHT)):
                        way.round(MB, _IN_FLIGHT)
                    marks.append(way.usage())
            kept = ("descriptors", "private_kb", "shared_kb")
            result[way.name] = {name: marks[1][name] - marks[0][name] for name in kept}
        return result


class _Turn:
    """A way's processes run; those of the others are stopped."""

    def __init__(self, way: Way) -> None:
        self._way = way

    def __enter__(self) -> None:
        self._way.signal(signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        self._way.signal(signal.SIGSTOP)
