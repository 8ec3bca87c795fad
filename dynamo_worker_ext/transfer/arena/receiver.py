"""The receiver's end of arenas. Lives in the worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Final

from dynamo_worker_ext.card import host_identity
from dynamo_worker_ext.errors import TransportUnavailableError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.arena import meeting
from dynamo_worker_ext.transfer.arena.link import Link
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, Received
from dynamo_worker_ext.wire import ArenaRef

#: A range that was not settled since it was last shown is looked over on the loop.
_TURN_BYTES: Final = 64 << 20


class ArenaReceiver(MmKwargsReceiver[ArenaRef]):
    """Looks at payloads where their sender put them.

    Args:
        limits: sizes and deadline.
        metrics: where stages and bytes are counted.
        directory: where senders' sockets lie; None for `meeting.default_directory`.
        host_id: whose senders' memory can be mapped; None for `card.host_identity`.

    Raises:
        TransportUnavailableError: this host has no identity.
    """

    transport: ClassVar[str] = "arena"

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        *,
        directory: str | Path | None = None,
        host_id: str | None = None,
    ) -> None:
        super().__init__(limits, metrics)
        self._directory = Path(directory or meeting.default_directory())
        self._host_id = host_identity() if host_id is None else host_id
        if not self._host_id:
            raise TransportUnavailableError(
                "the arena transport needs /dev/shm and a boot id to know whose memory it shares"
            )
        self._links: dict[str, Link] = {}
        self._closed = False

    @property
    def held(self) -> int:
        """Payloads that somebody looks at, of senders that are still there."""
        return sum(link.held for link in self._links.values())

    def _size(self, ref: ArenaRef) -> int:
        return ref.size

    def _receive_now(self, refs: Sequence[ArenaRef]) -> list[Received] | None:
        if self._closed or sum([ref.size for ref in refs]) > _TURN_BYTES:
            return None
        views: list[memoryview] = []
        try:
            for ref in refs:
                link = self._links.get(ref.socket) if ref.host_id == self._host_id else None
                view = None if link is None else link.lease_now(ref)
                if view is None:
                    return None
                views.append(view)
            received, views = [Received(view) for view in views], []
            return received
        finally:
            _release(views)

    async def _receive(self, refs: Sequence[ArenaRef]) -> list[Received]:
        if self._closed:
            raise TransportUnavailableError("the arena receiver is closed")
        for ref in refs:
            if ref.host_id != self._host_id:
                raise TransportUnavailableError(
                    f"the arena is of host {ref.host_id[:16]!r} and this is {self._host_id!r}: its "
                    "memory cannot be mapped here"
                )
        views: list[memoryview] = []
        looked_over = 0
        try:
            for ref in refs:
                looked_over += ref.size
                if looked_over > _TURN_BYTES:
                    looked_over = ref.size
                    await asyncio.sleep(0)
                views.append(await (await self._link(ref.socket)).lease(ref))
        except BaseException:
            _release(views)
            raise
        return [Received(view) for view in views]

    async def close(self) -> None:
        """Release everything. Payloads already handed on stay valid. A second call is a no-op."""
        self._closed = True
        while self._links:
            self._links.popitem()[1].close()

    async def _link(self, name: str) -> Link:
        while (link := self._links.get(name)) is None:
            if self._closed:
                raise TransportUnavailableError("the arena receiver is closed")
            try:
                connection = meeting.connect(self._directory, name)
            except BlockingIOError:  # a hundred others connect at this moment
                await asyncio.sleep(0.001)
                continue
            self._links[name] = Link(connection, name, lambda _: self._links.pop(name, None))
        return link


def _release(views: Iterable[memoryview]) -> None:
    # Not left to the garbage collector: an error's traceback refers to the frame that has them.
    for view in views:
        view.release()
