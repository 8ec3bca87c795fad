"""Embeddings that an encode worker has made: a cache, and the leases of those who may read them.

An embedding is copied into the memory of every transport once and stays readable there while it is
cached, and for the time of a lease after it was last handed out, whichever is longer: whoever got
its handle may read it once, twice or never. Lives in the encode worker's process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from dynamo_worker_ext import transfer
from dynamo_worker_ext.errors import (
    SegmentError,
    StartupError,
    TransferError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics, WarnOnceAMinute
from dynamo_worker_ext.transfer import MmKwargsSender
from dynamo_worker_ext.transfer.codec import Piece, payload_size
from dynamo_worker_ext.wire import EncodedItem, ItemRef
from dynamo_worker_ext.worker.options import WorkerOptions

log = logging.getLogger(__name__)

#: Which embedding: the scope that its request is kept in, and the item's identity in there.
Key = tuple[str, str]

#: Seconds between two looks at leases that have ended; far below a lease that anybody would set.
_SWEEP_S: Final = 0.25

_MB: Final = 1 << 20


class Embedding:
    """One item that can be read.

    Attributes:
        item: what a handle says of it.
        refs: where it lies, by transport.
        nbytes: of its payload.
        leased_until: on the store's clock.
    """

    __slots__ = ("item", "leased_until", "nbytes", "refs")

    def __init__(self, item: EncodedItem, refs: Mapping[str, ItemRef], nbytes: int) -> None:
        self.item = item
        self.refs = refs
        self.nbytes = nbytes
        self.leased_until = 0.0


class StoreStatistics(NamedTuple):
    """What a store holds now.

    Attributes:
        cached, cached_bytes: embeddings in the cache.
        leased, leased_bytes: embeddings that are no longer in the cache, for their readers.
    """

    cached: int
    cached_bytes: int
    leased: int
    leased_bytes: int


class EmbeddingStore:
    """A cache bounded in bytes, over senders that are opened and closed with it.

    Args:
        senders: by transport; at least one.
        max_bytes: of the cache, in each transport's memory; 0 for none.
        lease_s: seconds that an embedding can be read after it was last handed out.
        metrics: where its memory is shown.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        senders: Mapping[str, MmKwargsSender[Any]],
        max_bytes: int,
        lease_s: float,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._senders = dict(senders)
        self._max_bytes = max_bytes
        self._lease_s = lease_s
        self._metrics = metrics
        self._clock = clock
        self._cached: OrderedDict[Key, Embedding] = OrderedDict()
        self._cached_bytes = 0
        self._leased: set[Embedding] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._warn = WarnOnceAMinute(log)

    @property
    def transports(self) -> tuple[str, ...]:
        """What embeddings are offered over."""
        return tuple(self._senders)

    def start(self) -> None:
        """Begin to take back what nobody may read any more."""
        self._sweeper = asyncio.create_task(self._sweep(), name="embedding-leases")

    def get(self, key: Key) -> Embedding | None:
        """What is cached, and now the last to be evicted; its lease begins anew."""
        embedding = self._cached.get(key)
        if embedding is not None:
            self._cached.move_to_end(key)
            self.lease([embedding])
        return embedding

    def __contains__(self, key: Key) -> bool:
        return key in self._cached

    def lease(self, embeddings: Iterable[Embedding]) -> None:
        """Keep these readable for the time of a lease from now on."""
        until = self._clock() + self._lease_s
        for embedding in embeddings:
            embedding.leased_until = until

    async def put(self, key: Key | None, item: EncodedItem, pieces: Sequence[Piece]) -> Embedding:
        """Offer an embedding over every transport that has room for it.

        Args:
            key: None for one that is not to be cached.
            item: what a handle is to say of it.
            pieces: its payload.

        Raises:
            TransferError: no transport takes it; nothing is left behind.
        """
        refs: dict[str, ItemRef] = {}
        failed: TransferError | None = None
        try:
            for name, sender in self._senders.items():
                try:
                    refs[name] = await self._offer(sender, pieces)
                except TransferError as error:
                    failed = error
                    self._metrics.failures.labels(name, error.reason).inc()
                    self._warn(error.reason, "an embedding is not offered over %s: %s", name, error)
            if failed is not None and not refs:
                raise failed
        except BaseException:
            await self._withdraw(refs)
            raise
        embedding = Embedding(item, refs, payload_size(pieces))
        self.lease([embedding])
        self._keep(key, embedding)
        return embedding

    def statistics(self) -> StoreStatistics:
        """What it holds now."""
        leased_bytes = sum(embedding.nbytes for embedding in self._leased)
        return StoreStatistics(
            len(self._cached), self._cached_bytes, len(self._leased), leased_bytes
        )

    def seconds_since_lease(self) -> float:
        """Since an embedding was last handed out; a large number if none ever was."""
        held = [*self._cached.values(), *self._leased]
        last = max((embedding.leased_until for embedding in held), default=float("-inf"))
        return self._clock() - (last - self._lease_s)

    async def sweep(self) -> None:
        """Take back what is not cached and whose lease has ended."""
        now = self._clock()
        ended = [embedding for embedding in self._leased if embedding.leased_until <= now]
        self._leased.difference_update(ended)
        for embedding in ended:
            await self._withdraw(embedding.refs)
        if ended:
            self._show()

    async def close(self) -> None:
        """Take back everything and close the senders. A second call is a no-op."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None
        self._cached.clear()
        self._leased.clear()
        self._cached_bytes = 0
        self._show()
        while self._senders:
            await self._senders.popitem()[1].close()

    async def _offer(self, sender: MmKwargsSender[Any], pieces: Sequence[Piece]) -> ItemRef:
        """Offer one payload; what nobody may read any more makes room where there is none."""
        while True:
            try:
                (ref,) = await sender.offer([pieces])
            except SegmentError as error:
                if error.reason != "segment_full" or not await self._evict_unleased():
                    raise
            else:
                found: ItemRef = ref
                return found

    async def _evict_unleased(self) -> bool:
        """Give up the oldest cached embedding whose lease is over; False if there is none."""
        now = self._clock()
        for key, embedding in self._cached.items():
            if embedding.leased_until <= now:
                self._evict(key)
                await self.sweep()
                return True
        return False

    def _keep(self, key: Key | None, embedding: Embedding) -> None:
        if key is None or embedding.nbytes > self._max_bytes:
            self._leased.add(embedding)
        else:
            if key in self._cached:
                self._evict(key)
            self._cached[key] = embedding
            self._cached_bytes += embedding.nbytes
            while self._cached_bytes > self._max_bytes:
                self._evict(next(iter(self._cached)))
        self._show()

    def _evict(self, key: Key) -> None:
        embedding = self._cached.pop(key)
        self._cached_bytes -= embedding.nbytes
        self._leased.add(embedding)

    async def _withdraw(self, refs: Mapping[str, ItemRef]) -> None:
        for name, ref in refs.items():
            if name in self._senders:  # not closed meanwhile
                await self._senders[name].withdraw([ref])

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._lease_s))
            await self.sweep()

    def _show(self) -> None:
        self._metrics.cache_bytes.set(self._cached_bytes)


async def open_senders(options: WorkerOptions, metrics: Metrics) -> dict[str, MmKwargsSender[Any]]:
    """Senders of the transports that were asked for.

    Raises:
        StartupError: one that was asked for by name cannot be had, or there is none.
    """
    names = list(options.transports)
    senders: dict[str, MmKwargsSender[Any]] = {}
    for name in names:
        if name == "shm" and "arena" in senders and not options.all_transports:
            continue  # for whom the arena reaches, which is the same host
        try:
            senders[name] = await asyncio.to_thread(
                transfer.open_sender, name, metrics=metrics, **_room(name, options)
            )
        except TransportUnavailableError as error:
            if options.all_transports:
                raise StartupError(f"--mm-transfer {name}: {error}") from error
            log.warning("embeddings are not offered over %s: %s", name, error)
    if not senders:
        raise StartupError(
            "an encode worker has to offer its embeddings over something; of --mm-transfer "
            f"{','.join(names) or 'off'} nothing can be had here"
        )
    return senders


def _room(transport: str, options: WorkerOptions) -> dict[str, Any]:
    """The memory of a sender: the cache, and what is leased besides."""
    cache = options.embedding_cache_bytes
    if transport == "arena":
        # It is the store that ends offers.
        return {"max_bytes": 2 * cache + 256 * _MB, "offer_s": float("inf")}
    return {"arena_bytes": cache + 64 * _MB} if transport == "nixl" else {}
