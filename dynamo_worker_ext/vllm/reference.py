"""What a received item must look like, learned from the model's own processor.

vLLM's engine core trusts processed tensors: one with a missing field, another shape or a grid
that does not match its patches ends the core for everybody. So before a received item is let in
it is compared with items that this worker's processor made itself at start-up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, cast

import torch
from PIL import Image
from vllm.config.multimodal import (
    AudioDummyOptions,
    MultiModalDummyOptions,
    VideoDummyOptions,
)
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.transfer.kwargs import FieldKind, KwargsField, KwargsItem
from dynamo_worker_ext.wire import MediaItem, Modality, Placeholder
from dynamo_worker_ext.wire.handoff import MAX_FACT_VALUES

log = logging.getLogger(__name__)


#: Options of vLLM's field classes, which do not write those that are as here.
_DEFAULTS: Final[Mapping[str, Any]] = {"dim": 0, "keep_on_cpu": False}


@dataclass(frozen=True, slots=True)
class FieldReference:
    """One field of a processed item.

    Attributes:
        kind: how vLLM batches it: ``batched``, ``flat`` or ``shared``.
        options: those of vLLM's class for it that say how items are joined.
        dtype: of its tensor, or None where the field is no single tensor.
        shape: of its tensor; None for a dimension that depends on the item.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: _DEFAULTS)

    def check(self, name: str, field: KwargsField) -> None:
        if field.kind != self.kind:
            raise _mismatch(f"{name} is a {self.kind} field, got {field.kind}")
        for option, want in self.options.items():
            if (got := field.options.get(option, _DEFAULTS[option])) != want:
                raise _mismatch(f"{name} has {option} = {want}, got {got}")
        if self.dtype is None:
            return
        data = field.data
        if not isinstance(data, torch.Tensor):
            raise _mismatch(f"{name} is a tensor, got {type(data).__name__}")
        if data.dtype != self.dtype and not (
            data.dtype.is_floating_point and self.dtype.is_floating_point
        ):
            raise _mismatch(f"{name} is {self.dtype}, got {data.dtype}")
        shape = tuple(data.shape)
        if len(shape) != len(self.shape) or any(
            want is not None and want != got for want, got in zip(self.shape, shape, strict=True)
        ):
            want = ["any" if d is None else str(d) for d in self.shape]
            raise _mismatch(f"{name} has shape [{', '.join(want)}], got {list(shape)}")


@dataclass(frozen=True, slots=True)
class ItemReference:
    """One modality's processed item.

    Attributes:
        fields: by name; an item has exactly these.
        merge: patches along each side that become one embedding, for models with a
            ``*_grid_thw`` field; else None.
        embeds: how many each item makes, for models of which all make the same; else None.
    """

    fields: Mapping[str, FieldReference]
    merge: int | None
    embeds: int | None = None

    def check(self, payload: KwargsItem, item: MediaItem) -> None:
        """Compare a received item.

        Raises:
            InvalidTransferError: with reason ``invalid_type``; it says what differs.
        """
        if payload.fields.keys() != self.fields.keys():
            raise _mismatch(
                f"{item.modality} has the fields {sorted(self.fields)}, got "
                f"{sorted(payload.fields)}"
            )
        for name, reference in self.fields.items():
            reference.check(name, payload.fields[name])
        data = {name: field.data for name, field in payload.fields.items()}
        self._check_grid(data, item.placeholder)
        if self.embeds is not None and item.placeholder.embeds != self.embeds:
            raise _mismatch(
                f"{item.modality} makes {self.embeds} embeddings, but the placeholder has room for "
                f"{item.placeholder.embeds}"
            )

    def check_facts(
        self, facts: Mapping[str, torch.Tensor], where: Placeholder
    ) -> dict[str, torch.Tensor]:
        """Those of `facts` that an item of this modality has, compared.

        Facts are the fields of a few numbers, which positions are computed from.

        Raises:
            InvalidTransferError: with reason ``invalid_type``; one is missing or differs.
        """
        result = {}
        for name, reference in self.fields.items():
            if reference.dtype is None or None in reference.shape:
                continue
            if prod(cast(tuple[int, ...], reference.shape)) > MAX_FACT_VALUES:
                continue
            if (fact := facts.get(name)) is None:
                raise _mismatch(f"{name} is missing")
            kind = cast(FieldKind, reference.kind)
            reference.check(name, KwargsField(fact, kind, reference.options))
            result[name] = fact
        self._check_grid(result, where)
        return result

    def _check_grid(self, fields: Mapping[str, object], where: Placeholder) -> None:
        for name, data in fields.items():
            if not name.endswith("_grid_thw") or not isinstance(data, torch.Tensor):
                continue
            # No operator of torch's own where it is not needed: those cost after a pause.
            flat = data if data.dim() == 1 else data.flatten()
            grid = [int(n) for n in flat.tolist()]
            if len(grid) != 3 or (grid[0] != 1 and name.startswith("image_")):
                raise _mismatch(f"{name} is [time, height, width], of an image [1, ...]: {grid}")
            patches = 1
            for n in grid:
                if not 0 < n < 2**24:
                    raise _mismatch(f"{name} is {grid}")
                patches *= n
            pixels = fields.get(_PIXELS.get(name, ""))
            if isinstance(pixels, torch.Tensor):
                have = pixels.shape[0]
                if have != patches:
                    raise _mismatch(f"{name} {grid} needs {patches} patches, got {have}")
            if self.merge:
                if any(n % self.merge for n in grid[1:]):
                    raise _mismatch(f"{name} {grid}: sides are multiples of {self.merge}")
                if (made := patches // self.merge**2) != where.embeds:
                    raise _mismatch(
                        f"{name} {grid} makes {made} embeddings, but the placeholder has room for "
                        f"{where.embeds}"
                    )


#: Which pixels a grid describes. Source: vLLM 0.31.0's Qwen-VL models.
_PIXELS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}


def learn_references(
    processor: Any, modalities: Sequence[Modality]
) -> dict[Modality, ItemReference]:
    """Process two small items of each modality and compare them. Blocks; takes milliseconds.

    Args:
        processor: the engine's own multimodal processor.
        modalities: those that the engine takes.

    Returns:
        By modality; one that the processor cannot make an item of is left out, with a warning:
        its pre-processed media is then not taken.
    """
    config = processor.info.ctx.model_config.hf_config
    vision = getattr(config, "vision_config", None)
    merge = getattr(vision, "spatial_merge_size", None)
    result: dict[Modality, ItemReference] = {}
    for modality in modalities:
        try:
            made = [process_example(processor, modality, scale)[1] for scale in (1, 2)]
            small, large = (one["mm_kwargs"][modality][0] for one in made)
            has_grid = any(name.endswith("_grid_thw") for name in small)
            if modality == "image" and not has_grid:
                made += [process_example(processor, modality, size=s)[1] for s in _SHAPES]
        except Exception as error:  # whatever a model's processor may raise
            log.warning(
                "this model's processor made no example %s (%s: %s); pre-processed %ss are not "
                "taken, raw ones are",
                modality,
                type(error).__name__,
                error,
                modality,
            )
            continue
        result[modality] = ItemReference(
            fields=_compare(small, large),
            merge=merge if isinstance(merge, int) else None,
            embeds=_same_embeds(made, modality) if len(made) > 2 else None,
        )
    return result


def example_media(
    processor: Any,
    modality: Modality,
    scale: int = 1,
    *,
    size: tuple[int, int] | None = None,
) -> Any:
    """A small item as a model's processor takes it; images are of `size`, in pixels, or of 112 x 56
    times `scale`."""
    if modality == "image":
        return Image.new("RGB", size or (112 * scale, 56 * scale), (90, 120, 60 * scale))
    # What makes a valid video or audio is the model's affair; its own builder knows.
    options = MultiModalDummyOptions(
        video=VideoDummyOptions(count=1, num_frames=2 * scale, width=112, height=112),
        audio=AudioDummyOptions(count=1, length=16_000 * scale),
    )
    longest = processor.info.ctx.model_config.max_model_len
    (item,) = processor.dummy_inputs.get_dummy_mm_data(longest, {modality: 1}, options)[modality]
    return item


def process_example(
    processor: Any,
    modality: Modality,
    scale: int = 1,
    *,
    size: tuple[int, int] | None = None,
) -> tuple[list[int], Any]:
    """A prompt of one `example_media`, and what the processor makes of it."""
    text = processor.dummy_inputs.get_dummy_text({modality: 1})
    tokens = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
    data = {modality: [example_media(processor, modality, scale, size=size)]}
    output = processor.apply(
        ProcessorInputs(
            prompt=list(tokens),
            mm_data_items=processor.info.parse_mm_data(data, validate=False),
        ),
        TimingContext(enabled=False),
    )
    return list(tokens), output


def _compare(small: Any, large: Any) -> dict[str, FieldReference]:
    """What two items of different size have in common."""
    # Some builders make one size whatever they are asked for: then nothing is known of the first
    # dimension, the one that grows with an item.
    same_size = all(_shape(small[name].data) == _shape(large[name].data) for name in small)
    result = {}
    for name in small:
        batching = small[name].field
        kind = _KINDS[type(batching).__name__]
        options = {key: getattr(batching, key, default) for key, default in _DEFAULTS.items()}
        a, b = _shape(small[name].data), _shape(large[name].data)
        if a is None or b is None or len(a) != len(b):
            result[name] = FieldReference(kind, None, (), options)
            continue
        shape = [m if m == n else None for m, n in zip(a, b, strict=True)]
        if same_size and len(shape) > 1:
            shape[0] = None
        result[name] = FieldReference(kind, small[name].data.dtype, tuple(shape), options)
    return result


def _same_embeds(made: Sequence[Any], modality: Modality) -> int | None:
    """How many embeddings items of different shape have, if all have the same."""
    counts = {one["mm_placeholders"][modality][0].get_num_embeds() for one in made}
    return int(counts.pop()) if len(counts) == 1 else None


def _shape(data: Any) -> tuple[int, ...] | None:
    return tuple(data.shape) if isinstance(data, torch.Tensor) else None


#: Images, in pixels, of which a model that cuts them into tiles makes different numbers of these.
_SHAPES: Final = ((112, 224), (640, 480), (900, 900), (300, 1200))

_KINDS = {
    "MultiModalBatchedField": "batched",
    "MultiModalFlatField": "flat",
    "MultiModalSharedField": "shared",
}


def _mismatch(message: str) -> InvalidTransferError:
    return InvalidTransferError(message, reason="invalid_type")
