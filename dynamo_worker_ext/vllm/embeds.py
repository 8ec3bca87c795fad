"""Embeddings as vLLM's models take them in place of pixels, checked before the engine sees them.

vLLM's models take an item that holds ``image_embeds``, and for Qwen-VL its grid, where one of
pixels would be. The engine core trusts its shape; a wrong one ends the core for everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from transformers.feature_extraction_utils import BatchFeature

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.transfer.kwargs import FieldKind, KwargsField, KwargsItem
from dynamo_worker_ext.wire import Embeddings, MediaItem

log = logging.getLogger(__name__)

_EMBEDS: Final = "image_embeds"
_GRID: Final = "image_grid_thw"

#: How vLLM batches them (0.31.0); for a model that has it otherwise embeddings are not taken.
_KINDS: Final = {"MultiModalFlatField": "flat", "MultiModalBatchedField": "batched"}


@dataclass(frozen=True, slots=True)
class EmbeddingReference:
    """What embeddings one model takes.

    Attributes:
        width: numbers of one token's embedding, deep-stack layers included.
        kinds: by field, how the model's processor batches it.
        merge: patches that become one token, where the model has grids; else None.
    """

    width: int
    kinds: Mapping[str, FieldKind]
    merge: int | None

    @classmethod
    def learn(cls, processor: Any, has_grid: bool) -> EmbeddingReference | None:
        """Ask a model's processor what fields it gives to the model.

        Args:
            processor: the engine's own multimodal processor.
            has_grid: its items of pixels have a grid.

        Returns:
            None for a model that takes no embeddings of images.
        """
        config = processor.info.ctx.model_config
        vision = getattr(config.hf_config, "vision_config", None)
        # Qwen3-VL puts the features of some layers behind the embedding.
        layers = getattr(vision, "deepstack_visual_indexes", None) or ()
        width = config.get_inputs_embeds_size() * (1 + len(layers))
        merge = getattr(vision, "spatial_merge_size", None)
        if has_grid != isinstance(merge, int):
            return None
        example: dict[str, torch.Tensor] = {_EMBEDS: torch.zeros(1, 1, width)}
        if isinstance(merge, int):
            example = {_EMBEDS: torch.zeros(1, width), _GRID: torch.tensor([[1, merge, merge]])}
        try:
            fields = processor._get_mm_fields_config(BatchFeature(example), {})
        except (KeyError, AttributeError, NotImplementedError) as error:
            log.info("this model's processor knows no embeddings: %r", error)
            return None
        kinds = {
            name: _KINDS.get(type(fields[name].field).__name__)
            for name in example
            if name in fields
        }
        if kinds.keys() != example.keys() or None in kinds.values():
            return None
        known: dict[str, Any] = kinds
        return cls(width, known, merge**2 if isinstance(merge, int) else None)

    def item(self, item: MediaItem, of: Embeddings, payload: KwargsItem) -> KwargsItem:
        """The item as the model takes it.

        Args:
            item: where it stands.
            of: what its handle says.
            payload: what came.

        Raises:
            InvalidTransferError: ``invalid_type``; it says what differs.
        """
        if payload.fields.keys() != self.kinds.keys():
            raise _mismatch(
                f"embeddings have the fields {sorted(self.kinds)}, got {sorted(payload.fields)}"
            )
        embeds = payload.fields[_EMBEDS].data
        if not isinstance(embeds, torch.Tensor):
            raise _mismatch(f"{_EMBEDS} is a tensor, got {type(embeds).__name__}")
        dtype = str(embeds.dtype).removeprefix("torch.")
        if tuple(embeds.shape) != of.shape or dtype != of.dtype:
            raise _mismatch(
                f"the handle says {of.dtype} {list(of.shape)}, got {dtype} {list(embeds.shape)}"
            )
        where = item.placeholder
        tokens = where.embeds
        if of.shape != (tokens, self.width):
            raise _mismatch(
                f"{_EMBEDS} is [{tokens}, {self.width}] for this model, got {list(of.shape)}"
            )
        fields = {_EMBEDS: self._field(_EMBEDS, embeds)}
        if self.merge:
            if of.grid is None or prod(of.grid) != tokens * self.merge:
                raise _mismatch(f"a grid of {of.grid} does not make {tokens} embeddings")
            # By the handle, which is checked, and not by what came: the model's positions need it.
            fields[_GRID] = self._field(_GRID, torch.tensor(of.grid, dtype=torch.int64))
        return KwargsItem(fields)

    def _field(self, name: str, data: torch.Tensor) -> KwargsField:
        kind = self.kinds[name]
        if kind == "flat":
            return KwargsField(data, kind, {"slices": [slice(0, data.shape[0])], "dim": 0})
        return KwargsField(data, kind, {"keep_on_cpu": True} if name == _GRID else {})


def _mismatch(message: str) -> InvalidTransferError:
    return InvalidTransferError(message, reason="invalid_type")
