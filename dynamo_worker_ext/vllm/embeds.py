"""Embeddings as vLLM's models take them in place of pixels, checked before the engine sees them.

vLLM's models take an item that holds ``image_embeds`` or ``video_embeds``, and for Qwen-VL its
grid, where one of pixels would be. The engine core trusts its shape; a wrong one ends the core for
everybody.
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
from dynamo_worker_ext.vllm.reference import FieldReference, ItemReference
from dynamo_worker_ext.wire import Embeddings, MediaItem, Modality

log = logging.getLogger(__name__)

#: What the positions of Qwen2.5-VL's videos need besides their grid.
SECONDS: Final = "second_per_grid_ts"

#: How vLLM batches them (0.31.0); for a model that has it otherwise embeddings are not taken.
_KINDS: Final = {"MultiModalFlatField": "flat", "MultiModalBatchedField": "batched"}


@dataclass(frozen=True, slots=True)
class EmbeddingReference:
    """What embeddings of one modality a model takes.

    Attributes:
        modality: its kind.
        width: numbers of one token's embedding, deep-stack layers included.
        kinds: by field, how the model's processor batches it.
        merge: patches along each side that become one token, where the model has grids; else None.
        seconds: what an item of pixels has as `SECONDS`, where it has it; else None.
    """

    modality: Modality
    width: int
    kinds: Mapping[str, FieldKind]
    merge: int | None
    seconds: FieldReference | None

    @classmethod
    def learn(
        cls, processor: Any, modality: Modality, pixels: ItemReference
    ) -> EmbeddingReference | None:
        """Ask a model's processor what fields it gives to the model. Blocks; takes milliseconds.

        Args:
            processor: the engine's own multimodal processor.
            modality: which embeddings.
            pixels: what its items look like that are no embeddings.

        Returns:
            None for a model that takes none. Without grids they are also to be as many
            for every item: vLLM's core (0.31.0) ends where those of a batch are not.
        """
        config = processor.info.ctx.model_config
        vision = getattr(config.hf_config, "vision_config", None)
        # Qwen3-VL puts the features of some layers behind the embedding.
        layers = getattr(vision, "deepstack_visual_indexes", None) or ()
        width = config.get_inputs_embeds_size() * (1 + len(layers))
        merge = getattr(vision, "spatial_merge_size", None)
        embeds, grid = f"{modality}_embeds", f"{modality}_grid_thw"
        if (grid in pixels.fields) != isinstance(merge, int):
            return None
        example: dict[str, torch.Tensor] = {embeds: torch.zeros(1, 1, width)}
        if isinstance(merge, int):
            example = {embeds: torch.zeros(1, width), grid: torch.tensor([[1, merge, merge]])}
        elif pixels.embeds is None:
            log.info("embeddings of %ss are not taken: they differ in length", modality)
            return None
        if (seconds := pixels.fields.get(SECONDS)) is not None:
            example[SECONDS] = torch.ones(1)
        try:
            fields = processor._get_mm_fields_config(BatchFeature(example), {})
        except (KeyError, AttributeError, NotImplementedError) as error:
            log.info("this model's processor knows no embeddings of %ss: %r", modality, error)
            return None
        kinds = {
            name: _KINDS.get(type(fields[name].field).__name__)
            for name in example
            if name in fields
        }
        if kinds.keys() != example.keys() or None in kinds.values():
            return None
        known: dict[str, Any] = kinds
        return cls(modality, width, known, merge if isinstance(merge, int) else None, seconds)

    def item(self, item: MediaItem, of: Embeddings, payload: KwargsItem) -> KwargsItem:
        """The item as the model takes it.

        Args:
            item: where it stands.
            of: what its handle says.
            payload: what came.

        Raises:
            InvalidTransferError: ``invalid_type``; it says what differs.
        """
        name, grid = f"{self.modality}_embeds", f"{self.modality}_grid_thw"
        wanted = {name, grid} if self.merge else {name}
        if payload.fields.keys() != wanted:
            raise _mismatch(
                f"embeddings have the fields {sorted(wanted)}, got {sorted(payload.fields)}"
            )
        embeds = payload.fields[name].data
        if not isinstance(embeds, torch.Tensor):
            raise _mismatch(f"{name} is a tensor, got {type(embeds).__name__}")
        dtype = str(embeds.dtype).removeprefix("torch.")
        if tuple(embeds.shape) != of.shape or dtype != of.dtype:
            raise _mismatch(
                f"the handle says {of.dtype} {list(of.shape)}, got {dtype} {list(embeds.shape)}"
            )
        tokens = item.placeholder.embeds
        if of.shape != (tokens, self.width):
            raise _mismatch(
                f"{name} is [{tokens}, {self.width}] for this model, got {list(of.shape)}"
            )
        fields = {name: self._field(name, embeds)}
        if self.merge:
            side = self.merge
            if (
                of.grid is None
                or prod(of.grid) != tokens * side**2
                or any(n % side for n in of.grid[1:])
                or (of.grid[0] != 1 and self.modality == "image")
            ):
                raise _mismatch(f"a grid of {of.grid} does not make {tokens} embeddings")
            # By the handle, which is checked, and not by what came: the model's positions need it.
            fields[grid] = self._fact(grid, torch.tensor(of.grid, dtype=torch.int64))
        if self.seconds is not None:
            if of.seconds_per_grid is None:
                raise _mismatch("the handle does not say the seconds of the video's grid")
            shape = [size or 1 for size in self.seconds.shape]
            seconds = torch.full(shape, of.seconds_per_grid, dtype=self.seconds.dtype)
            fields[SECONDS] = self._fact(SECONDS, seconds)
        return KwargsItem(fields)

    def _field(self, name: str, data: torch.Tensor) -> KwargsField:
        kind = self.kinds[name]
        options = {"slices": [slice(0, data.shape[0])], "dim": 0} if kind == "flat" else {}
        return KwargsField(data, kind, options)

    def _fact(self, name: str, data: torch.Tensor) -> KwargsField:
        return KwargsField(data, self.kinds[name], {"keep_on_cpu": True})


def _mismatch(message: str) -> InvalidTransferError:
    return InvalidTransferError(message, reason="invalid_type")
