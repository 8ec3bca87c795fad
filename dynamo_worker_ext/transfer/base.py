"""The contract between those who move media and those who use it.

`MmKwargsReceiver` lives in the worker, `MmKwargsSender` in the frontend. Both are one operation
and `close`, and async context managers. The base classes own deadlines, size limits, metrics and
NVTX ranges; a subclass moves bytes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Generic, Self, TypeVar

from dynamo_worker_ext.errors import InvalidTransferError, TransferTimeoutError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.codec import Piece, payload_size

RefT = TypeVar("RefT")


@dataclass(frozen=True, slots=True)
class Received:
    """One payload.

    Attributes:
        payload: the bytes, as a view that keeps its memory alive: as long as anybody holds it or
            a tensor over it, the memory is neither reused nor unmapped. Writable, because torch
            takes no read-only memory; nobody else sees what is written.
    """

    payload: memoryview


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver accepts.

    Attributes:
        max_item_bytes: largest payload of one item.
        timeout_s: seconds for one `receive`, all items together.
    """

    max_item_bytes: int
    timeout_s: float = 10.0


class _Closing(ABC):
    """An async context manager that closes itself."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class MmKwargsReceiver(_Closing, Generic[RefT]):
    """Fetches the payloads that references name. Lives in the worker process.

    Usage::

        async with ShmReceiver(limits, metrics) as receiver:
            first, second = await receiver.receive([ref_a, ref_b])

    Args:
        limits: sizes and deadline.
        metrics: where stages and bytes are counted; failures are the policy's to count.
    """

    #: Name on the wire, on the card and in metrics.
    transport: ClassVar[str]

    #: Whether senders wait to hear of each item, so that `decline` says something to them.
    declines: ClassVar[bool] = False

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self._received_bytes = metrics.bytes.labels(self.transport)

    async def receive(self, refs: Sequence[RefT]) -> list[Received]:
        """Fetch payloads, in the order of `refs`.

        All or nothing: on any error everything already fetched is let go.

        Raises:
            TransferError: with the reason; `TransferTimeoutError` after ``limits.timeout_s``.
        """
        for ref in refs:
            size = self._size(ref)
            if not 0 < size <= self.limits.max_item_bytes:
                raise InvalidTransferError(
                    f"an item of {size} bytes; from 1 to {self.limits.max_item_bytes} are accepted",
                    reason="invalid_size",
                )
        with self.metrics.stage("receive"):
            received = self._receive_now(refs)
            if received is None:
                try:
                    async with asyncio.timeout(self.limits.timeout_s):
                        received = await self._receive(refs)
                except TimeoutError:
                    raise TransferTimeoutError(
                        f"{len(refs)} item(s) over {self.transport} did not arrive within "
                        f"{self.limits.timeout_s:g} s"
                    ) from None
        self._received_bytes.inc(sum([r.payload.nbytes for r in received]))
        return received

    def decline(self, refs: Sequence[RefT]) -> None:
        """Tell senders that items will not be read, as far as they can be told. Does not wait."""

    @abstractmethod
    def _size(self, ref: RefT) -> int:
        """Bytes that `ref` claims to name."""

    def _receive_now(self, refs: Sequence[RefT]) -> list[Received] | None:
        """`_receive` where nothing has to be waited for; None where something has to.

        What a deadline costs is then saved. The same holds for how long it may take.
        """
        return None

    @abstractmethod
    async def _receive(self, refs: Sequence[RefT]) -> list[Received]:
        """Fetch payloads, in the order of `refs`; sizes are already within the limits.

        Must not block the event loop for longer than a memory copy of a small item takes, and
        must let go of everything it holds when it is cancelled.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Payloads already handed on stay valid. A second call is a no-op."""


class MmKwargsSender(_Closing, Generic[RefT]):
    """Offers payloads for a receiver to fetch. Lives in the frontend process.

    Usage::

        async with ArenaSender() as sender:
            refs = await sender.offer([codec.encode(item) for item in items])
            ...  # send the references, answer the request
            await sender.withdraw(refs)

    Args:
        metrics: where stages and bytes are counted; None where nobody asks for them.
        timeout_s: seconds for one `offer`, all items together.
    """

    transport: ClassVar[str]

    def __init__(self, *, metrics: Metrics | None = None, timeout_s: float = 10.0) -> None:
        self.metrics = metrics or Metrics()
        self.timeout_s = timeout_s
        self._sent_bytes = self.metrics.sent_bytes.labels(self.transport)

    async def offer(self, payloads: Sequence[Sequence[Piece]]) -> list[RefT]:
        """Make payloads readable.

        Args:
            payloads: of each item, the pieces of its payload (`codec.encode`), to be laid one
                behind the other. They must not change until this returns.

        Returns:
            References in the order of `payloads`; `withdraw` them when the request is over.

        Raises:
            TransferError: there is no room or the transport failed; nothing is left behind.
                `TransferTimeoutError` after ``timeout_s``.
        """
        with self.metrics.stage("send"):
            refs = self._offer_now(payloads)
            if refs is None:
                try:
                    async with asyncio.timeout(self.timeout_s):
                        refs = await self._offer(payloads)
                except TimeoutError:
                    raise TransferTimeoutError(
                        f"{len(payloads)} item(s) could not be offered over {self.transport} "
                        f"within {self.timeout_s:g} s"
                    ) from None
        self._sent_bytes.inc(sum([payload_size(pieces) for pieces in payloads]))
        return refs

    def _offer_now(self, payloads: Sequence[Sequence[Piece]]) -> list[RefT] | None:
        """`_offer` where nothing has to be waited for; None where something has to.

        What a deadline costs is then saved. The same holds for how long it may take.
        """
        return None

    @abstractmethod
    async def _offer(self, payloads: Sequence[Sequence[Piece]]) -> list[RefT]:
        """Make payloads readable; must leave nothing behind when it fails or is cancelled."""

    @abstractmethod
    async def withdraw(self, refs: Sequence[RefT]) -> None:
        """Take back what `offer` made readable. Unknown references are ignored."""

    @abstractmethod
    async def close(self) -> None:
        """Withdraw everything. A second call is a no-op."""
