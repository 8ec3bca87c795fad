"""The vLLM worker: one `AsyncLLM` behind Dynamo's Backend SDK. Lives in the worker process."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from dynamo.common.backend.engine import EngineConfig, LlmRegistration
from dynamo.common.backend.health_check import is_probe
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.constants import DisaggregationMode
from vllm.distributed.kv_events import KVEventsConfig
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import (
    CacheMissError,
    EngineDeadError,
    EngineError,
    HandoffError,
    StartupError,
    WorkerExtError,
)
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.ingest import Outcome, Resolution
from dynamo_worker_ext.kv_events import Normalizer, engine_endpoint
from dynamo_worker_ext.vllm import connector, handoff
from dynamo_worker_ext.vllm.args import Config
from dynamo_worker_ext.vllm.chunks import ChunkStream
from dynamo_worker_ext.vllm.errors import ENGINE_ERRORS, as_ours
from dynamo_worker_ext.vllm.identity import canary_request, verify_hash_mode
from dynamo_worker_ext.vllm.inject import VllmMedia
from dynamo_worker_ext.vllm.kv_layout import KvLayout
from dynamo_worker_ext.vllm.sampling import (
    EngineCall,
    SamplingContext,
    build_call,
    continued_call,
)
from dynamo_worker_ext.vllm.scheduler import have_no_media
from dynamo_worker_ext.vllm.stats import Snapshots
from dynamo_worker_ext.worker import MediaWorker
from dynamo_worker_ext.worker.lora import Adapter, register_adapters, unregister_adapters

log = logging.getLogger(__name__)

#: Seconds for the engine to stop its workers and to remove their shared memory before it is
#: killed. vLLM's own 5 are what it gives its workers alone.
_SHUTDOWN_S = 15.0

#: How prefill's part ends when decode is to go on.
_DONE = ("length", "stop")


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """What one request gives the engine.

    Attributes:
        prompt: the engine's input.
        handed: of a prefill worker, the items as decode is to get them; of others None.
    """

    prompt: dict[str, Any]
    handed: tuple[wire.HandedItem, ...] | None = None


class VllmWorker(MediaWorker):
    """Serves one vLLM engine.

    Args:
        config: the parsed command line.
    """

    framework = "vllm"
    engine_prefix = "vllm:"
    media_errors = (VLLMClientError, ValueError)

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.options,
            frontend_decoding=config.frontend_decoding,
            role=config.worker.disaggregation_mode,
            behind_encoder=config.worker.route_to_encoder,
        )
        self._config = config
        self._prefills = self.role is DisaggregationMode.PREFILL
        self._decodes = self.role is DisaggregationMode.DECODE
        self._llm: AsyncLLM | None = None
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
        self.report_patches()
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
        connector.prepare(engine_args, self.role)
        try:
            vllm_config = engine_args.create_engine_config()
            if self._decodes:
                have_no_media(vllm_config.scheduler_config)
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

        self._layout = await KvLayout.of(llm)
        self._uses_nixl = connector.uses_nixl(vllm_config.kv_transfer_config)

        self._media = VllmMedia(llm, self.metrics)
        await self._media.learn()
        if self._config.worker.route_to_encoder and not self._media.takes_embeddings:
            raise StartupError(
                "this model takes no embeddings of images; start without --route-to-encoder"
            )
        self._sampling = SamplingContext.of(vllm_config, lora_names=frozenset(self._loras))
        if not self._decodes:  # which sees no media
            self.take_media(self._media)
            self._facts = handoff.ItemFacts(self._media)
            mode = self.options.hash_mode or HashMode.PAD_VALUE
            await verify_hash_mode(llm, self._media, mode, self._layout, self._kv_sources())
        self._card = self.make_card(self._media, importlib.metadata.version("vllm"))
        self._canary = await canary_request(llm, self._media, with_image=not self._decodes)

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
                kv_cache_block_size=self._layout.block_size,
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
        await register_adapters(endpoint, self._adapters(), self._registration, self._config.worker)

    def _adapters(self) -> list[Adapter]:
        return [Adapter(one.lora_name, one.lora_int_id) for one in self._loras.values()]

    def _private_events(self) -> KVEventsConfig:
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=self.private_endpoint(),
            replay_endpoint=self.private_endpoint(),
            topic="kv-events",
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
        cache = self._vllm_config.cache_config

        def normalizer() -> Normalizer:
            return self._layout.normalizer(self._card.mm_hash_mode, self._media.media_tokens)

        return [
            PushSource(
                on_ready=self.pump(
                    rank,
                    engine_endpoint(source.endpoint),
                    engine_endpoint(source.replay_endpoint) if source.replay_endpoint else None,
                    normalizer,
                    max_blocks=cache.num_gpu_blocks,
                ),
                dp_rank=rank,
            )
            for rank, source in self._kv_sources().items()
        ]

    def component_metrics_dp_ranks(self) -> list[int]:
        parallel = self._vllm_config.parallel_config
        first = parallel.data_parallel_rank
        return list(range(first, first + parallel.data_parallel_size_local))

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots.publisher = publisher

    async def health_check_payload(self) -> dict[str, Any] | None:
        return self._canary

    def engine_is_dead(self) -> bool:
        return self._llm is not None and (self._llm.errored or self._waits_in_vain())

    def why_dead(self) -> str:
        if self._waits_in_vain():
            return (
                f"no KV has come from any prefill worker for {self._config.kv_timeout_s:g} s "
                "(--kv-timeout): NIXL is stuck, or the network"
            )
        return super().why_dead()

    def _waits_in_vain(self) -> bool:
        return self._decodes and 0 < self._config.kv_timeout_s < self._snapshots.waited_s

    def holds_kv(self) -> bool:
        return self._prefills and self._snapshots.holds_blocks

    # Requests.

    def build_call(
        self, request: Mapping[str, Any], trace_headers: Mapping[str, str] | None
    ) -> EngineCall:
        return build_call(
            request,
            self._sampling,
            trace_headers=trace_headers,
            # Nobody would take the KV of a canary, which would then be kept until its time is up.
            first_token_only=self._prefills and not is_probe(request),
        )

    def as_ours(self, error: Exception) -> WorkerExtError:
        return as_ours(error)

    async def engine_input(
        self, media: wire.MediaRequest, resolution: Resolution, call: EngineCall, *, resend: bool
    ) -> EnginePrompt:
        prompt = await self._prompt(media, resolution, resend)
        if call.cache_salt is not None:
            prompt["cache_salt"] = call.cache_salt
        return EnginePrompt(prompt, await self._facts.of(prompt) if call.hands_over else None)

    async def _prompt(
        self, media: wire.MediaRequest, resolution: Resolution, resend: bool
    ) -> dict[str, Any]:
        if resolution.payloads is not None and media.transfer is not None:
            return await self._media.from_transfer(
                media.token_ids, media.transfer, resolution.payloads, resend=resend
            )
        if resolution.raw is not None:
            return await self._media.from_raw(media, resolution.raw)
        return self._media.from_text(media)

    def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        return (
            self._continue(request, context) if self._decodes else super()._stream(request, context)
        )

    async def _continue(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Decode: go on from what prefill left. The media of the request is not looked at."""
        with self.metrics.stage("parse"):
            call = self.build_call(request, context.trace_headers())
            if is_probe(request):
                media = wire.MediaRequest(token_ids=request.get("token_ids") or [])
                given, prompt = None, self._media.from_text(media)
            else:
                given, prompt = self._given(request)
                call = continued_call(call, given.kv)
            if call.cache_salt is not None:
                prompt["cache_salt"] = call.cache_salt
        outcome = None
        if given is not None:
            outcome = Outcome.CONTINUED if given.media else Outcome.TEXT
        try:
            if given is not None and given.kv is not None and self._uses_nixl:
                await handoff.check_source(given.kv)
            async for chunk in self.run(EnginePrompt(prompt), call, context, may_resend=False):
                if outcome is not None:  # with the first chunk: the KV is here
                    self.metrics.requests.labels(outcome, "none").inc()
                    outcome = None
                yield chunk
        except HandoffError as error:
            self.metrics.handoff_failures.labels(error.reason).inc()
            if outcome is Outcome.CONTINUED:
                self.metrics.requests.labels(Outcome.LOST, "none").inc()
            raise

    def _given(self, request: Mapping[str, Any]) -> tuple[wire.Handoff, dict[str, Any]]:
        """What prefill left, and the engine's input that it makes."""
        limit = self._vllm_config.model_config.max_model_len
        try:
            given = wire.parse_handoff(
                request.get("prefill_result"), max_tokens=limit, uses_nixl=self._uses_nixl
            )
            return given, handoff.engine_input(given, self._media)
        except HandoffError as error:
            self.metrics.handoff_failures.labels(error.reason).inc()
            raise

    def _hand_over(self, prompt: EnginePrompt, output: Any) -> dict[str, Any]:
        """What decode is told of a prompt that prefill is done with."""
        kv = output.kv_transfer_params
        if kv is None and self._uses_nixl:
            raise EngineError("the engine did not say where the KV of the prompt lies")
        return wire.write_handoff(
            wire.Handoff(
                prompt.prompt["prompt_token_ids"],
                prompt.handed or (),
                kv,
                self._vllm_config.cache_config.block_size,
            )
        )

    async def run(
        self, prompt: EnginePrompt, call: EngineCall, context: Any, *, may_resend: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        chunks = ChunkStream(call)
        by_modality = prompt.prompt.get("mm_hashes", {})
        hashes = [h for of_modality in by_modality.values() for h in of_modality]
        started = False
        stream = self._engine.generate(
            cast(Any, prompt.prompt),
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
                        if self._decodes:
                            raise HandoffError(
                                "the KV of the prompt could not be had from its prefill worker, or "
                                "had to be given up here; the prompt is not computed anew without "
                                "its media",
                                reason="kv",
                            )
                        raise EngineError("the engine ended the request with an error")
                    if "abort" in reasons and self._closing and not context.is_stopped():
                        raise EngineError("the worker is shutting down")
                    for chunk in chunks.of(output):
                        started = True
                        if prompt.handed is not None and chunk.get("finish_reason") in _DONE:
                            chunk["disaggregated_params"] = self._hand_over(prompt, output)
                        yield chunk
        except (VLLMClientError, *ENGINE_ERRORS) as error:
            raise as_ours(error) from error

    async def abort(self, context: Any) -> None:
        if self._llm is not None:
            await self._llm.abort(context.id(), internal=False)

    async def _leave_discovery(self) -> None:
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            await unregister_adapters(endpoint, self._adapters())

    async def _stop(self) -> None:
        await self.stop_media()
        if self._llm is not None:
            self._llm.shutdown(timeout=_SHUTDOWN_S)
            self._llm = None
        self.run_on_stop()
