"""An SGLang engine for `dynamo_worker_ext.parity`, started as the worker starts its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sglang
from sglang.srt.arg_groups.model_override_base import resolved_view

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.kv_events import Normalizer, WidePads, engine_endpoint, private_endpoint
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.parity.engine import Served
from dynamo_worker_ext.sglang.args import parse_args
from dynamo_worker_ext.sglang.engine import launch, shut_down
from dynamo_worker_ext.sglang.errors import as_ours
from dynamo_worker_ext.sglang.identity import find_support
from dynamo_worker_ext.sglang.media import SglangMedia
from dynamo_worker_ext.sglang.probe import HashSupport, tokenize
from dynamo_worker_ext.wire import Placeholder


class SglangParityEngine:
    """One ``sglang.Engine`` with KV events on a private socket. See `ParityEngine`."""

    def __init__(self, model: str, args: Sequence[str]) -> None:
        self._on_close: list[Callable[[], None]] = []
        config = parse_args(["--model-path", model, *args])
        events, replay = private_endpoint(), private_endpoint()
        self._on_close += [events.cleanup, replay.cleanup]
        self.events = engine_endpoint(events.endpoint)
        self.replay: str | None = engine_endpoint(replay.endpoint)
        kv_events = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": events.endpoint,
            "replay_endpoint": replay.endpoint,
        }
        try:
            server_args = config.server_args(kv_events_config=json.dumps(kv_events))
            self._engine = launch(server_args)
        except BaseException:
            self._clean_up()
            raise
        self._on_close.append(partial(shut_down, self._engine))
        self._manager: Any = self._engine.tokenizer_manager
        settings = resolved_view(self._engine.server_args)
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]
        self.version: str = sglang.__version__
        self.block_size: int = settings.page_size
        self.num_blocks = int(scheduler["max_total_num_tokens"]) // self.block_size
        self.media_ids: frozenset[int] = frozenset()
        self._wide_pads = WidePads()
        self._support = HashSupport(accepted=False)

    @classmethod
    async def start(cls, model: str, args: Sequence[str]) -> SglangParityEngine:
        """Start it, in the loop that it is used in.

        Raises:
            StartupError: it does not start, or does not take the hashes of media.
        """
        engine = cls(model, args)
        try:
            engine._manager.auto_create_handle_loop()
            media = SglangMedia(engine._manager, Metrics(), cache_bytes=0, limits={})
            engine.media_ids = media.media_tokens
            engine._support = await find_support(engine._engine, media)
            if media.limits and not engine._support.raw:
                raise StartupError(
                    f"SGLang {engine.version} does not take the router's hashes of media: "
                    f"{engine._support.describe()}"
                )
        except BaseException:
            await engine.close()
            raise
        return engine

    def normalizer(self, mode: HashMode) -> Normalizer:
        return Normalizer(mode, self.media_ids, self.block_size, wide_pads=self._wide_pads)

    def image_text(self, number: int) -> str:
        tokens = self._manager.mm_processor.mm_tokens
        return str(tokens.image_token)

    def encode(self, text: str) -> list[int]:
        return list(self._manager.tokenizer.encode(text, add_special_tokens=False))

    async def serve(
        self, token_ids: Sequence[int], images: Sequence[Any], mm_hashes: Sequence[str]
    ) -> Served:
        given: dict[str, Any] = {"input_ids": list(token_ids)}
        expanded, media = list(token_ids), []
        cached = 0
        try:
            if images:
                given["image_data"] = list(images)
                given["mm_hashes"] = [mm_hash[:16] for mm_hash in mm_hashes]
                self._support.teach(self._wide_pads, mm_hashes)
                tokenized = await tokenize(self._manager, given)
                expanded = list(tokenized.input_ids)
                media = _media(tokenized.mm_inputs.mm_items, mm_hashes)
            params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            output: Any = await self._engine.async_generate(**given, sampling_params=params)
            cached = int(output["meta_info"].get("cached_tokens") or 0)
        except ValueError as error:
            raise as_ours(error) from error
        return Served(expanded, media, cached)

    async def close(self) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        while self._on_close:
            self._on_close.pop()()


def _media(items: Sequence[Any], mm_hashes: Sequence[str]) -> list[tuple[str, Placeholder]]:
    """Items with where they are; SGLang counts to the last position, inclusive."""
    places = sorted((first, last) for item in items for first, last in item.offsets or ())
    return [
        (mm_hash, Placeholder(first, last + 1 - first))
        for mm_hash, (first, last) in zip(mm_hashes, places, strict=True)
    ]
