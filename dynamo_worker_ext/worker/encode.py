"""The encode worker: media in, a handle to its embeddings out. The same for both engines.

Images and videos come raw, or as a frontend has processed them, over a transport of ours.

The prefill or aggregated worker that comes next gets the handle as ``encoder_result``
(`dynamo_worker_ext.wire.encoded`) and reads the embeddings over a transport of ours. What this
worker does not encode it passes on: a handle without items has the next worker process the raw
media itself, which its request still carries. Lives in the worker process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
from dynamo.common.backend.engine import EngineConfig, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.multimodal import encoder_terminal_chunk
from dynamo.common.backend.worker import WorkerConfig

from dynamo_worker_ext import __version__, wire
from dynamo_worker_ext.card import BackendFramework, WorkerCard, host_identity
from dynamo_worker_ext.errors import (
    LimitExceededError,
    MediaLoadError,
    MediaLostError,
    StartupError,
    TransferError,
    TransportUnavailableError,
)
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.ingest import Ingest
from dynamo_worker_ext.media import MediaLoader
from dynamo_worker_ext.transfer import MmKwargsReceiver, MmKwargsSender, codec
from dynamo_worker_ext.worker.base import Worker
from dynamo_worker_ext.worker.batch import Batcher
from dynamo_worker_ext.worker.client_embeddings import are_in
from dynamo_worker_ext.worker.embeddings import Embedding, EmbeddingStore, Key, open_senders
from dynamo_worker_ext.worker.encoder import Encoder, ProcessedMedia, Video
from dynamo_worker_ext.worker.options import WorkerOptions
from dynamo_worker_ext.worker.to_encode import (
    MediaToEncode,
    ProcessedReading,
    content_hash,
    encoded_item,
    known_picture,
    media_of,
    options_of,
    payload_of,
    processed,
    scope_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds that a worker which stops gives to whoever has just got a handle from it.
_LAST_READS_S: Final = 2.0


class EncodeConfig(Protocol):
    """What an encode worker needs of an engine's parsed command line."""

    @property
    def options(self) -> WorkerOptions: ...

    @property
    def worker(self) -> WorkerConfig: ...

    @property
    def served_names(self) -> tuple[str, ...]: ...

    @property
    def frontend_decoding(self) -> bool: ...


class EncodeWorker(Worker):
    """Serves the vision side of one engine; a subclass says of which.

    Args:
        config: the parsed command line.
        encoder: the engine's vision tower, not started yet.
        framework: what the card says.
    """

    def __init__(self, config: EncodeConfig, encoder: Encoder, framework: BackendFramework) -> None:
        super().__init__(config.options)
        self._config = config
        self._encoder = encoder
        self._framework: BackendFramework = framework
        self._batcher = Batcher(encoder, self.metrics)
        self._store: EmbeddingStore | None = None
        self._making: dict[Key, asyncio.Task[Embedding]] = {}
        self._receivers: dict[str, MmKwargsReceiver[Any]] = {}

    @property
    def engine_prefix(self) -> str:
        return f"{self._framework}:"

    # Start-up.

    async def _start(self, worker_id: int) -> EngineConfig:
        config, options = self._config, self.options
        info = await self._encoder.start()
        self.start_watchdog()
        if not info.limits.get("image"):
            raise StartupError(
                "there is nothing to encode: this model takes no images, or no embeddings of them"
            )
        self._info = info
        self._loader = MediaLoader(
            frontend_decoding=config.frontend_decoding,
            cache_mb=options.media_cache_mb,
            decode_videos=not self._encoder.decodes_videos,
        )
        if info.takes_processed:
            self._receivers = self.open_receivers()
        self._reader = Ingest(
            ProcessedReading(self._holds, self._encoder, info.limits),
            self._receivers,
            self._loader,
            self.metrics,
        )
        self._store = EmbeddingStore(
            await self._open_senders(),
            options.embedding_cache_bytes,
            options.embedding_lease_s,
            self.metrics,
        )
        self._store.start()
        mode = options.hash_mode or HashMode.PAD_VALUE
        self.metrics.info.labels(self._framework, info.engine_version, __version__, mode.value).set(
            1
        )
        card = WorkerCard(
            backend_framework=self._framework,
            package_version=__version__,
            engine_version=info.engine_version,
            mm_hash_mode=mode,
            mm_hash_hex_chars=mode.hex_chars,
            transports=tuple(self._receivers),
            max_item_bytes=options.max_item_bytes,
            host_id=host_identity(),
            modalities=tuple(info.limits),
        )
        log.info("this encode worker: %s; offers %s", card.describe(), self._store.transports)
        return EngineConfig(
            model=config.worker.model_name,
            served_model_name=config.served_names[0],
            model_aliases=list(config.served_names[1:]),
            runtime_data={**card.to_runtime_data(), **info.engine_config},
            llm=LlmRegistration(
                context_length=info.context_length, kv_cache_block_size=info.block_size
            ),
        )

    async def _open_senders(self) -> dict[str, MmKwargsSender[Any]]:
        return await open_senders(self.options, self.metrics)

    async def health_check_payload(self) -> dict[str, Any] | None:
        extras: dict[str, Any] = {"multi_modal_data": {"image_url": [{"Url": known_picture()}]}}
        if self._info.probe_tokens:
            extras["token_ids"] = list(self._info.probe_tokens)
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=1, extras=extras)
        return payload

    def engine_is_dead(self) -> bool:
        return self._encoder.is_dead()

    async def _stop(self) -> None:
        if self._store is not None and not self.engine_is_dead():
            # Handles that were given out a moment ago are being read now.
            await asyncio.sleep(max(0.0, _LAST_READS_S - self._store.seconds_since_lease()))
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        await self._batcher.close()
        while self._receivers:
            await self._receivers.popitem()[1].close()
        if self._store is not None:
            await self._store.close()
            self._store = None
        await self._encoder.close()

    # Requests.

    async def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        with self.metrics.stage("parse"):
            media = wire.parse(request, max_item_bytes=self.options.max_item_bytes)
        with self.metrics.stage("prepare"):
            handle = await self._handle(request, media)
        prompt = len(media.token_ids)
        chunk: dict[str, Any] = encoder_terminal_chunk(
            handle,
            completion_usage={
                "prompt_tokens": prompt,
                "completion_tokens": 0,
                "total_tokens": prompt,
            },
        )
        yield chunk

    async def _handle(self, request: Mapping[str, Any], media: wire.MediaRequest) -> dict[str, Any]:
        """Encode what is not cached, and say where everything lies."""
        for modality, limit in self._info.limits.items():
            if (count := media.count(modality)) > limit:
                raise LimitExceededError(
                    f"the request carries {count} {modality} item(s); this worker takes at most "
                    f"{limit} (--limit-mm-per-prompt)"
                )
        try:
            found = await self._processed(request, media)
            if found is None:
                taken = self._can_encode(media.raw) and not are_in(media)
                if media.transfer is not None or not taken:
                    return self._pass_on()
                items = media_of(request, media)
                if is_probe(request):
                    # Is to prove that the tower works, not that the cache does.
                    for one in items:
                        loaded = await self._load(one)
                        await self._batcher.encode(one.modality, loaded, one.processor_kwargs)
                    return wire.write_encoded([], [])
                found = await _all(self._embedding(one) for one in items)
        except TransferError as error:
            self._warn(error.reason, "embeddings cannot be offered: %s; passing on", error)
            return self._pass_on()
        return self._hand_out(found)

    def _hand_out(self, found: Sequence[tuple[Embedding, str]]) -> dict[str, Any]:
        """The handle of a request's embeddings, which can be read from now on."""
        store, items = self._ready_store(), [embedding for embedding, _ in found]
        modalities = [one.item.modality for one in items]
        store.lease(items)
        shared = [
            name
            for name in self._transports_for(modalities)
            if all(name in item.refs for item in items)
        ]
        if not shared:  # no room over one here, over another there
            return self._pass_on()
        sources = [source for _, source in found]
        outcome = "encoded" if "encoded" in sources else "hit"
        self.metrics.requests.labels(outcome, shared[0]).inc()
        for modality, source in zip(modalities, sources, strict=True):
            self.metrics.items.labels(modality, source).inc()
        hashes = [one.item.mm_hash for one in items]
        return wire.write_encoded(
            [one.item for one in items],
            [
                wire.write_offer(
                    name, modalities, hashes, {i: one.refs[name] for i, one in enumerate(items)}
                )
                for name in shared
            ],
        )

    def _can_encode(self, modalities: Collection[str]) -> bool:
        """Whether all of a request's media can be encoded, and then said where it lies."""
        return (
            bool(modalities)
            and all(modality in self._info.limits for modality in modalities)
            and bool(self._transports_for(modalities))
        )

    def _transports_for(self, modalities: Collection[str]) -> list[str]:
        mixed = len(set(modalities)) > 1
        return [
            name for name in self._ready_store().transports if not mixed or name in wire.NAMES_ITEMS
        ]

    def _pass_on(self) -> dict[str, Any]:
        self.metrics.requests.labels("passed_on", "none").inc()
        return wire.write_encoded([], [])

    async def _processed(
        self, request: Mapping[str, Any], media: wire.MediaRequest
    ) -> list[tuple[Embedding, str]] | None:
        """The embeddings of media that came processed; None where it is to be passed on.

        What cannot be read here is passed on as well: whoever comes next has raw media to fall
        back to, or says what is lost.
        """
        transfer = media.transfer
        if transfer is None or not self._info.takes_processed:
            return None
        if not self._can_encode({item.modality for item in transfer.items}):
            return None
        # With options an item becomes something else.
        scope = scope_of(request) + options_of(media)
        try:
            # Without raw media, which would be loaded in its place.
            alone = msgspec.structs.replace(media, raw={})
            read = await self._reader.resolve(alone, engine_scope=scope)
        except MediaLostError:
            return None
        return await _all(
            self._once((scope, item.mm_hash), partial(self._make_processed, scope, one))
            for item, one in zip(transfer.items, processed(transfer, read.payloads), strict=True)
        )

    async def _embedding(self, item: MediaToEncode) -> tuple[Embedding, str]:
        loaded = None
        if item.identity is None:
            loaded = await self._load(item)
            item.identity = await asyncio.to_thread(content_hash, loaded, item.options)
        key = (item.scope, item.identity)
        return await self._once(key, lambda: self._make(item, loaded, key))

    async def _once(
        self, key: Key, make: Callable[[], Coroutine[Any, Any, Embedding]]
    ) -> tuple[Embedding, str]:
        """One embedding, and whether it was ``cached``, ``shared`` or had to be ``encoded``."""
        if (cached := self._ready_store().get(key)) is not None:
            return cached, "cached"
        source = "shared"
        if (making := self._making.get(key)) is None:
            source = "encoded"
            making = asyncio.create_task(make())
            self._making[key] = making
            making.add_done_callback(lambda task: self._made(key, task))
        # Whoever gives up does not take it from the others.
        return await asyncio.shield(making), source

    def _made(self, key: Key, task: asyncio.Task[Embedding]) -> None:
        self._making.pop(key, None)
        if not task.cancelled():
            task.exception()  # is somebody's only if somebody still waits

    async def _make(self, item: MediaToEncode, loaded: Image | Video | None, key: Key) -> Embedding:
        if loaded is None:
            loaded = await self._load(item)
        return await self._encode(item.modality, loaded, item.processor_kwargs, key)

    async def _make_processed(self, scope: str, one: ProcessedMedia | None) -> Embedding:
        if one is None:
            raise TransportUnavailableError("an embedding was evicted while its request was read")
        return await self._encode(one.item.modality, one, None, (scope, one.item.mm_hash))

    async def _encode(
        self,
        modality: wire.Modality,
        item: Image | Video | ProcessedMedia,
        processor_kwargs: Mapping[str, Any] | None,
        key: Key,
    ) -> Embedding:
        encoded = await self._batcher.encode(modality, item, processor_kwargs)
        pieces = codec.encode(payload_of(encoded))
        return await self._ready_store().put(key, encoded_item(encoded, key[1]), pieces)

    async def _load(self, item: MediaToEncode) -> Any:
        with self.metrics.stage("load"):
            (loaded,) = await self._loader.load(
                item.modality,
                [item.raw],
                io_kwargs=item.io_kwargs,
                cache_scope=item.cache_scope,
            )
        if not hasattr(loaded, "convert") and not isinstance(loaded, (tuple, bytes)):
            raise MediaLoadError(f"an {item.modality} was expected, got {type(loaded).__name__}")
        return loaded

    def _holds(self, key: Key) -> bool:
        """Whether an embedding is there or on its way."""
        return key in self._ready_store() or key in self._making

    def _ready_store(self) -> EmbeddingStore:
        if self._store is None:
            raise TransportUnavailableError("the worker is shutting down")
        return self._store


async def _all(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all of them return, after all are done; the first error where there is one."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
