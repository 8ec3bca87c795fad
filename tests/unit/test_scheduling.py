"""What threads that copy are to the system's scheduler."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, scheduling
from dynamo_worker_ext.transfer.arena.sender import ArenaSender
from dynamo_worker_ext.transfer.scheduling import give_way
from dynamo_worker_ext.transfer.shm import ShmReceiver, ShmSender

_T = TypeVar("_T")


def in_a_thread(function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def policy() -> int:
    return os.sched_getscheduler(0)


def slice_ms() -> float:
    """What the calling thread asks for, by what the kernel says of it."""
    for line in Path("/proc/thread-self/sched").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "se.slice":
            return float(value) / 1e6
    pytest.skip("this kernel does not say what slices threads ask for")


def test_a_thread_gives_way_and_so_do_those_it_starts() -> None:
    def outer() -> list[int]:
        give_way()
        return [policy(), in_a_thread(policy)]

    assert in_a_thread(outer) == [os.SCHED_BATCH, os.SCHED_BATCH]
    assert policy() == os.SCHED_OTHER


def test_its_share_of_the_cores_stays() -> None:
    def outer() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        give_way()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), policy()

    assert in_a_thread(outer) == (3, os.SCHED_BATCH)


def test_it_asks_for_longer_than_others() -> None:
    def outer() -> tuple[float, float]:
        before = slice_ms()
        give_way()
        return before, slice_ms()

    before, after = in_a_thread(outer)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert after == 4.0 if release >= (6, 12) else after == before


def test_an_operators_own_policy_stays() -> None:
    def outer() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        give_way()
        return policy()

    assert in_a_thread(outer) == os.SCHED_IDLE


def test_a_system_that_does_not_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(scheduling.os, "sched_setscheduler", refused)
    in_a_thread(give_way)


def test_threads_of_the_transports_give_way() -> None:
    async def policies() -> list[int]:
        loop = asyncio.get_running_loop()
        async with (
            ShmReceiver(Limits(1 << 20), Metrics()) as receiver,
            ShmSender() as shm,
            ArenaSender() as arena,
        ):
            return [
                await loop.run_in_executor(end._executor, policy) for end in (receiver, shm, arena)
            ]

    assert asyncio.run(policies()) == [os.SCHED_BATCH] * 3
