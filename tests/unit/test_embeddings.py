"""The embedding cache of an encode worker and its leases, over transports in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dynamo_worker_ext.errors import TransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.fake import FakeSender, Fault
from dynamo_worker_ext.wire import EncodedItem
from dynamo_worker_ext.worker.embeddings import EmbeddingStore, StoreStatistics

pytestmark = pytest.mark.asyncio

LEASE_S = 10.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A store with room for three embeddings of 10 bytes, and two senders."""

    def __init__(self, max_bytes: int = 30) -> None:
        self.clock = Clock()
        self.near, self.far = FakeSender(), FakeSender()
        senders = {"arena": self.near, "nixl": self.far}
        self.store = EmbeddingStore(senders, max_bytes, LEASE_S, Metrics(), clock=self.clock)

    async def put(self, name: str | None, scope: str = "") -> None:
        key = None if name is None else (scope, name)
        await self.store.put(key, item(name or "none"), [b"0123456789"])

    def holds(self, name: str, scope: str = "") -> bool:
        return self.store.get((scope, name)) is not None

    async def after(self, seconds: float) -> StoreStatistics:
        self.clock.now += seconds
        await self.store.sweep()
        assert len(self.near.payloads) == len(self.far.payloads)
        found = self.store.statistics()
        assert len(self.near.payloads) == found.cached + found.leased
        return found


def item(mm_hash: str) -> EncodedItem:
    return EncodedItem("image", mm_hash, (5,), ((5, 4),), (4, 64), "bfloat16")


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.store.close()
    assert bench.near.closed
    assert bench.far.closed


async def test_what_is_cached_stays_readable(bench: Bench) -> None:
    await bench.put("a")
    assert await bench.after(1000 * LEASE_S) == (1, 10, 0, 0)
    assert bench.holds("a")


async def test_scopes_are_kept_apart(bench: Bench) -> None:
    await bench.put("a", scope="one")
    assert bench.holds("a", scope="one")
    assert not bench.holds("a", scope="other")


async def test_the_least_recently_used_is_evicted_and_readable_until_its_lease_ends(
    bench: Bench,
) -> None:
    for name in "abc":
        await bench.put(name)
    assert bench.holds("a")
    await bench.put("d")
    assert not bench.holds("b")
    assert all(bench.holds(name) for name in "acd")
    assert await bench.after(LEASE_S / 2) == (3, 30, 1, 10)
    assert await bench.after(LEASE_S / 2) == (3, 30, 0, 0)


async def test_a_lease_begins_anew_with_each_use(bench: Bench) -> None:
    await bench.put("a")
    bench.clock.now += 0.9 * LEASE_S
    assert bench.holds("a")
    for name in "bcd":
        await bench.put(name)
    assert (await bench.after(0.9 * LEASE_S)).leased == 1
    assert (await bench.after(0.2 * LEASE_S)).leased == 0


async def test_without_a_cache_there_are_leases() -> None:
    bench = Bench(max_bytes=0)
    await bench.put("a")
    assert not bench.holds("a")
    assert (await bench.after(0.0)).leased == 1
    assert (await bench.after(LEASE_S)).leased == 0
    await bench.store.close()


async def test_one_that_is_not_to_be_cached(bench: Bench) -> None:
    await bench.put(None)
    assert await bench.after(0.0) == (0, 0, 1, 10)
    assert await bench.after(LEASE_S) == (0, 0, 0, 0)


async def test_one_transport_without_room_does_not_matter(bench: Bench) -> None:
    bench.far.fault = Fault(reason="segment_refused")
    embedding = await bench.store.put(("", "a"), item("a"), [b"0123456789"])
    assert list(embedding.refs) == ["arena"]


async def test_no_transport_has_room(bench: Bench) -> None:
    bench.near.fault = bench.far.fault = Fault(reason="segment_full")
    with pytest.raises(TransferError):
        await bench.put("a")
    assert not bench.near.payloads
    assert not bench.far.payloads
    assert await bench.after(0.0) == (0, 0, 0, 0)


async def test_a_full_transport_gives_up_what_nobody_may_read_any_more(bench: Bench) -> None:
    for name in "ab":
        await bench.put(name)
    bench.clock.now += 2 * LEASE_S
    assert bench.holds("b")
    bench.near.fault = bench.far.fault = Fault(reason="segment_full")
    with pytest.raises(TransferError):
        await bench.put("c")
    assert not bench.holds("a"), "its lease was over"
    assert bench.holds("b"), "somebody may still read it"


async def test_replacing_one_keeps_the_old_one_for_its_readers(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("a")
    assert await bench.after(0.0) == (1, 10, 1, 10)
    assert await bench.after(LEASE_S) == (1, 10, 0, 0)


async def test_closing_takes_back_everything() -> None:
    bench = Bench()
    bench.store.start()
    for name in "abcd":
        await bench.put(name)
    await bench.store.close()
    await bench.store.close()
    assert bench.near.closed
    assert bench.store.statistics() == (0, 0, 0, 0)
