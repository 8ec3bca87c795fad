"""NIXL on one host: ours, upstream's classes, and the READ alone.

    python -m tests.bench.bench_nixl [--rounds 60] [--tcp]
    pytest tests/bench/bench_nixl.py        checks that ours is 4 times faster at 4 MB

One round is: a sender offers an item from bytes that it has; a receiver in another process reads
it and copies it once more, as whoever uses it would. Each takes its own time, so that what tells
them to is in none. Sides take turns, and a side is stopped while it is not its turn; an item of one
byte goes first, so that nobody is timed while waking up. ``raw`` is one READ of an item just
offered between arenas that both know, polled without a pause.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from dynamo_worker_ext.transfer import nixl_request
from dynamo_worker_ext.transfer.nixl_agent import Agent, load_bindings
from dynamo_worker_ext.transfer.nixl_arena import Arena
from tests.nixl_peer import Peer

MB = 1 << 20
MEGABYTES = (0.25, 1, 4, 16)


class Result(NamedTuple):
    """Median milliseconds.

    Attributes:
        ours_receive: of `ours`, the receiver's part; so with upstream.
    """

    megabytes: float
    ours: float
    ours_receive: float
    upstream: float
    upstream_receive: float
    raw: float


class Raw:
    """A READ and nothing else."""

    def __init__(self) -> None:
        self._arena = Arena(64 * MB)
        self._agent = Agent("bench-raw", self._arena, load_bindings())

    def read(self, offer: nixl_request.Offer) -> float:
        """Seconds for one READ of the payload."""
        peer = self._agent.admit(offer.agent, offer.digest, offer.metadata)
        assert peer is not None
        start = time.perf_counter()
        transfer = self._agent.read(peer, offer.ptr, self._arena.address, offer.size, "")
        while not self._agent.advance(transfer):
            pass
        self._agent.release(transfer)
        return time.perf_counter() - start


class Side:
    """A sender and a receiver, stopped while it is not their turn: upstream's agents spin."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.sender = Peer("send", *options, **environment)
        self.receiver = Peer("receive", *options, **environment)
        self._peers = (self.sender, self.receiver)

    def signal(self, number: int) -> None:
        for peer in self._peers:
            peer.process.send_signal(number)

    def round(self, size: int) -> tuple[float, float]:
        """Seconds of all, and of the receiver's part."""
        self.signal(signal.SIGCONT)
        for nbytes in (1, size):
            offered, refs = self.sender.ask(do="offer", sizes=[nbytes], seed=1, timed=True)
            received = self.receiver.ask(do="time", refs=refs)
            self.sender.ask(do="withdraw")
        self.signal(signal.SIGSTOP)
        return offered + received, received

    def close(self) -> None:
        for peer in self._peers:
            peer.__exit__(None, None, None)


def compare(rounds: int, sizes: tuple[float, ...], tls: str) -> list[Result]:
    environment = {"UCX_TLS": tls} if tls else {}
    raw, results = Raw(), []
    with ExitStack() as stack:
        ours, upstream = Side(**environment), Side("--upstream", **environment)
        for side in (ours, upstream):
            stack.callback(side.close)
            side.round(1)
        source = stack.enter_context(Peer("send", **environment))
        for megabytes in sizes:
            size = int(megabytes * MB)
            seconds: list[tuple[float, ...]] = []
            for _ in range(rounds + 3):
                sides = (*ours.round(size), *upstream.round(size))
                seconds.append((*sides, raw.read(nixl_request.parse(source.offer(size)[0]))))
                source.ask(do="withdraw")
            results.append(
                Result(megabytes, *(1000 * median(c) for c in zip(*seconds[3:], strict=True)))
            )
        ours.signal(signal.SIGCONT)
        ours.round(1)
        ours.signal(signal.SIGCONT)
        idle = idle_cpu({"sender": ours.sender, "receiver": ours.receiver})
        print("idle, of a core:", ", ".join(f"{name} {part:.1%}" for name, part in idle.items()))
    return results


def idle_cpu(peers: dict[str, Peer], seconds: float = 5.0) -> dict[str, float]:
    """What processes use of a core while nothing is asked."""

    def used(peer: Peer) -> float:
        stat = Path(f"/proc/{peer.process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = {name: used(peer) for name, peer in peers.items()}
    time.sleep(seconds)
    return {name: (used(peer) - before[name]) / seconds for name, peer in peers.items()}


def show(results: list[Result]) -> None:
    print(
        f"{'MB':>6} {'ours ms':>8} {'upstream ms':>12} {'times':>6} {'raw READ ms':>12} "
        f"{'ours/raw':>9} | receive only: {'ours':>6} {'upstream':>9} {'ours/raw':>9}"
    )
    for r in results:
        print(
            f"{r.megabytes:6} {r.ours:8.2f} {r.upstream:12.2f} {r.upstream / r.ours:6.1f} "
            f"{r.raw:12.2f} {r.ours / r.raw:9.1f} |               {r.ours_receive:6.2f} "
            f"{r.upstream_receive:9.2f} {r.ours_receive / r.raw:9.1f}"
        )


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_four_megabytes_are_four_times_faster() -> None:
    [result] = compare(60, (4,), "")
    show([result])
    assert result.upstream / result.ours >= 4


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tcp", action="store_true", help="the senders know plain TCP only")
    options = parser.parse_args()
    show(compare(options.rounds, MEGABYTES, "tcp" if options.tcp else ""))
