"""A vLLM engine for `dynamo_worker_ext.parity`, started as the worker starts its own."""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventsConfig
from vllm.v1.engine.async_llm import AsyncLLM

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.kv_events import Normalizer, engine_endpoint, private_endpoint
from dynamo_worker_ext.parity.engine import Served
from dynamo_worker_ext.vllm.args import parse_args
from dynamo_worker_ext.vllm.errors import ENGINE_ERRORS, as_ours
from dynamo_worker_ext.vllm.kv_layout import KvLayout
from dynamo_worker_ext.wire import Placeholder
from dynamo_worker_ext.worker.prompts import media_token_ids


class VllmParityEngine:
    """One `AsyncLLM` with KV events on a private socket. See `ParityEngine`."""

    _layout: KvLayout
    block_size: int

    def __init__(self, model: str, args: Sequence[str]) -> None:
        self._on_close: list[Callable[[], None]] = []
        self._numbers = itertools.count()
        engine_args = parse_args(["--model", model, *args]).engine_args
        events, replay = private_endpoint(), private_endpoint()
        self._on_close += [events.cleanup, replay.cleanup]
        self.events = engine_endpoint(events.endpoint)
        self.replay: str | None = engine_endpoint(replay.endpoint)
        engine_args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=events.endpoint,
            replay_endpoint=replay.endpoint,
        )
        try:
            config = engine_args.create_engine_config()
            self._llm = AsyncLLM.from_vllm_config(config)
        except BaseException as error:
            self._clean_up()
            if isinstance(error, ValueError | OSError | RuntimeError):
                raise StartupError(f"vLLM does not start: {error}") from error
            raise
        self._on_close.append(self._llm.shutdown)
        config = self._llm.vllm_config
        self.version: str = importlib.metadata.version("vllm")
        self.num_blocks: int = config.cache_config.num_gpu_blocks or 0
        self.media_ids = media_token_ids(config.model_config.hf_config)

    @classmethod
    async def start(cls, model: str, args: Sequence[str]) -> VllmParityEngine:
        """Start it, in the loop that it is used in.

        Raises:
            StartupError: it does not start.
        """
        engine = cls(model, args)
        try:
            engine._layout = await KvLayout.of(engine._llm)
        except BaseException:
            engine._clean_up()
            raise
        engine.block_size = engine._layout.block_size
        return engine

    def normalizer(self, mode: HashMode) -> Normalizer:
        return self._layout.all_published().normalizer(mode, self.media_ids)

    def image_text(self, number: int) -> str:
        dummy = self._llm.renderer.get_mm_processor().dummy_inputs
        before, text = (str(dummy.get_dummy_text({"image": n})) for n in (number - 1, number))
        return text.removeprefix(before)

    def encode(self, text: str) -> list[int]:
        tokenizer: Any = self._llm.renderer.get_tokenizer()
        return list(tokenizer.encode(text, add_special_tokens=False))

    async def serve(
        self, token_ids: Sequence[int], images: Sequence[Any], mm_hashes: Sequence[str]
    ) -> Served:
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if images:
            prompt["multi_modal_data"] = {"image": list(images)}
            prompt["multi_modal_uuids"] = {"image": list(mm_hashes)}
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        cached = 0
        try:
            made: Any = await self._llm.renderer.process_for_engine_async(prompt, time.time())
            name = f"parity-{next(self._numbers)}"
            async for output in self._llm.generate(made, params, name):
                cached = output.num_cached_tokens or 0
        except ValueError as error:
            raise as_ours(error) from error
        except ENGINE_ERRORS as error:
            raise as_ours(error) from error
        placed = made.get("mm_placeholders", {}).get("image", ())
        hashes = made.get("mm_hashes", {}).get("image", ())
        return Served(
            list(made["prompt_token_ids"]),
            [(h, _placeholder(p)) for h, p in zip(hashes, placed, strict=True)],
            cached,
        )

    async def close(self) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        while self._on_close:
            self._on_close.pop()()


def _placeholder(where: Any) -> Placeholder:
    mask = None if where.is_embed is None else tuple(bool(b) for b in where.is_embed.tolist())
    return Placeholder(where.offset, where.length, mask)
