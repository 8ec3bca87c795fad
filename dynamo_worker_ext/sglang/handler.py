"""The SGLang worker: one `Engine` behind Dynamo's Backend SDK. Lives in the worker process."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import sglang
from dynamo.common.backend.engine import EngineConfig, LlmRegistration
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import KvEventSource, PushSource
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.load_snapshot import shm_path_for

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import (
    EngineDeadError,
    EngineError,
    StartupError,
    UnsupportedOptionError,
    WorkerExtError,
)
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.ingest import Resolution
from dynamo_worker_ext.kv_events import Normalizer, WidePads, engine_endpoint
from dynamo_worker_ext.sglang.args import Config
from dynamo_worker_ext.sglang.chunks import ChunkStream
from dynamo_worker_ext.sglang.engine import launch, shut_down
from dynamo_worker_ext.sglang.errors import as_ours
from dynamo_worker_ext.sglang.identity import canary_request, find_support, routes_exactly
from dynamo_worker_ext.sglang.media import EngineInput, SglangMedia
from dynamo_worker_ext.sglang.probe import HashSupport, provisional_identity
from dynamo_worker_ext.sglang.sampling import EngineCall, SamplingContext, build_call
from dynamo_worker_ext.sglang.stats import LoadReporter
from dynamo_worker_ext.worker import MediaWorker
from dynamo_worker_ext.worker.lora import Adapter, register_adapters, unregister_adapters

log = logging.getLogger(__name__)


def new_request_id() -> str:
    """SGLang's id of a request: it takes none twice, and a client may choose the context's."""
    return uuid.uuid4().hex


def _engine_failed(*_: Any) -> None:
    """In the place of SGLang's handler while it starts, which would kill this process: what failed
    is raised by `Engine` as well, and then nothing is left behind."""


class SglangWorker(MediaWorker):
    """Serves one SGLang engine.

    Args:
        config: the parsed command line.
    """

    framework = "sglang"
    engine_prefix = "sglang:"
    decodes_videos = True

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.options,
            frontend_decoding=config.frontend_decoding,
            role=config.worker.disaggregation_mode,
            behind_encoder=config.worker.route_to_encoder,
        )
        self._config = config
        self._engine: Any = None
        self._dead = False
        self._endpoint: Any = None
        self._loads: LoadReporter | None = None
        self._support = HashSupport(accepted=False)
        self._wide_pads = WidePads()
        # The engine's ids of each request.
        self._request_ids: dict[str, set[str]] = {}
        self._scopes: dict[str, str] = {}
        self._kv_events: dict[str, Any] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[SglangWorker, Any]:
        from dynamo_worker_ext.sglang.args import parse_args

        config = parse_args(argv)
        return cls(config), config.worker

    # Start-up.

    async def _start(self, worker_id: int) -> EngineConfig:
        if self.options.hash_mode is HashMode.BLOCK_MM_INFOS:
            raise StartupError("--mm-hash-mode block_mm_infos: SGLang knows only pad_value")
        self.report_patches()
        server_args = self._config.server_args(
            kv_events_config=self._kv_events_config(), custom_sigquit_handler=_engine_failed
        )
        engine = self._engine = launch(server_args)
        self._settings = settings = resolved_view(engine.server_args)
        manager = engine.tokenizer_manager
        manager.signal_handler_class = self._signal_handler
        manager.auto_create_handle_loop()
        self.start_watchdog()

        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        self._total_tokens = int(scheduler["max_total_num_tokens"])
        self._media = media = SglangMedia(
            manager,
            self.metrics,
            cache_bytes=self._config.feature_cache_bytes,
            limits=settings.limit_mm_data_per_request or {},
        )
        self.metrics.cache_bytes.set_function(lambda: media.cache.statistics().bytes)
        await self._open_media(media)
        self._sampling = self._sampling_context()
        self._card = self.make_card(
            media,
            sglang.__version__,
            mm_routing="exact" if self._exact else "text_prefix",
            mm_hash_support=self._support.describe(),
        )
        self._canary = self._canary_request()
        self._registration = self._registration_config()
        return self._registration

    async def _open_media(self, media: SglangMedia) -> None:
        """Find out what the engine does with media, and take it from now on."""
        if self._config.worker.route_to_encoder and not media.takes_embeddings:
            raise StartupError(
                "this model takes no embeddings of images; start without --route-to-encoder"
            )
        self.take_media(media)
        self._support = await find_support(self._engine, media)
        self._exact = not media.limits or await self._routes_exactly()
        self.metrics.mm_hash_support.labels(self._support.describe()).set(1)
        self._say_support()
        media.watch(self._engine.tokenizer_manager, self._scopes)

    def _canary_request(self) -> dict[str, Any]:
        """What Dynamo's health check sends when the worker is idle."""
        return canary_request(self._engine, self._media)

    def _kv_events_config(self) -> str | None:
        """What the engine publishes KV events by."""
        given = self._config.kv_events
        args = self._config.engine_args
        if given is None and not args.disable_radix_cache:
            if args.dp_size > 1:
                log.warning(
                    "several data-parallel ranks publish KV events over TCP only; set "
                    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:PORT"}\' for '
                    "KV-aware routing"
                )
                return None
            given = {
                "publisher": "zmq",
                "topic": "kv-events",
                "endpoint": self.private_endpoint(),
                "replay_endpoint": self.private_endpoint(),
            }
        self._kv_events = given if given and given.get("publisher", "null") != "null" else None
        if self._kv_events is not None:
            engine_endpoint(self._kv_events["endpoint"])  # refuses one whose events would be lost
        return None if given is None else json.dumps(given)

    async def _routes_exactly(self) -> bool:
        if not self._support.exact or self._kv_events is None:
            return self._support.exact
        endpoint = engine_endpoint(self._kv_events["endpoint"])
        return await routes_exactly(
            self._engine, self._media, self._support, endpoint, self._settings.page_size
        )

    def _say_support(self) -> None:
        if not self._media.limits:
            return
        log.info("media hashes are %s", self._support.describe())
        if not self._exact:
            log.warning(
                "SGLang %s does not publish the router's media hashes here (%s): repeated media "
                "is routed by the text before it only",
                sglang.__version__,
                self._support.describe(),
            )

    def _sampling_context(self) -> SamplingContext:
        settings, model = self._settings, self._engine.tokenizer_manager.model_config
        return SamplingContext(
            defaults=model.get_default_sampling_params(),
            grammar_backend=settings.grammar_backend or "none",
            deterministic=settings.enable_deterministic_inference,
            has_tokenizer=not settings.skip_tokenizer_init,
            priorities=settings.enable_priority_scheduling,
            traces=settings.enable_trace,
            dp_ranks=settings.dp_size,
            lora_names=frozenset(one.name for one in self._adapters()),
        )

    def _registration_config(self) -> EngineConfig:
        settings, model = self._settings, self._engine.tokenizer_manager.model_config
        context = min(model.context_len, self._total_tokens)
        refuses = not settings.allow_auto_truncate
        return EngineConfig(
            model=self._config.worker.model_name,
            served_model_name=self._config.served_names[0],
            model_aliases=list(self._config.served_names[1:]),
            runtime_data={
                **self._card.to_runtime_data(),
                "stream_interval": settings.stream_interval,
                "token_budget": {
                    "combined_limit": context,
                    "reject_prompt_overflow": refuses,
                    "reject_total_overflow": refuses,
                },
            },
            llm=LlmRegistration(
                context_length=context,
                kv_cache_block_size=settings.page_size,
                total_kv_blocks=self._total_tokens // settings.page_size,
                max_num_seqs=settings.max_running_requests,
                max_num_batched_tokens=settings.max_prefill_tokens or self._total_tokens,
                data_parallel_size=settings.dp_size,
                data_parallel_start_rank=0,
                max_gpu_lora_count=settings.max_loras_per_batch if self._adapters() else None,
            ),
        )

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        await register_adapters(endpoint, self._adapters(), self._registration, self._config.worker)

    def _adapters(self) -> list[Adapter]:
        paths = self._settings.lora_paths or ()
        return [Adapter(one.lora_name, i) for i, one in enumerate(paths, start=1)]

    # KV events, metrics, health.

    async def kv_event_sources(self) -> list[KvEventSource]:
        config = self._kv_events
        if config is None:
            return []
        page = self._settings.page_size

        def normalizer() -> Normalizer:
            return Normalizer(
                HashMode.PAD_VALUE, self._media.media_tokens, page, wide_pads=self._wide_pads
            )

        replay = config.get("replay_endpoint")
        return [
            PushSource(
                on_ready=self.pump(
                    rank,
                    engine_endpoint(config["endpoint"], rank),
                    engine_endpoint(replay, rank) if replay else None,
                    normalizer,
                    max_blocks=self._total_tokens // page,
                ),
                dp_rank=rank,
            )
            for rank in range(self._settings.dp_size)
        ]

    async def register_prometheus(self, metrics: Any) -> None:
        await super().register_prometheus(metrics)
        if self._settings.enable_metrics:
            from prometheus_client import CollectorRegistry, multiprocess

            # The scheduler's series; it is another process.
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            register_engine_registry(metrics, registry, prefix_filters=[self.engine_prefix])

    def component_metrics_dp_ranks(self) -> list[int]:
        return list(range(self._settings.dp_size))

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._loads = LoadReporter(
            shm_path_for(self._engine.port_args.instance_id),
            self._settings.dp_size,
            self._settings.page_size,
            publisher,
        )
        self._loads.start()

    async def health_check_payload(self) -> dict[str, Any] | None:
        return self._canary

    def engine_is_dead(self) -> bool:
        return self._dead

    def _signal_handler(self, manager: Any) -> Any:
        """In the place of SGLang's own, which would end this process with everything in it."""
        worker = self

        class Handler:
            def sigterm_handler(self, *_: Any) -> None:
                """Dynamo's runtime owns SIGTERM."""

            def running_phase_sigquit_handler(self, *_: Any) -> None:
                if manager._subprocess_watchdog is not None:
                    manager._subprocess_watchdog.stop()
                worker._engine_died()

        return Handler()

    def _engine_died(self) -> None:
        if self._dead:
            return
        self._dead = True
        manager = self._engine.tokenizer_manager
        for rid in list(manager.rid_to_state):  # nobody else will end what waits for an answer
            manager._handle_abort_req(AbortReq(rid=rid, abort_message="the engine died"))
        self.fail("a process of SGLang died")

    # Requests.

    def build_call(
        self, request: Mapping[str, Any], trace_headers: Mapping[str, str] | None
    ) -> EngineCall:
        extra = request.get("extra_args") or {}
        for name in ("multi_modal_uuids", "mm_processor_kwargs"):
            if request.get(name) or extra.get(name):
                raise UnsupportedOptionError(f"{name} cannot be honoured by SGLang; leave it out")
        return build_call(request, self._sampling, trace_headers=trace_headers)

    def as_ours(self, error: Exception) -> WorkerExtError:
        return as_ours(error)

    def cache_scope(self, call: EngineCall) -> str:
        return "\0".join((call.lora_name or "", call.cache_salt or ""))

    async def engine_input(
        self, media: wire.MediaRequest, resolution: Resolution, call: EngineCall, *, resend: bool
    ) -> EngineInput:
        scope = self.cache_scope(call)
        if resolution.payloads is not None and media.transfer is not None:
            given = await self._media.from_transfer(media.transfer, resolution.payloads, scope)
        elif resolution.raw is not None:
            given = await self._media.from_raw(media, resolution.raw, scope)
        else:
            given = self._media.from_text(media)
        return self._with_safe_hashes(given)

    def _with_safe_hashes(self, given: EngineInput) -> EngineInput:
        hashes = given.pop("mm_hashes", None)
        media = [*given.get("image_data", ()), *given.get("video_data", ())]
        processed = [data for data in media if isinstance(data, dict)]
        support = self._support
        if hashes and (support.processed if processed else support.raw):
            given["mm_hashes"] = hashes
            support.teach(self._wide_pads, hashes)
            identity = provisional_identity(hashes) if processed else {}
            for data in processed:
                data.update(identity)
        return given

    async def run(
        self, prompt: Any, call: EngineCall, context: Any, *, may_resend: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        if self.engine_is_dead():
            raise EngineDeadError("the engine died")
        async for chunk in self._answer(prompt, call, context, new_request_id()):
            yield chunk

    async def _answer(
        self, prompt: EngineInput, call: EngineCall, context: Any, rid: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What the engine answers, as chunks."""
        chunks = ChunkStream(call, prompt["input_ids"])
        ids = self._request_ids[context.id()] = {rid}
        if "mm_hashes" in prompt:
            self._scopes[rid] = self.cache_scope(call)
        try:
            stream = await self._engine.async_generate(
                **prompt, **call.arguments(), rid=rid, stream=True
            )
            async with aclosing(stream):
                async for output in stream:
                    meta = output["meta_info"]
                    ids.add(meta["id"])  # with n above 1 each choice has its own
                    reason = meta.get("finish_reason") or {}
                    if reason.get("type") == "abort" and self.engine_is_dead():
                        raise EngineDeadError("the engine died")
                    if reason.get("type") == "abort" and self._closing and not context.is_stopped():
                        raise EngineError("the worker is shutting down")
                    for chunk in chunks.of(output):
                        yield chunk
        except ValueError as error:
            raise as_ours(error) from error
        finally:
            self._scopes.pop(rid, None)
            self._request_ids.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            for rid in self._request_ids.get(context.id(), ()):
                self._engine.tokenizer_manager.abort_request(rid)

    async def _leave_discovery(self) -> None:
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            await unregister_adapters(endpoint, self._adapters())

    async def _stop(self) -> None:
        if self._loads is not None:
            self._loads.stop()
            self._loads = None
        await self.stop_media()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            shut_down(engine)
        self.run_on_stop()
