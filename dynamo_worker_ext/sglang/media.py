"""Media as SGLang's engine takes it, and the worker's cache of it. Lives in the worker process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from sglang.srt.managers.schedule_batch import Modality as EngineModality

from dynamo_worker_ext.errors import (
    CacheMissError,
    InvalidTransferError,
    RequestError,
    StrayPlaceholderError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.sglang.cache import FeatureCache, Kept
from dynamo_worker_ext.sglang.features import FeatureReader, Features, bundle
from dynamo_worker_ext.sglang.llava import MAX_IMAGES, LlavaForm, LlavaImage
from dynamo_worker_ext.sglang.videos import as_video
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.wire import MODALITIES, MediaItem, MediaRequest, Modality, Transfer
from dynamo_worker_ext.wire.types import MAX_ITEMS
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm
from dynamo_worker_ext.worker.prompts import check_stray, media_token_ids
from dynamo_worker_ext.worker.sizes import ItemSizes, Size

log = logging.getLogger(__name__)

#: Below this many bytes of pixels a thread costs more than the work.
_INLINE_BYTES: Final = 1 << 20

#: What `Engine.async_generate` is given, by argument.
EngineInput = dict[str, Any]


class SglangMedia:
    """One engine's media. What `dynamo_worker_ext.ingest` sees of it.

    Args:
        tokenizer_manager: the engine's.
        metrics: where stages are measured.
        cache_bytes: memory for features of media that came before.
        limits: most items of a modality, where the operator set one.
    """

    #: SGLang takes either raw or processed items of a modality in one request.
    mixes_raw_and_held = False

    def __init__(
        self,
        tokenizer_manager: Any,
        metrics: Metrics,
        *,
        cache_bytes: int,
        limits: Mapping[str, int],
    ) -> None:
        config = tokenizer_manager.model_config
        processor = tokenizer_manager.mm_processor
        self._metrics = metrics
        self.media_tokens = media_token_ids(config.hf_config)
        self.cache = FeatureCache(cache_bytes)
        # What has another number of embeddings, `from_transfer` and SGLang notice themselves.
        self._kinds = ItemSizes()
        self._reader: FeatureReader | None = None
        self._llava = LlavaForm.of(config.hf_config)
        self.limits: Mapping[Modality, int] = {}
        self.tokens: dict[Modality, int] = {}
        if processor is None:
            return
        # Audio is not: no engine that runs here takes it.
        for modality in ("image", "video"):
            known = getattr(processor, "mm_tokens", None)
            token = getattr(known, f"{modality}_token_id", None)
            if token is not None:
                self.tokens[modality] = token
        most = MAX_ITEMS
        if self._llava is not None:
            self.tokens["image"], most = self._llava.token, MAX_IMAGES
        self.limits = {m: min(limits.get(m, most), most) for m in self.tokens if limits.get(m) != 0}
        image_processor = getattr(processor._processor, "image_processor", None)
        if image_processor is not None:
            self._reader = FeatureReader.of(config.hf_config, image_processor, config.dtype)
        if self._reader is None:
            log.info(
                "pre-processed media of model type %r is not known to this worker: it takes raw "
                "media only",
                config.hf_config.model_type,
            )

    # EngineMedia, as `dynamo_worker_ext.ingest` sees an engine.

    def holds(self, mm_hash: str, scope: str = "") -> bool:
        return _key(scope, mm_hash) in self.cache

    def check(self, transfer: Transfer) -> None:
        """SGLang looks for runs of media tokens itself, and its scheduler ends where their number
        is not that of the items."""
        if (conflict := self._kinds.conflict(_kinds_of(transfer))) is not None:
            mm_hash, _, kind = conflict
            raise InvalidTransferError(
                f"item {mm_hash}... is not a {kind.modality} by what was sent before",
                reason="invalid_hash",
            )
        tokens, last = transfer.expanded_token_ids, dict[str, int]()
        for item in sorted(transfer.items, key=lambda one: one.placeholder.offset):
            where, token = item.placeholder, self.tokens.get(item.modality)
            found = tuple(t == token for t in tokens[where.offset : where.end])
            if found != (where.is_embed or (True,) * where.length):
                raise InvalidTransferError(
                    f"the placeholder at {where.offset} has other tokens than {token} where "
                    f"{item.modality} embeddings go, or that one elsewhere",
                    reason="invalid_placeholder",
                )
            if last.get(item.modality) == where.offset:
                raise InvalidTransferError(
                    f"two {item.modality}s meet at {where.offset}; SGLang takes them for one",
                    reason="invalid_placeholder",
                )
            last[item.modality] = where.end

    def convert(self, item: MediaItem, payload: KwargsItem) -> Features:
        return self.reader.read(item, payload)

    @property
    def reader(self) -> FeatureReader:
        """Of pre-processed media.

        Raises:
            InvalidTransferError: this worker does not know the model's family.
        """
        if self._reader is None:
            raise InvalidTransferError(
                "pre-processed media of this model is not known to this worker",
                reason="invalid_type",
            )
        return self._reader

    @property
    def takes_embeddings(self) -> bool:
        """Whether encode workers can encode this model's images."""
        return self._reader is not None and "image" in self.limits

    @property
    def embeddings_form(self) -> EmbeddingsForm | None:
        """What embeddings of images clients may send."""
        if self._reader is None or "image" not in self.limits:
            return None
        return self._reader.embeddings_form(self.tokens["image"])

    # Engine inputs.

    async def from_transfer(
        self, transfer: Transfer, payloads: Sequence[Features | None], scope: str
    ) -> EngineInput:
        """Received items, and those that the cache holds, as an engine input.

        Args:
            transfer: the items and the expanded prompt.
            payloads: aligned with the items; None for one that the cache holds.
            scope: of the request.

        Raises:
            CacheMissError: an item that was held is gone.
            StrayPlaceholderError: the prompt holds a media token outside of the placeholders.
        """
        tokens = transfer.expanded_token_ids
        check_stray(tokens, [item.placeholder for item in transfer.items], self.media_tokens)
        self._kinds.admit(_kinds_of(transfer))
        with self._metrics.stage("inject"):
            features: list[Kept] = []
            for item, payload in zip(transfer.items, payloads, strict=True):
                key, where = _key(scope, item.mm_hash), item.placeholder
                span = tokens[where.offset : where.end]
                if payload is None:
                    held = self._held(key)
                    if (held.modality, held.tokens) != (item.modality, tuple(span)):
                        raise CacheMissError([item.mm_hash])  # what comes instead is checked
                    features.append(held)
                    continue
                made = await self._normalised(payload, span)
                self.cache.put(key, made)
                features.append(made)
        hashes = [item.mm_hash for item in transfer.items]
        _check_kinds(hashes, features, [payload is None for payload in payloads])
        return self._input(
            tokens, list(zip((item.mm_hash for item in transfer.items), features, strict=True))
        )

    async def from_raw(
        self, request: MediaRequest, raw: Mapping[Modality, Sequence[Any]], scope: str
    ) -> EngineInput:
        """Have SGLang process raw media, or give it what the cache holds of all of it.

        Raises:
            CacheMissError: an item that was held is gone.
            StrayPlaceholderError: the prompt holds a media token that no item belongs to.
            RequestError: the prompt holds too few of them.
        """
        self._check_placeholders(request, raw)
        if all(item is None for items in raw.values() for item in items):
            with self._metrics.stage("inject"):
                return self._held_input(request, raw, scope)
        given: EngineInput = {"input_ids": list(request.token_ids)}
        hashes: list[str] = []
        for modality in MODALITIES:
            if not (items := raw.get(modality)):
                continue
            given[f"{modality}_data"] = (
                [as_video(item) for item in items] if modality == "video" else list(items)
            )
            hashes += [h[:16] for h in request.mm_hashes.get(modality, ())]
        if len(hashes) == sum(map(len, raw.values())):
            given["mm_hashes"] = hashes
        return given

    def from_text(self, request: MediaRequest) -> EngineInput:
        """A prompt without media.

        Raises:
            StrayPlaceholderError: it holds a media token.
        """
        check_stray(request.token_ids, (), self.media_tokens)
        return {"input_ids": list(request.token_ids)}

    def watch(self, manager: Any, scopes: Mapping[str, str]) -> None:
        """Keep what SGLang's own processor makes of raw images, for when they come again.

        Args:
            manager: the engine's tokenizer manager.
            scopes: of the requests that are under way with hashes, by SGLang's request id.
        """
        tokenize_one = manager._tokenize_one_request

        async def watched(request: Any) -> Any:
            tokenized = await tokenize_one(request)
            scope, images = scopes.get(request.rid), request.image_data
            if scope is not None and images and not isinstance(images[0], dict):
                items = tokenized.mm_inputs.mm_items
                for item, features in self._made(items, tokenized.input_ids):
                    self.cache.put((scope, f"{item.hash:016x}"), features)
            return tokenized

        manager._tokenize_one_request = watched

    def expanded(self, token_ids: Sequence[int]) -> list[int]:
        """The engine's prompt as its scheduler has it."""
        return list(token_ids) if self._llava is None else self._llava.expand(token_ids)

    def processed(self, mm_items: Sequence[Any], token_ids: Sequence[int]) -> EngineInput | None:
        """What SGLang made of raw images, as if it had come processed; None if it cannot be."""
        made = [("", features) for _, features in self._made(mm_items, token_ids)]
        if len(made) != len(mm_items):
            return None
        given = self._input(token_ids, made)
        del given["mm_hashes"]
        return given

    def _made(self, mm_items: Sequence[Any], token_ids: Sequence[int]) -> list[tuple[Any, Kept]]:
        """Features of the engine's own items, for those that can be kept."""
        made = [(item, self._kept(item, token_ids)) for item in mm_items]
        return [(item, features) for item, features in made if features is not None]

    def _kept(self, item: Any, token_ids: Sequence[int]) -> Kept | None:
        if self._llava is not None:
            return self._llava.image(item)
        if self._reader is None:
            return None
        names, pixels = self._reader.fields["image"], item.feature
        grid = item.model_specific_data.get(names.grid)
        if (
            item.modality != EngineModality.IMAGE
            or not isinstance(pixels, torch.Tensor)
            or pixels.device.type != "cpu"
            or grid is None
            or len(item.offsets) != 1
        ):
            return None
        ((first, last),) = item.offsets
        span = tuple(token_ids[first : last + 1])
        # A copy: several items may be views of one tensor, which would stay whole.
        pixels = pixels.to(self._reader.dtype, copy=True)
        return Features("image", pixels, grid.reshape(1, 3), span, {})

    async def _normalised(self, features: Features, span: Sequence[int]) -> Features:
        if features.pixels.nbytes < _INLINE_BYTES:
            return self.reader.normalised(features, span)
        return await asyncio.to_thread(self.reader.normalised, features, span)

    def _held(self, key: tuple[str, str]) -> Kept:
        if (features := self.cache.get(key)) is None:
            raise CacheMissError([key[1]])
        return features

    def _held_input(
        self, request: MediaRequest, modalities: Mapping[Modality, Any], scope: str
    ) -> EngineInput:
        """The engine input of raw media that the cache holds; expands the prompt itself."""
        named = {
            modality: [
                (mm_hash, self._held(_key(scope, mm_hash)))
                for mm_hash in request.mm_hashes[modality]
            ]
            for modality in modalities
        }
        for items in named.values():
            _check_kinds([h for h, _ in items], [f for _, f in items], [True] * len(items))
        spans = {
            self.tokens[modality]: iter([features.tokens for _, features in items])
            for modality, items in named.items()
        }
        tokens: list[int] = []
        for token in request.token_ids:
            if token in spans:
                tokens += next(spans[token])
            else:
                tokens.append(token)
        return self._input(tokens, [one for items in named.values() for one in items])

    def _input(self, tokens: Sequence[int], named: Sequence[tuple[str, Kept]]) -> EngineInput:
        # The engine numbers items by modality first; within one they are in prompt order already.
        ordered = sorted(named, key=lambda one: MODALITIES.index(one[1].modality))
        ids = list(tokens)
        given: EngineInput = {
            "input_ids": ids,
            "mm_hashes": [mm_hash[:16] for mm_hash, _ in ordered],
        }
        if images := [one for _, one in ordered if isinstance(one, LlavaImage)]:
            return given | {"image_data": [image.argument() for image in images]}
        features = [one for _, one in ordered if isinstance(one, Features)]
        given |= bundle(features, self.reader.fields)
        if len(features) == 1 and features[0].modality == "image":
            # SGLang finds both with torch, a step at a time, which costs ten times as much.
            token, data = self.tokens["image"], given["image_data"][0]
            first, count = ids.index(token), ids.count(token)
            if ids[first : first + count].count(token) == count:
                data["offsets"] = [(first, first + count - 1)]
                data.update(self.reader.positions(len(ids), first, features[0]))
        return given

    def _check_placeholders(
        self, request: MediaRequest, raw: Mapping[Modality, Sequence[Any]]
    ) -> None:
        if self._reader is None and self._llava is None:  # what stands for it there is not known
            return
        for modality, token in self.tokens.items():
            found, items = request.token_ids.count(token), len(raw.get(modality, ()))
            if found > items:
                raise StrayPlaceholderError(
                    f"the prompt holds {found} token(s) {token} that stand for {modality}s, but "
                    f"the request carries {items}"
                )
            if found < items:
                raise RequestError(
                    f"the request carries {items} {modality}(s), but its prompt has "
                    f"{found} placeholder(s) for them"
                )


def _check_kinds(mm_hashes: Sequence[str], features: Sequence[Kept], held: Sequence[bool]) -> None:
    """Have a request whose items came in two ways come again, as SGLang takes no embeddings of an
    encode worker beside pixels.

    Raises:
        CacheMissError: of those that were held.
    """
    if len({(one.modality, one.encoded) for one in features}) > len(
        {one.modality for one in features}
    ):
        raise CacheMissError([h for h, is_held in zip(mm_hashes, held, strict=True) if is_held])


def _key(scope: str, mm_hash: str) -> tuple[str, str]:
    """The engine knows the first 16 characters; what it takes for one item is one here too."""
    return scope, mm_hash[:16]


def _kinds_of(transfer: Transfer) -> list[tuple[str, Size]]:
    """SGLang's scheduler ends where one identity stands for an image and a video in one batch."""
    return [(one.mm_hash[:16], Size(one.modality, 0)) for one in transfer.items]
