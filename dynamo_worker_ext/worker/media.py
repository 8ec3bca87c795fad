"""A request's way from the frontend's message to the engine's input, the same for both engines."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, ClassVar

from dynamo.common.backend.health_check import is_probe
from dynamo.common.constants import DisaggregationMode

from dynamo_worker_ext import __version__, wire
from dynamo_worker_ext.card import BackendFramework, WorkerCard, host_identity
from dynamo_worker_ext.errors import (
    CacheMissError,
    MediaLostError,
    StartupError,
    UnsupportedOptionError,
    WorkerExtError,
)
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.ingest import EngineMedia, Ingest, Outcome, Resolution, Unread
from dynamo_worker_ext.kv_events import KvEventPump, Normalizer, PrivateEndpoint, private_endpoint
from dynamo_worker_ext.media import MediaLoader
from dynamo_worker_ext.patching import report as patching
from dynamo_worker_ext.transfer import MmKwargsReceiver
from dynamo_worker_ext.worker.base import Worker
from dynamo_worker_ext.worker.client_embeddings import ClientEmbeddings, TakesEmbeddings, are_in
from dynamo_worker_ext.worker.options import WorkerOptions

log = logging.getLogger(__name__)


class MediaWorker(Worker):
    """A worker whose requests may carry media.

    Args:
        options: our own options.
        frontend_decoding: the Rust frontend decodes media.
        role: what this worker does of a request.
        behind_encoder: encode workers get its images first.
    """

    #: What the card says.
    framework: ClassVar[BackendFramework]

    #: The engine decodes videos itself.
    decodes_videos: ClassVar[bool] = False

    #: What the engine raises for media that it refuses; see `as_ours`.
    media_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError,)

    def __init__(
        self,
        options: WorkerOptions,
        *,
        frontend_decoding: bool,
        role: DisaggregationMode = DisaggregationMode.AGGREGATED,
        behind_encoder: bool = False,
    ) -> None:
        super().__init__(options)
        self.role = role
        self._behind_encoder = behind_encoder
        self._frontend_decoding = frontend_decoding
        self._receivers: dict[str, MmKwargsReceiver[Any]] = {}
        self._pumps: list[KvEventPump] = []
        self._on_stop: list[Callable[[], None]] = []
        self._patches: tuple[str, ...] = ()

    # What a subclass provides.

    @abstractmethod
    def build_call(
        self, request: Mapping[str, Any], trace_headers: Mapping[str, str] | None
    ) -> Any:
        """What the engine is given besides the prompt. Leaves the request alone.

        Raises:
            RequestError: an option is malformed or cannot be honoured.
        """

    @abstractmethod
    async def engine_input(
        self, media: wire.MediaRequest, resolution: Resolution, call: Any, *, resend: bool
    ) -> Any:
        """The engine's input.

        Raises:
            CacheMissError: an item that the engine held is gone.
            RequestError: the prompt and its media do not fit.
        """

    @abstractmethod
    def run(
        self, prompt: Any, call: Any, context: Any, *, may_resend: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The engine's answer as Dynamo's chunks.

        Raises:
            CacheMissError: before the first chunk, if `may_resend`.
        """

    @abstractmethod
    def as_ours(self, error: Exception) -> WorkerExtError:
        """The error of ours that says the same as one of `media_errors`."""

    def cache_scope(self, call: Any) -> str:
        """What keeps this request's media apart from that of others in the engine's cache."""
        return ""

    # Start-up.

    def report_patches(self) -> None:
        """Say which patches the engine has, here and in ``/metrics``.

        Raises:
            StartupError: one is missing, and the operator wants none to be.
        """
        report = patching.installed(self.framework)
        for line in report.describe():
            log.info("%s", line)
        report.show(self.metrics)
        self._patches = report.names
        if self.options.require_patches and not report.is_complete:
            raise StartupError(f"--require-patches: {report.describe()[-1]}")

    def take_media(self, engine: TakesEmbeddings) -> None:
        """From now on resolve media for `engine`."""
        if engine.limits:
            self._receivers = self.open_receivers()
        loader = MediaLoader(
            frontend_decoding=self._frontend_decoding,
            cache_mb=self.options.media_cache_mb,
            decode_videos=not self.decodes_videos,
        )
        self._ingest = Ingest(engine, self._receivers, loader, self.metrics)
        self._client_embeddings = ClientEmbeddings(
            engine, loader, self.options.max_item_bytes, self.metrics
        )

    def make_card(self, engine: EngineMedia, engine_version: str, **more: Any) -> WorkerCard:
        """The card; also shown in ``/metrics``."""
        mode = self.options.hash_mode or HashMode.PAD_VALUE
        self.metrics.info.labels(self.framework, engine_version, __version__, mode.value).set(1)
        card = WorkerCard(
            backend_framework=self.framework,
            package_version=__version__,
            engine_version=engine_version,
            mm_hash_mode=mode,
            mm_hash_hex_chars=mode.hex_chars,
            # Dynamo (1.6.1) leaves encode workers out where a frontend sent processed media.
            transports=() if self._behind_encoder else tuple(self._receivers),
            max_item_bytes=self.options.max_item_bytes,
            host_id=host_identity(),
            modalities=tuple(engine.limits),
            patches=self._patches,
            **more,
        )
        log.info("this worker: %s", card.describe())
        return card

    def private_endpoint(self) -> str:
        """A KV event endpoint that goes away with this worker."""
        made: PrivateEndpoint = private_endpoint()
        self._on_stop.append(made.cleanup)
        return made.endpoint

    def pump(
        self,
        rank: int,
        endpoint: str,
        replay_endpoint: str | None,
        normalizer: Callable[[], Normalizer],
        max_blocks: int | None,
    ) -> Callable[[Any], None]:
        """The ``on_ready`` of a ``PushSource`` for one data-parallel rank's KV events."""

        def on_ready(publisher: Any) -> None:
            pump = KvEventPump(
                endpoint,
                publisher,
                normalizer(),
                self.metrics,
                on_failure=lambda error: self.fail(f"KV events of rank {rank} stopped: {error}"),
                replay_endpoint=replay_endpoint,
                max_blocks=max_blocks,
            )
            self._pumps.append(pump)
            pump.start()

        return on_ready

    async def stop_media(self) -> None:
        """Stop the pumps and the receivers."""
        while self._pumps:
            self._pumps.pop().stop()
        for receiver in self._receivers.values():
            await receiver.close()
        self._receivers.clear()

    def run_on_stop(self) -> None:
        """What is left to remove once the engine is gone."""
        while self._on_stop:
            self._on_stop.pop()()

    # Requests.

    async def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        with self.metrics.stage("parse"):
            media = wire.parse(request, max_item_bytes=self.options.max_item_bytes)
            if request.get("prompt_embeds") is not None:
                raise UnsupportedOptionError("prompt_embeds are not taken by this worker")
            call = self.build_call(request, context.trace_headers())
        counted = is_probe(request)
        with Unread(media.transfer, self._receivers) as unread:
            for resend in (False, True):
                try:
                    prompt, resolution = await self._prepare(
                        request, media, call, unread, resend=resend
                    )
                    if not counted:  # once, also where it is resent
                        # When the engine has the prompt, for which the client waits.
                        asyncio.get_running_loop().call_soon(
                            self._count, media, resolution, context.id()
                        )
                        counted = True
                    if context.is_stopped():  # while its media was fetched; nothing to abort yet
                        return
                    async for chunk in self.run(prompt, call, context, may_resend=not resend):
                        unread.decline()
                        yield chunk
                    return
                except CacheMissError as error:
                    # The engine has by now dropped what it does not hold; nothing was sent yet.
                    if resend:
                        raise
                    self.metrics.resends.inc()
                    log.debug("request %s: %s; resending", context.id(), error)

    async def _prepare(
        self,
        request: Mapping[str, Any],
        media: wire.MediaRequest,
        call: Any,
        unread: Unread,
        *,
        resend: bool,
    ) -> tuple[Any, Resolution]:
        """From the request's media to an engine input, and what became of the media."""
        with self.metrics.stage("prepare"):
            try:
                scope = self.cache_scope(call)
                if are_in(media):
                    self._ingest.check_limits(media)
                    media, resolution = await self._client_embeddings.resolve(
                        media, scope=scope, fresh=resend
                    )
                else:
                    resolution = await self._ingest.resolve(
                        media,
                        cache_scope=request.get("image_cache_scope"),
                        engine_scope=scope,
                        fresh=resend,
                        unread=unread,
                    )
                return await self.engine_input(media, resolution, call, resend=resend), resolution
            except MediaLostError:
                self.metrics.requests.labels(Outcome.LOST, "none").inc()
                raise
            except self.media_errors as error:
                raise self.as_ours(error) from error

    def _count(self, media: wire.MediaRequest, resolution: Resolution, request_id: str) -> None:
        outcome = resolution.outcome
        self.metrics.requests.labels(outcome, resolution.transport).inc()
        transfer = resolution.transfer or media.transfer
        if resolution.payloads is not None and transfer is not None:
            for item, payload in zip(transfer.items, resolution.payloads, strict=True):
                source = Outcome.HIT if payload is None else outcome
                self.metrics.items.labels(item.modality, source).inc()
        for modality, items in (resolution.raw or {}).items():
            for one in items:
                source = Outcome.HIT if one is None else outcome
                self.metrics.items.labels(modality, source).inc()
        log.debug(
            "request %s: media %s over %s%s",
            request_id,
            outcome.value,
            resolution.transport,
            f" ({resolution.reason})" if resolution.reason else "",
        )
