"""vLLM's side of the media policy: what its processor cache holds, and how items get into it.

vLLM keeps a cache of processed items in the worker process (P0) that mirrors one in the engine
core (P1); an item that P0 holds is sent to the core by hash alone. Everything here that changes
P0 runs on the renderer's own single thread, on which vLLM's processor changes it too, and touches
items in vLLM's order, so that the two caches evict the same.

vLLM's own ``InputProcessor.inject_into_mm_cache`` is not used: up to 0.33.0 it stores items
without prompt updates, after which the same item fails as raw media, and it swallows every error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, ResolvedPromptUpdate

from dynamo_worker_ext.errors import CacheMissError, InvalidTransferError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.vllm.embeds import EmbeddingReference
from dynamo_worker_ext.vllm.form import learn_form
from dynamo_worker_ext.vllm.items import kwargs_item
from dynamo_worker_ext.vllm.prompts import placeholder_range, prompt_updates
from dynamo_worker_ext.vllm.reference import ItemReference, learn_references
from dynamo_worker_ext.wire import (
    MODALITIES,
    MediaItem,
    MediaRequest,
    Modality,
    Placeholder,
    Transfer,
)
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm
from dynamo_worker_ext.worker.prompts import check_stray, media_token_ids
from dynamo_worker_ext.worker.sizes import ItemSizes, Size, sizes_of

_T = TypeVar("_T")


class VllmMedia:
    """One engine's processor cache and media limits. Lives in the worker process.

    Args:
        engine: the `AsyncLLM`.
        metrics: where stages are measured.
    """

    mixes_raw_and_held = True

    def __init__(self, engine: Any, metrics: Metrics) -> None:
        self._renderer = engine.renderer
        self._metrics = metrics
        config = engine.vllm_config.model_config
        self.media_tokens = media_token_ids(config.hf_config)
        self.limits: Mapping[Modality, int] = {}
        self._references: dict[Modality, ItemReference] = {}
        self._embeddings: dict[Modality, EmbeddingReference] = {}
        self._sizes = ItemSizes()
        self.embeddings_form: EmbeddingsForm | None = None
        self._thread = _SingleThread(self._renderer._mm_executor)
        # Whether the model's processor takes vLLM's own steps, so that one can be left out.
        self._plain = False
        multimodal = getattr(config, "multimodal_config", None)
        self._cache_copies = getattr(multimodal, "mm_processor_cache_type", "lru") == "shm"
        if config.is_multimodal_model and self._renderer.mm_processor is not None:
            allowed = self._renderer.get_mm_processor().info.allowed_mm_limits
            self.limits = {m: allowed[m] for m in MODALITIES if allowed.get(m)}

    async def learn(self) -> None:
        """Process one known item of each modality, to know what received items must look like."""
        if self.limits:
            processor = self._renderer.get_mm_processor()
            self._plain = all(
                getattr(type(processor), step) is getattr(BaseMultiModalProcessor, step)
                for step in ("apply", "_cached_apply_hf_processor", "_maybe_apply_prompt_updates")
            )
            self._references = await self._on_renderer(
                lambda: learn_references(processor, list(self.limits))
            )
            await self._on_renderer(self._learn_embeddings)

    def _learn_embeddings(self) -> None:
        processor = self._renderer.get_mm_processor()
        for modality, reference in self._references.items():
            known = EmbeddingReference.learn(processor, modality, reference)
            if known is not None:
                self._embeddings[modality] = known
        if (image := self._embeddings.get("image")) is not None:
            self.embeddings_form = learn_form(processor, image)

    @property
    def takes_embeddings(self) -> bool:
        """Whether encode workers can encode this model's images."""
        return "image" in self._embeddings

    # EngineMedia, as `dynamo_worker_ext.ingest` sees an engine.

    def holds(self, mm_hash: str, scope: str = "") -> bool:
        cache = self._renderer.mm_processor_cache
        return cache is not None and cache.is_cached_item(mm_hash) and mm_hash in self._sizes

    def check(self, transfer: Transfer) -> None:
        """vLLM goes by the placeholders that it is given, so they have to fit what they name."""
        self._sizes.check(transfer)

    def convert(self, item: MediaItem, payload: KwargsItem) -> MultiModalKwargsItem:
        if item.embeddings is not None:
            if (embeddings := self._embeddings.get(item.modality)) is None:
                raise InvalidTransferError(
                    f"this model takes no embeddings of {item.modality}s", reason="invalid_type"
                )
            return kwargs_item(embeddings.item(item, item.embeddings, payload))
        reference = self._references.get(item.modality)
        if reference is None:
            raise InvalidTransferError(
                f"this model takes no pre-processed {item.modality}", reason="invalid_type"
            )
        reference.check(payload, item)
        return kwargs_item(payload)

    def check_facts(
        self, modality: Modality, facts: Mapping[str, torch.Tensor], where: Placeholder
    ) -> dict[str, torch.Tensor]:
        """What there is to know of an item whose KV comes from elsewhere.

        Raises:
            InvalidTransferError: it is not what this model's processor would say of such an item.
        """
        if (reference := self._references.get(modality)) is None:
            raise InvalidTransferError(
                f"this model takes no {modality} of another worker's", reason="invalid_type"
            )
        return reference.check_facts(facts, where)

    async def forget(self, mm_hashes: Sequence[str]) -> None:
        """Have the cache drop items, so that they are processed or sent again."""
        cache = self._renderer.mm_processor_cache
        if cache is not None:
            await self._on_renderer(lambda: [cache.invalidate(one) for one in mm_hashes])

    # Engine inputs.

    async def from_transfer(
        self,
        token_ids: Sequence[int],
        transfer: Transfer,
        payloads: Sequence[MultiModalKwargsItem | None],
        *,
        resend: bool = False,
    ) -> dict[str, Any]:
        """Enter received items into the cache and make an engine input of them.

        Args:
            token_ids: the prompt before expansion.
            transfer: the items and the expanded prompt.
            payloads: aligned with the items; None for one that the cache holds.
            resend: send every payload to the core, whatever P0 believes that it holds.

        Raises:
            CacheMissError: an item that was held is gone; the cache is as it was.
            StrayPlaceholderError: the prompt holds a media token outside of the placeholders.
        """
        tokens = transfer.expanded_token_ids
        self._check_stray(tokens, [item.placeholder for item in transfer.items])
        self._sizes.admit(sizes_of(transfer))
        # What the cache holds already has its updates.
        held = all(payload is None for payload in payloads)
        updates = None if held else prompt_updates(token_ids, transfer)
        with self._metrics.stage("inject"):
            kwargs = await self._on_renderer(
                lambda: self._admit(transfer.items, payloads, updates, resend),
                inline=held or not self._cache_copies,
            )
        mm_kwargs: dict[str, list[Any]] = {}
        mm_hashes: dict[str, list[str]] = {}
        mm_placeholders: dict[str, list[PlaceholderRange]] = {}
        for item, data in zip(transfer.items, kwargs, strict=True):
            mm_kwargs.setdefault(item.modality, []).append(data)
            mm_hashes.setdefault(item.modality, []).append(item.mm_hash)
            mm_placeholders.setdefault(item.modality, []).append(
                placeholder_range(item.placeholder)
            )
        return {
            "type": "multimodal",
            "prompt_token_ids": tokens,
            "mm_kwargs": mm_kwargs,
            "mm_hashes": mm_hashes,
            "mm_placeholders": mm_placeholders,
            "arrival_time": time.time(),
        }

    async def from_raw(
        self, request: MediaRequest, raw: Mapping[Modality, Sequence[Any]]
    ) -> dict[str, Any]:
        """Have vLLM process raw media; None among it stands for an item that the cache holds.

        Raises:
            CacheMissError: an item that was held is gone.
            StrayPlaceholderError: the prompt holds a media token that no item belongs to.
            ValueError: vLLM refuses the media.
        """
        if self._plain and all(item is None for items in raw.values() for item in items):
            with self._metrics.stage("inject"):
                return await self._on_renderer(lambda: self._held_input(request, raw), inline=True)
        prompt: dict[str, Any] = {
            "prompt_token_ids": list(request.token_ids),
            "multi_modal_data": {modality: list(items) for modality, items in raw.items()},
        }
        uuids = {m: list(ids) for m in raw if (ids := request.identities(m)) is not None}
        if uuids:
            prompt["multi_modal_uuids"] = uuids
        if request.mm_processor_kwargs:
            prompt["mm_processor_kwargs"] = dict(request.mm_processor_kwargs)
        if request.media_io_kwargs:
            prompt["media_io_kwargs"] = dict(request.media_io_kwargs)
        with self._metrics.stage("process"):
            try:
                result = await self._process(prompt)
            except (ValueError, AssertionError):
                # vLLM has no type of its own for "not in the cache and no data given".
                gone = [
                    mm_hash
                    for modality, items in raw.items()
                    for item, mm_hash in zip(items, uuids.get(modality, items), strict=True)
                    if item is None and not self.holds(str(mm_hash))
                ]
                if gone:
                    raise CacheMissError(gone) from None
                raise
        placed = [p for ranges in result["mm_placeholders"].values() for p in ranges]
        self._check_stray(result["prompt_token_ids"], placed)
        return result

    async def _process(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Have vLLM process a prompt, each identity of which stands for one item only.

        Raises:
            CacheMissError: one does not, and some of the media is not there to do without them.
        """
        result = cast(
            dict[str, Any], await self._renderer.process_for_engine_async(prompt, time.time())
        )
        sizes = [
            (str(mm_hash), Size(modality, where.get_num_embeds()))
            for modality, places in result["mm_placeholders"].items()
            for mm_hash, where in zip(result["mm_hashes"][modality], places, strict=True)
        ]
        of_one = dict(sizes)
        changed = [h for h, size in sizes if self._sizes.differs(h, size) or of_one[h] != size]
        if changed and "multi_modal_uuids" in prompt:  # else they are of vLLM's own making
            # The picture behind a URL is another one now, or a client gave two the same name.
            await self.forget(changed)
            if any(one is None for items in prompt["multi_modal_data"].values() for one in items):
                raise CacheMissError(changed)
            del prompt["multi_modal_uuids"]  # vLLM makes identities by content
            return await self._process(prompt)
        for mm_hash, size in sizes:
            self._sizes.enter(mm_hash, size)
        return result

    def _held_input(self, request: MediaRequest, modalities: Iterable[Modality]) -> dict[str, Any]:
        """The engine input of raw media that the cache holds. On the renderer's thread.

        These are the steps of vLLM's processor without the one that costs milliseconds: vLLM
        0.31.0 calls the Hugging Face processor on a dummy text even where no data is left.
        """
        hashes = {m: [str(h) for h in request.identities(m) or ()] for m in modalities}
        cache = self._renderer.mm_processor_cache
        gone = [h for of_modality in hashes.values() for h in of_modality if not self.holds(h)]
        if gone:
            raise CacheMissError(gone)
        processor = self._renderer.get_mm_processor()
        kwargs, updates = processor._merge_mm_kwargs(
            cache,
            mm_hashes=hashes,
            mm_is_cached={m: [True] * len(h) for m, h in hashes.items()},
            mm_missing_kwargs={},
            mm_missing_prompt_updates={},
        )
        tokens, placed = processor._apply_prompt_updates(
            processor._postprocess_prompt(list(request.token_ids)), updates
        )
        for modality, of_modality in hashes.items():
            if len(found := placed.get(modality, ())) != len(of_modality):
                raise ValueError(
                    f"{len(of_modality)} {modality}(s), but {len(found)} placeholder(s) for them"
                )
        self._renderer.update_mm_cache_stats()
        ranges = {m: [one.to_range() for one in found] for m, found in placed.items()}
        self._check_stray(tokens, [p for of_modality in ranges.values() for p in of_modality])
        return {
            "type": "multimodal",
            "prompt_token_ids": tokens,
            "mm_kwargs": kwargs,
            "mm_hashes": hashes,
            "mm_placeholders": ranges,
            "arrival_time": time.time(),
        }

    def from_text(self, request: MediaRequest) -> dict[str, Any]:
        """A prompt without media.

        Raises:
            StrayPlaceholderError: it holds a media token.
        """
        self._check_stray(request.token_ids, ())
        return {
            "type": "token",
            "prompt_token_ids": list(request.token_ids),
            "arrival_time": time.time(),
        }

    def _check_stray(self, tokens: Sequence[int], placed: Sequence[Any]) -> None:
        check_stray(tokens, placed, self.media_tokens)

    def _admit(
        self,
        items: Sequence[MediaItem],
        payloads: Sequence[MultiModalKwargsItem | None],
        updates: Sequence[ResolvedPromptUpdate] | None,
        resend: bool,
    ) -> list[MultiModalKwargsItem | None]:
        """Give each item to P0, take what is to be sent to the core. On the renderer's thread."""
        cache = self._renderer.mm_processor_cache
        if cache is None:
            return list(payloads)
        gone = [
            item.mm_hash
            for item, payload in zip(items, payloads, strict=True)
            if payload is None and not cache.is_cached_item(item.mm_hash)
        ]
        if gone:
            raise CacheMissError(gone)
        if resend:
            for item in items:
                cache.invalidate(item.mm_hash)
        # As vLLM does: first touch all, so that entering one does not evict another.
        for item in items:
            cache.touch_sender_cache_item(item.mm_hash)
        result: list[MultiModalKwargsItem | None] = []
        for i, (item, payload) in enumerate(zip(items, payloads, strict=True)):
            if payload is not None and updates is None and not cache.is_cached_item(item.mm_hash):
                # Without prompt updates an entry would break the same item as raw media.
                result.append(payload)
                continue
            if payload is None and not cache.is_cached_item(item.mm_hash):
                # The cache is smaller than this one request.
                raise CacheMissError([item.mm_hash])
            entry = None if payload is None else (payload, [updates[i]] if updates else [])
            data, _ = cache.get_and_update_item(entry, item.mm_hash)
            result.append(data)
        self._renderer.update_mm_cache_stats()
        return result

    async def _on_renderer(self, call: Callable[[], _T], *, inline: bool = False) -> _T:
        """Run what touches P0, not at the same time as anything else that does.

        Args:
            inline: run it here where nothing can be in its way: the hop to the thread and back
                costs more than a short call.
        """
        if inline and self._thread.is_idle():
            return call()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._renderer._mm_executor, call)


class _SingleThread:
    """Watches an executor of one thread, to know when nothing runs or waits there.

    A call that was given up by whoever awaited it counts until it is over. Who asks on the event
    loop may rely on the answer until the next await: only the loop submits.
    """

    def __init__(self, executor: Executor) -> None:
        self._pending: set[Future[Any]] = set()
        submit = executor.submit

        def watched(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = submit(call, *args, **kwargs)
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            return future

        executor.submit = watched  # type: ignore[method-assign]

    def is_idle(self) -> bool:
        return not self._pending
