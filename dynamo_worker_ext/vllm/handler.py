"""The vLLM worker: one `AsyncLLM` behind Dynamo's Backend SDK. Lives in the worker process."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

from dynamo.common.backend.engine import EngineConfig, LlmRegistration
from dynamo.common.backend.health_check import is_probe
from dynamo.common.backend.publisher import KvEventSource, PushSource
from vllm.distributed.kv_events import KVEventsConfig
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from dynamo_worker_ext import __version__, wire
from dynamo_worker_ext.card import WorkerCard, host_identity
from dynamo_worker_ext.errors import (
    CacheMissError,
    EngineDeadError,
    EngineError,
    MediaLostError,
    StartupError,
    UnsupportedOptionError,
)
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.ingest import Ingest, Outcome, Resolution
from dynamo_worker_ext.kv_events import KvEventPump, Normalizer, engine_endpoint, private_endpoint
from dynamo_worker_ext.media import MediaLoader
from dynamo_worker_ext.transfer import MmKwargsReceiver
from dynamo_worker_ext.vllm.args import Config
from dynamo_worker_ext.vllm.chunks import ChunkStream
from dynamo_worker_ext.vllm.errors import ENGINE_ERRORS, as_ours
from dynamo_worker_ext.vllm.identity import canary_request, verify_hash_mode
from dynamo_worker_ext.vllm.inject import VllmMedia
from dynamo_worker_ext.vllm.lora import register_adapters, unregister_adapters
from dynamo_worker_ext.vllm.sampling import EngineCall, SamplingContext, build_call
from dynamo_worker_ext.vllm.stats import Snapshots
from dynamo_worker_ext.worker import Worker

log = logging.getLogger(__name__)


class VllmWorker(Worker):
    """Serves one vLLM engine.

    Args:
        config: the parsed command line.
    """

    engine_prefix = "vllm:"

    def __init__(self, config: Config) -> None:
        super().__init__(config.options)
        self._config = config
        self._llm: AsyncLLM | None = None
        self._receivers: dict[str, MmKwargsReceiver[Any]] = {}
        self._pumps: list[KvEventPump] = []
        self._on_stop: list[Callable[[], None]] = []
        self._snapshots = Snapshots()
        self._endpoint: Any = None
        self._loras = {
            module.name: LoRARequest(module.name, i, module.path)
            for i, module in enumerate(config.lora_modules, start=1)
        }

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[VllmWorker, Any]:
        from dynamo_worker_ext.vllm.args import parse_args

        config = parse_args(argv)
        return cls(config), config.worker

    # Start-up.

    async def _start(self, worker_id: int) -> EngineConfig:
        engine_args = self._config.engine_args
        if engine_args.enable_prefix_caching and engine_args.kv_events_config is None:
            if engine_args.data_parallel_size > 1:
                log.warning(
                    "several data-parallel ranks publish KV events over TCP only; set "
                    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
                    '"endpoint":"tcp://*:PORT"}\' for KV-aware routing'
                )
            else:
                engine_args.kv_events_config = self._private_events()
        try:
            vllm_config = engine_args.create_engine_config()
        except (ValueError, OSError) as error:
            raise StartupError(f"vLLM refuses its arguments: {error}") from error
        events = vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            engine_endpoint(events.endpoint)  # refuses one whose events would be lost
        self._llm = llm = AsyncLLM.from_vllm_config(
            vllm_config, stat_loggers=[self._snapshots.logger]
        )
        self.start_watchdog()
        self._vllm_config = vllm_config = llm.vllm_config
        model_config = vllm_config.model_config

        self._media = VllmMedia(llm, self.metrics)
        await self._media.learn()
        if self._media.limits:
            self._receivers = self.open_receivers()
        self._ingest = Ingest(
            self._media,
            self._receivers,
            MediaLoader(
                frontend_decoding=self._config.frontend_decoding,
                cache_mb=self.options.media_cache_mb,
            ),
            self.metrics,
        )
        self._sampling = SamplingContext.of(vllm_config, lora_names=frozenset(self._loras))
        self._card = await self._make_card()
        self._canary = await canary_request(llm, self._media)

        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        parallel = vllm_config.parallel_config
        self._registration = EngineConfig(
            model=self._config.worker.model_name,
            served_model_name=self._config.served_names[0],
            model_aliases=list(self._config.served_names[1:]),
            runtime_data={
                **self._card.to_runtime_data(),
                "stream_interval": scheduler.stream_interval,
                "token_budget": {
                    "combined_limit": model_config.max_model_len,
                    "reject_prompt_overflow": True,
                    "reject_total_overflow": True,
                },
            },
            llm=LlmRegistration(
                context_length=model_config.max_model_len,
                kv_cache_block_size=cache.block_size,
                total_kv_blocks=(cache.num_gpu_blocks or 0) // parallel.data_parallel_size,
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                data_parallel_size=parallel.data_parallel_size,
                data_parallel_start_rank=parallel.data_parallel_rank,
                max_gpu_lora_count=self._config.engine_args.max_loras if self._loras else None,
            ),
        )
        return self._registration

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        await register_adapters(
            endpoint, self._loras.values(), self._registration, self._config.worker
        )

    def _private_events(self) -> KVEventsConfig:
        events, replay = private_endpoint(), private_endpoint()
        self._on_stop += [events.cleanup, replay.cleanup]
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=events.endpoint,
            replay_endpoint=replay.endpoint,
            topic="kv-events",
        )

    async def _make_card(self) -> WorkerCard:
        mode = self.options.hash_mode or HashMode.PAD_VALUE
        await verify_hash_mode(self._engine, self._media, mode, self._kv_sources())
        engine_version = importlib.metadata.version("vllm")
        self.metrics.info.labels("vllm", engine_version, __version__, mode.value).set(1)
        return WorkerCard(
            backend_framework="vllm",
            package_version=__version__,
            engine_version=engine_version,
            mm_hash_mode=mode,
            mm_hash_hex_chars=mode.hex_chars,
            transports=tuple(self._receivers),
            max_item_bytes=self.options.max_item_bytes,
            host_id=host_identity(),
            modalities=tuple(self._media.limits),
        )

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDeadError("the engine is not running")
        return self._llm

    # KV events, metrics, health.

    def _kv_sources(self) -> dict[int, KVEventsConfig]:
        """What each data-parallel rank publishes KV events by; empty when none does."""
        events = self._vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            return {}
        sources: dict[int, KVEventsConfig] = self._engine.get_kv_event_sources()
        return sources

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [
            PushSource(on_ready=self._pump(rank, source), dp_rank=rank)
            for rank, source in self._kv_sources().items()
        ]

    def _pump(self, rank: int, source: KVEventsConfig) -> Callable[[Any], None]:
        cache = self._vllm_config.cache_config
        replay = source.replay_endpoint

        def on_ready(publisher: Any) -> None:
            pump = KvEventPump(
                engine_endpoint(source.endpoint),
                publisher,
                Normalizer(self._card.mm_hash_mode, self._media.media_tokens, cache.block_size),
                self.metrics,
                on_failure=lambda error: self.fail(f"KV events of rank {rank} stopped: {error}"),
                replay_endpoint=engine_endpoint(replay) if replay else None,
                max_blocks=cache.num_gpu_blocks,
            )
            self._pumps.append(pump)
            pump.start()

        return on_ready

    def component_metrics_dp_ranks(self) -> list[int]:
        parallel = self._vllm_config.parallel_config
        first = parallel.data_parallel_rank
        return list(range(first, first + parallel.data_parallel_size_local))

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots.publisher = publisher

    async def health_check_payload(self) -> dict[str, Any] | None:
        return self._canary

    def engine_is_dead(self) -> bool:
        return self._llm is not None and self._llm.errored

    # Requests.

    async def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        with self.metrics.stage("parse"):
            media = wire.parse(request, max_item_bytes=self.options.max_item_bytes)
            if request.get("prompt_embeds") is not None:
                raise UnsupportedOptionError("prompt_embeds are not taken by this worker")
            call = build_call(request, self._sampling, trace_headers=context.trace_headers())
        counted = is_probe(request)
        for resend in (False, True):
            try:
                prompt, resolution = await self._prepare(request, media, call, resend=resend)
                if not counted:  # once, also where it is resent
                    self._count(media, resolution)
                    counted = True
                async for chunk in self._generate(prompt, call, context, may_resend=not resend):
                    yield chunk
                return
            except CacheMissError as error:
                # vLLM has by now dropped what it does not hold; nothing was sent to the client.
                if resend:
                    raise
                self.metrics.resends.inc()
                log.debug("request %s: %s; resending", context.id(), error)

    async def _prepare(
        self,
        request: Mapping[str, Any],
        media: wire.MediaRequest,
        call: EngineCall,
        *,
        resend: bool,
    ) -> tuple[dict[str, Any], Resolution]:
        """From the request's media to an engine input, and what became of the media."""
        with self.metrics.stage("prepare"):
            try:
                resolution = await self._ingest.resolve(
                    media, cache_scope=request.get("image_cache_scope"), fresh=resend
                )
                prompt = await self._engine_input(media, resolution, resend=resend)
            except MediaLostError:
                self.metrics.requests.labels(Outcome.LOST, "none").inc()
                raise
            except (VLLMClientError, ValueError) as error:
                raise as_ours(error) from error
        if call.cache_salt is not None:
            prompt["cache_salt"] = call.cache_salt
        return prompt, resolution

    async def _engine_input(
        self, media: wire.MediaRequest, resolution: Resolution, *, resend: bool
    ) -> dict[str, Any]:
        if resolution.payloads is not None and media.transfer is not None:
            return await self._media.from_transfer(
                media.token_ids, media.transfer, resolution.payloads, resend=resend
            )
        if resolution.raw is not None:
            return await self._media.from_raw(media, resolution.raw)
        return self._media.from_text(media)

    async def _generate(
        self, prompt: dict[str, Any], call: EngineCall, context: Any, *, may_resend: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        if context.is_stopped():  # while its media was fetched; nothing to abort yet
            return
        chunks = ChunkStream(call)
        hashes = [h for of_modality in prompt.get("mm_hashes", {}).values() for h in of_modality]
        started = False
        stream = self._engine.generate(
            cast(Any, prompt),
            call.sampling_params,
            context.id(),
            lora_request=self._loras[call.lora_name] if call.lora_name else None,
            priority=call.priority,
            data_parallel_rank=call.data_parallel_rank,
            trace_headers=call.trace_headers,
            reasoning_ended=call.reasoning_ended,
            reasoning_parser_kwargs=call.reasoning_parser_kwargs,
        )
        try:
            async with aclosing(stream):
                async for output in stream:
                    reasons = {one.finish_reason for one in output.outputs}
                    if "error" in reasons:
                        if hashes and may_resend and not started:
                            raise CacheMissError(hashes)
                        raise EngineError("the engine ended the request with an error")
                    if "abort" in reasons and self._closing and not context.is_stopped():
                        raise EngineError("the worker is shutting down")
                    for chunk in chunks.of(output):
                        started = True
                        yield chunk
        except (VLLMClientError, *ENGINE_ERRORS) as error:
            raise as_ours(error) from error

    def _count(self, media: wire.MediaRequest, resolution: Resolution) -> None:
        outcome = resolution.outcome
        self.metrics.requests.labels(outcome, resolution.transport).inc()
        if resolution.payloads is not None and media.transfer is not None:
            for item, payload in zip(media.transfer.items, resolution.payloads, strict=True):
                source = Outcome.HIT if payload is None else outcome
                self.metrics.items.labels(item.modality, source).inc()
        for modality, items in (resolution.raw or {}).items():
            for one in items:
                source = Outcome.HIT if one is None else outcome
                self.metrics.items.labels(modality, source).inc()
        log.debug(
            "media %s over %s%s",
            outcome.value,
            resolution.transport,
            f" ({resolution.reason})" if resolution.reason else "",
        )

    async def abort(self, context: Any) -> None:
        if self._llm is not None:
            await self._llm.abort(context.id(), internal=False)

    async def _stop(self) -> None:
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            await unregister_adapters(endpoint, self._loras.values())
        while self._pumps:
            self._pumps.pop().stop()
        for receiver in self._receivers.values():
            await receiver.close()
        self._receivers.clear()
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
        while self._on_stop:
            self._on_stop.pop()()
