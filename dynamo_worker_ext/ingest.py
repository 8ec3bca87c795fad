"""The policy: what a request's media becomes before the engine sees it.

This is the table of the design, in one place for every engine:

| transfer metadata | all items cached | read   | raw media | outcome       |
|-------------------|------------------|--------|-----------|---------------|
| yes               | yes              | -      | any       | `HIT`         |
| yes               | some or none     | good   | any       | `RECEIVED`    |
| yes               | -                | failed | yes       | `REPROCESSED` |
| yes               | -                | failed | no        | `LOST`        |
| no                | yes, all named   | -      | yes       | `HIT`         |
| no                | otherwise        | -      | yes       | `RAW`         |
| no                | -                | -      | no        | `TEXT`        |

Embeddings that a client sends in place of an image make `HIT` or `RECEIVED` too, or are refused
(`dynamo_worker_ext.worker.client_embeddings`).

A decode worker looks at none of it: prefill has seen to the media, which makes `CONTINUED`, or
`LOST` where what it left cannot be had.

Malformed metadata counts as a failed read. `LOST` is an error that a frontend may retry on another
worker; there is never an answer without the media. More items than the engine's limit are refused
on every way in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, Self

from dynamo_worker_ext.errors import (
    InvalidTransferError,
    LimitExceededError,
    MediaLostError,
    TransferError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics, WarnOnceAMinute
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.base import MmKwargsReceiver
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.wire import MODALITIES, MediaItem, MediaRequest, Modality, Transfer

log = logging.getLogger(__name__)

_NO_TRANSPORT: Final = "none"


class Outcome(StrEnum):
    """What became of a request's media; the `outcome` label of metrics and logs."""

    HIT = "hit"
    RECEIVED = "received"
    REPROCESSED = "reprocessed"
    LOST = "lost"
    RAW = "raw"
    TEXT = "text"
    CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the engine is to be given.

    Attributes:
        outcome: which row of the table it was.
        transport: what moved the payloads, or ``"none"``.
        payloads: for `HIT` and `RECEIVED` with transfer metadata, aligned with its items: the
            decoded item, or None where the engine holds it.
        raw: for the other outcomes with media, the decoded media by modality in prompt order,
            None where the engine holds the item.
        reason: why a transfer failed, where it did.
        transfer: for embeddings that the client sent itself, what `payloads` are aligned with in
            place of the request's own transfer metadata.
    """

    outcome: Outcome
    transport: str = _NO_TRANSPORT
    payloads: tuple[Any, ...] | None = None
    raw: Mapping[Modality, Sequence[Any]] | None = None
    reason: str | None = None
    transfer: Transfer | None = None


class EngineMedia(Protocol):
    """What the policy needs to know of an engine. Lives in the worker process."""

    @property
    def limits(self) -> Mapping[Modality, int]:
        """Most items of each modality in one request; a modality it cannot take has 0."""

    @property
    def mixes_raw_and_held(self) -> bool:
        """Whether one request may have some raw items and some that the engine holds."""

    def holds(self, mm_hash: str, scope: str = "") -> bool:
        """Whether the engine can do without the payload of this item now. Changes nothing.

        Args:
            mm_hash: the item's identity.
            scope: of the request, for an engine whose cache is kept apart by it.
        """

    def check(self, transfer: Transfer) -> None:
        """Refuse an expanded prompt that the engine would read in another way than its sender.

        Raises:
            InvalidTransferError: it would.
        """

    def convert(self, item: MediaItem, payload: KwargsItem) -> Any:
        """Turn a received item into the engine's own form, after checking that it fits.

        Raises:
            InvalidTransferError: it is not what this model's processor makes for `item`.
        """


class MediaSource(Protocol):
    """Loads raw media; see `dynamo_worker_ext.media.MediaLoader`."""

    async def load(
        self,
        modality: Modality,
        items: Sequence[Mapping[str, Any]],
        *,
        io_kwargs: Mapping[str, Any] | None = None,
        cache_scope: str | None = None,
    ) -> list[Any]: ...


class Unread:
    """What senders offer for one request and no receiver was asked for.

    Dynamo's NIXL sender (1.6.1) ends its answer only when it has heard of every item, or after a
    minute. Items that the engine holds are declined once it has the prompt: should it have lost
    one by then, they are still there to be read.

    Args:
        transfer: of the request, if it has one.
        receivers: open receivers by transport.
    """

    def __init__(
        self, transfer: Transfer | None, receivers: Mapping[str, MmKwargsReceiver[Any]]
    ) -> None:
        # Receivers as well: a worker that stops forgets them before its last requests end.
        self._refs = {
            name: (receivers[name], dict(refs))
            for name, refs in (transfer.offers.items() if transfer is not None else ())
            if name in receivers and receivers[name].declines
        }

    def asked(self, transport: str, indexes: Sequence[int]) -> None:
        """A receiver is asked for these: it tells the sender, also if it fails."""
        if (refs := self._refs.get(transport)) is not None:
            for i in indexes:
                refs[1].pop(i, None)

    def clear(self) -> None:
        """Senders hear of all of them from another worker."""
        self._refs.clear()

    def decline(self) -> None:
        """Tell senders of all others. A second call is a no-op."""
        while self._refs:
            _, (receiver, refs) = self._refs.popitem()
            receiver.decline(list(refs.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.decline()


class Ingest:
    """Applies the policy to one request after another.

    Args:
        engine: the engine's side.
        receivers: open receivers by transport, in order of preference.
        source: the loader of raw media.
        metrics: where failures and stages are counted; the outcome itself is counted by the
            worker when the request is submitted.
    """

    def __init__(
        self,
        engine: EngineMedia,
        receivers: Mapping[str, MmKwargsReceiver[Any]],
        source: MediaSource,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._receivers = receivers
        self._source = source
        self._metrics = metrics
        self._warn = WarnOnceAMinute(log)

    async def resolve(
        self,
        request: MediaRequest,
        *,
        cache_scope: str | None = None,
        engine_scope: str = "",
        fresh: bool = False,
        unread: Unread | None = None,
    ) -> Resolution:
        """Decide and fetch.

        Args:
            request: the media side of one request.
            cache_scope: the client's scope, for loaders that keep caches apart by it.
            engine_scope: passed on to `EngineMedia.holds`.
            fresh: fetch everything, whatever the engine seems to hold; for a request that is
                resent because it turned out not to.
            unread: told what receivers are asked for.

        Raises:
            LimitExceededError: too many items.
            MediaLostError: the row `LOST`.
            MediaLoadError: raw media cannot be loaded.
        """
        self.check_limits(request)
        failure: TransferError | None = request.transfer_error
        if failure is not None:
            self._metrics.failures.labels(_NO_TRANSPORT, failure.reason).inc()
        if request.transfer is not None:
            try:
                return await self._receive(request.transfer, request, engine_scope, fresh, unread)
            except TransferError as error:
                failure = error
        if failure is not None:
            self._warn(
                failure.reason,
                "pre-processed media did not arrive (%s): %s; %s",
                failure.reason,
                failure,
                "processing it from raw media" if request.raw else "no raw media to fall back to",
            )
            if not request.raw:
                raise MediaLostError(
                    f"pre-processed media did not arrive ({failure.reason}): {failure}; the "
                    "request carries no raw media, so it cannot be answered by this worker",
                    reason=failure.reason,
                ) from failure
            raw, _ = await self._load(request, cache_scope, engine_scope, reuse=False)
            return Resolution(Outcome.REPROCESSED, raw=raw, reason=failure.reason)
        if not request.raw:
            return Resolution(Outcome.TEXT)
        raw, held_all = await self._load(request, cache_scope, engine_scope, reuse=not fresh)
        return Resolution(Outcome.HIT if held_all else Outcome.RAW, raw=raw)

    def check_limits(self, request: MediaRequest) -> None:
        """Refuse more items than the engine takes.

        Raises:
            LimitExceededError: too many items.
        """
        for modality in MODALITIES:
            count, limit = request.count(modality), self._engine.limits.get(modality, 0)
            if count > limit:
                raise LimitExceededError(
                    f"the request carries {count} {modality} item(s); this worker takes at most "
                    f"{limit} (--limit-mm-per-prompt)"
                )

    async def _receive(
        self,
        transfer: Transfer,
        request: MediaRequest,
        scope: str,
        fresh: bool,
        unread: Unread | None,
    ) -> Resolution:
        try:
            _check_counts(transfer, request)
            self._engine.check(transfer)
        except InvalidTransferError as misread:
            self._metrics.failures.labels(_NO_TRANSPORT, misread.reason).inc()
            raise
        missing = [
            i
            for i, item in enumerate(transfer.items)
            if fresh or not self._engine.holds(item.mm_hash, scope)
        ]
        if not missing:
            return Resolution(Outcome.HIT, payloads=(None,) * len(transfer.items))
        accepted = [name for name in self._receivers if name in transfer.offers]
        if not accepted:
            offered = ", ".join(sorted(transfer.offers))
            error: TransferError = TransportUnavailableError(
                f"the sender used {offered}; this worker takes "
                f"{', '.join(self._receivers) or 'none'} (--mm-transfer)"
            )
            self._metrics.failures.labels(_NO_TRANSPORT, error.reason).inc()
            raise error
        for transport in accepted:
            try:
                payloads = await self._read(transport, transfer, missing, unread)
            except TransferError as failed:
                self._metrics.failures.labels(transport, failed.reason).inc()
                error = failed
            else:
                return Resolution(Outcome.RECEIVED, transport=transport, payloads=payloads)
        raise error

    async def _read(
        self, transport: str, transfer: Transfer, missing: Sequence[int], unread: Unread | None
    ) -> tuple[Any, ...]:
        refs = transfer.offers[transport]
        if not all(i in refs for i in missing):
            raise InvalidTransferError(
                f"{len(missing)} of {len(transfer.items)} items are not held here, and {transport} "
                f"offers {sum(i in refs for i in missing)} of them"
                + ("" if refs else ", or does not say which it offers"),
                reason="invalid_count",
            )
        if unread is not None:
            unread.asked(transport, missing)
        received = await self._receivers[transport].receive([refs[i] for i in missing])
        payloads: list[Any] = [None] * len(transfer.items)
        with self._metrics.stage("decode"):
            for i, one in zip(missing, received, strict=True):
                decoded = codec.decode(one.payload)
                payloads[i] = self._engine.convert(transfer.items[i], decoded)
        return tuple(payloads)

    async def _load(
        self, request: MediaRequest, cache_scope: str | None, scope: str, *, reuse: bool
    ) -> tuple[dict[Modality, list[Any]], bool]:
        """Load what the engine does not hold; say whether that was nothing at all."""
        held = {
            modality: self._held(request, modality, len(items), scope)
            if reuse
            else [False] * len(items)
            for modality, items in request.raw.items()
        }
        if all(all(flags) for flags in held.values()):
            return {modality: [None] * len(flags) for modality, flags in held.items()}, True
        if not self._engine.mixes_raw_and_held:
            held = {modality: [False] * len(flags) for modality, flags in held.items()}
        result: dict[Modality, list[Any]] = {}
        with self._metrics.stage("load"):
            for modality, items in request.raw.items():
                skipped = held[modality]
                wanted = [item for item, skip in zip(items, skipped, strict=True) if not skip]
                loaded = iter(
                    await self._source.load(
                        modality,
                        wanted,
                        io_kwargs=request.media_io_kwargs,
                        cache_scope=cache_scope,
                    )
                    if wanted
                    else ()
                )
                result[modality] = [None if skip else next(loaded) for skip in skipped]
        return result, False

    def _held(
        self, request: MediaRequest, modality: Modality, count: int, scope: str
    ) -> list[bool]:
        # With processor or decoding options the engine derives another identity from the hash.
        ids = request.identities(modality)
        if ids is None or request.mm_processor_kwargs or request.media_io_kwargs:
            return [False] * count
        return [mm_hash is not None and self._engine.holds(mm_hash, scope) for mm_hash in ids]


def _check_counts(transfer: Transfer, request: MediaRequest) -> None:
    """Compare the two ways in which a request may carry the same items.

    Raises:
        InvalidTransferError: ``invalid_count``: one of them leaves an item out.
    """
    for modality, raw in request.raw.items():
        moved = sum(item.modality == modality for item in transfer.items)
        if moved and moved != len(raw):
            raise InvalidTransferError(
                f"the transfer has {moved} {modality}(s), and the request {len(raw)} raw ones; "
                "they are the same items, so as many",
                reason="invalid_count",
            )
