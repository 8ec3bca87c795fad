"""Batching for an encoder: what arrives while it works goes together in its next call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dynamo_worker_ext.errors import EngineError, RequestError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.wire import Modality
from dynamo_worker_ext.worker.encoder import Encoded, Encoder, ProcessedMedia, Video

if TYPE_CHECKING:
    from PIL.Image import Image

#: Items of one call at most: what comes after a large batch does not wait for too long.
_MAX_ITEMS: Final = 16


class _Waiting(NamedTuple):
    modality: Modality
    item: Image | Video | ProcessedMedia
    processor_kwargs: Mapping[str, Any] | None
    result: asyncio.Future[Encoded]

    def goes_with(self, other: _Waiting) -> bool:
        return (self.modality, self.processor_kwargs) == (other.modality, other.processor_kwargs)


class Batcher:
    """One call of the encoder at a time, with all that can go together.

    Args:
        encoder: what encodes.
        metrics: where the stage ``encode`` is measured.
    """

    def __init__(self, encoder: Encoder, metrics: Metrics) -> None:
        self._encoder = encoder
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._running: asyncio.Task[None] | None = None

    async def encode(
        self,
        modality: Modality,
        item: Image | Video | ProcessedMedia,
        processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Encoded:
        """Encode one item, together with others that wait.

        Raises:
            RequestError: the model's processor refuses this item.
            EngineError: the engine failed, or the worker stops.
        """
        result: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(modality, item, processor_kwargs, result))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="encode-batches")
        return await result

    async def close(self) -> None:
        """Stop; what still waits gets an error. A second call is a no-op."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def _run(self) -> None:
        batch: list[_Waiting] = []
        try:
            while self._waiting:
                batch = self._take()
                await self._encode(batch)
        finally:
            self._running = None
            for one in [*batch, *self._waiting]:
                if not one.result.done():
                    one.result.set_exception(EngineError("the worker is shutting down"))
            self._waiting.clear()

    def _take(self) -> list[_Waiting]:
        """The first that waits, and those behind it that can go with it."""
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < _MAX_ITEMS:
            if batch and not self._waiting[0].goes_with(batch[0]):
                break
            one = self._waiting.popleft()
            if not one.result.cancelled():
                batch.append(one)
        return batch

    async def _encode(self, batch: Sequence[_Waiting]) -> None:
        if not batch:
            return
        try:
            with self._metrics.stage("encode"):
                found = await self._encoder.encode(
                    batch[0].modality, [one.item for one in batch], batch[0].processor_kwargs
                )
            if len(found) != len(batch):
                raise EngineError(f"the encoder gave {len(found)} results for {len(batch)} items")
        except RequestError as error:
            if len(batch) > 1:
                # One of them is refused; the others are not to pay for it.
                for one in batch:
                    await self._encode([one])
                return
            self._fail(batch, error)
        except Exception as error:  # whatever it is, whoever waits is to hear of it
            self._fail(batch, error)
        else:
            for one, encoded in zip(batch, found, strict=True):
                if not one.result.done():
                    one.result.set_result(encoded)

    def _fail(self, batch: Sequence[_Waiting], error: Exception) -> None:
        for one in batch:
            if not one.result.done():
                one.result.set_exception(error)
