"""A transport in memory, with faults on demand. For tests of whatever uses a transport.

::

    sender = FakeSender()
    receiver = FakeReceiver(limits, metrics, sender)
    [ref] = await sender.offer([codec.encode(item)])
    receiver.faults[ref.name] = Fault(reason="segment_missing")

References are those of the shm transport, so that a fake can stand in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from dynamo_worker_ext.errors import (
    InvalidTransferError,
    SegmentError,
    TransferError,
    TransferTimeoutError,
    TransportUnavailableError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, MmKwargsSender, Received
from dynamo_worker_ext.transfer.codec import Piece
from dynamo_worker_ext.wire import ShmRef


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one item.

    Attributes:
        reason: fail with the error that carries this reason.
        delay_s: seconds before anything happens.
        truncate: hand on only so many bytes, as a transport would that checks nothing.
    """

    reason: str | None = None
    delay_s: float = 0.0
    truncate: int | None = None


_NO_FAULT: Final = Fault()


class FakeSender(MmKwargsSender[ShmRef]):
    """Keeps payloads in a dictionary.

    Attributes:
        payloads: what is on offer, by name.
        fault: what goes wrong with the next offers; ``truncate`` is ignored.
        closed: whether `close` was called.
    """

    transport: ClassVar[str] = "fake"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.payloads: dict[str, bytes] = {}
        self.fault = _NO_FAULT
        self.closed = False
        self._count = 0

    async def _offer(self, payloads: Sequence[Sequence[Piece]]) -> list[ShmRef]:
        if self.closed:
            raise TransportUnavailableError("the fake sender is closed")
        await asyncio.sleep(self.fault.delay_s)
        if self.fault.reason is not None:
            raise error_for(self.fault.reason)
        refs = []
        for pieces in payloads:
            payload = b"".join(pieces)
            refs.append(ShmRef(f"fake_{self._count}", len(payload)))
            self.payloads[refs[-1].name] = payload
            self._count += 1
        return refs

    async def withdraw(self, refs: Sequence[ShmRef]) -> None:
        for ref in refs:
            self.payloads.pop(ref.name, None)

    async def close(self) -> None:
        self.closed = True
        self.payloads.clear()


class FakeReceiver(MmKwargsReceiver[ShmRef]):
    """Copies what a `FakeSender` offers.

    Attributes:
        faults: what goes wrong, by the name of the item.
        fault: what goes wrong with all others.
        reverse: let items complete in the opposite order.
        completed: names in the order in which they completed.
        in_flight: items being fetched now; 0 when everything was let go.
        closed: whether `close` was called.
    """

    transport: ClassVar[str] = "fake"

    def __init__(self, limits: Limits, metrics: Metrics, sender: FakeSender | None = None) -> None:
        super().__init__(limits, metrics)
        self.sender = sender or FakeSender()
        self.faults: dict[str, Fault] = {}
        self.fault = _NO_FAULT
        self.reverse = False
        self.completed: list[str] = []
        self.in_flight = 0
        self.closed = False

    def _size(self, ref: ShmRef) -> int:
        return ref.size

    async def _receive(self, refs: Sequence[ShmRef]) -> list[Received]:
        if self.closed:
            raise TransportUnavailableError("the fake receiver is closed")
        # With `reverse` each item waits for the one behind it.
        turns = [asyncio.Event() for _ in range(len(refs) + 1)]
        for turn in turns[-1:] if self.reverse else turns:
            turn.set()
        fetches = [
            asyncio.ensure_future(self._fetch(ref, turns[at + 1], turns[at]))
            for at, ref in enumerate(refs)
        ]
        try:
            return list(await asyncio.gather(*fetches))
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _fetch(self, ref: ShmRef, turn: asyncio.Event, after: asyncio.Event) -> Received:
        fault = self.faults.get(ref.name, self.fault)
        self.in_flight += 1
        try:
            await asyncio.sleep(fault.delay_s)
            if fault.reason is not None:
                raise error_for(fault.reason)
            if ref.name not in self.sender.payloads:
                raise SegmentError(f"nothing is called {ref.name}", reason="segment_missing")
            payload = self.sender.payloads[ref.name]
            if len(payload) < ref.size:
                raise SegmentError(f"{ref.name} holds {len(payload)}", reason="segment_short")
            await turn.wait()
            self.completed.append(ref.name)
            return Received(memoryview(bytearray(payload[: ref.size][: fault.truncate])))
        finally:
            after.set()
            self.in_flight -= 1

    async def close(self) -> None:
        self.closed = True


def error_for(reason: str) -> TransferError:
    """The error of our tree that carries `reason`."""
    message = f"made to fail: {reason}"
    if reason == "timeout":
        return TransferTimeoutError(message)
    if reason == "unavailable":
        return TransportUnavailableError(message)
    kind = InvalidTransferError if reason.startswith("invalid_") else SegmentError
    return kind(message, reason=reason)
