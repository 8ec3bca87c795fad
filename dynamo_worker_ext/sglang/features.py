"""From media as Dynamo's frontends send it to what SGLang's engine takes as ``processor_output``.

The frontends process media with vLLM's processor for the model. For the families below its tensors
are those of the Hugging Face processor that SGLang calls, but for two things: vLLM leaves patches
as bytes where its vision tower normalises them, and writes floating point in the model's dtype. A
family that is not in the table is not guessed at: its pre-processed media is refused, in favour of
raw media.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.wire import MODALITIES, Embeddings, MediaItem, Modality, Placeholder
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm

#: More than any item has; keeps a product of numbers from the wire small.
_MAX_GRID: Final = 2**24


class FieldNames(NamedTuple):
    """What a family calls the tensors of one modality.

    Attributes:
        pixels: patches, [patches, patch values].
        grid: [time, height, width] in patches.
        ignored: fields that vLLM needs and SGLang does not.
        scalars: fields with one number an item that SGLang wants as a list.
    """

    pixels: str
    grid: str
    ignored: frozenset[str] = frozenset()
    scalars: tuple[str, ...] = ()


_IMAGE: Final = FieldNames("pixel_values", "image_grid_thw")
_VIDEO: Final = FieldNames("pixel_values_videos", "video_grid_thw")

#: By ``model_type``. Sources: vLLM 0.31.0 and SGLang 0.5.21, tried with each family.
FAMILIES: Final[Mapping[str, Mapping[Modality, FieldNames]]] = {
    "qwen2_vl": {"image": _IMAGE, "video": _VIDEO},
    "qwen2_5_vl": {"image": _IMAGE, "video": _VIDEO._replace(scalars=("second_per_grid_ts",))},
    "qwen3_vl": {"image": _IMAGE, "video": _VIDEO._replace(ignored=frozenset({"timestamps"}))},
    "qwen3_vl_moe": {"image": _IMAGE, "video": _VIDEO._replace(ignored=frozenset({"timestamps"}))},
}


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """One media item as the engine takes it.

    Attributes:
        modality: its kind.
        pixels: [patches, patch values]; see `FeatureReader.normalised`.
        grid: [1, 3], int64: time, height, width in patches.
        tokens: what stands for it in the expanded prompt; empty where that is not known yet.
        scalars: one number an item, by field.
        encoded: `pixels` are embeddings that an encode worker made of them, [tokens, width].
    """

    modality: Modality
    pixels: torch.Tensor
    grid: torch.Tensor
    tokens: tuple[int, ...]
    scalars: Mapping[str, float]
    encoded: bool = False

    @property
    def nbytes(self) -> int:
        """Memory that it takes, nearly."""
        return int(self.pixels.nbytes) + 8 * len(self.tokens) + 256


class FeatureReader:
    """Turns received items of one model into `Features`. Lives in the worker process.

    Args:
        model_type: of the model's config.
        patch_values: numbers in one patch: channels x time x height x width.
        merge: patches of a side that become one token.
        width: numbers of one token's embedding, deep-stack layers included.
        dtype: of the vision tower.
        mean, std: of each channel, where white is 1.0; for bytes that are not normalised.
    """

    def __init__(
        self,
        model_type: str,
        *,
        patch_values: int,
        merge: int,
        width: int,
        dtype: torch.dtype,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.fields = FAMILIES.get(model_type, {})
        self._model_type = model_type
        self._patch_values = patch_values
        self._merge = merge
        self._width = width
        self.dtype = dtype
        # In units of bytes, in the order of operations that transformers has: equal to the bit.
        unit = 1.0 / (1 / 255)
        self._mean = (torch.tensor(mean) * unit).reshape(1, -1, 1)
        self._std = (torch.tensor(std) * unit).reshape(1, -1, 1)

    @classmethod
    def of(cls, hf_config: Any, image_processor: Any, dtype: torch.dtype) -> FeatureReader | None:
        """The reader of a model; None where its family is not known.

        Args:
            hf_config: the model's config.
            image_processor: of its Hugging Face processor.
            dtype: that the engine runs the model in.
        """
        if hf_config.model_type not in FAMILIES:
            return None
        size, time = image_processor.patch_size, image_processor.temporal_patch_size
        mean = image_processor.image_mean
        # Qwen3-VL puts the features of some layers behind the embedding.
        layers = getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ()
        return cls(
            hf_config.model_type,
            patch_values=len(mean) * time * size * size,
            merge=image_processor.merge_size,
            width=hf_config.get_text_config().hidden_size * (1 + len(layers)),
            dtype=dtype,
            mean=mean,
            std=image_processor.image_std,
        )

    def embeddings_form(self, token: int) -> EmbeddingsForm:
        """What embeddings the model takes of an image that `token` stands for."""
        dtype = str(self.dtype).removeprefix("torch.")
        return EmbeddingsForm(token, self._width, dtype, self._merge)

    def read(self, item: MediaItem, payload: KwargsItem) -> Features:
        """Check one received item.

        SGLang's scheduler trusts what it is given: tensors that do not fit end it for everybody.

        Args:
            item: what the frontend says of it.
            payload: its fields.

        Returns:
            Its features, not normalised yet; they share the payload's memory.

        Raises:
            InvalidTransferError: with reason ``invalid_type``; it says what differs.
        """
        names = self.fields.get(item.modality)
        if names is None:
            raise _mismatch(
                f"pre-processed {item.modality}s of {self._model_type} are not known to this worker"
            )
        if item.embeddings is not None:
            return self._read_embeddings(item, item.embeddings, names, payload)
        fields = payload.fields
        wanted = {names.pixels, names.grid, *names.scalars}
        if fields.keys() - names.ignored != wanted:
            raise _mismatch(
                f"{item.modality} has the fields {sorted(wanted)}, got {sorted(fields)}"
            )
        pixels = _tensor(names.pixels, fields[names.pixels].data)
        grid = self._grid(names.grid, fields[names.grid].data)
        if pixels.shape != (prod(grid), self._patch_values):
            raise _mismatch(
                f"{names.pixels} has shape [{prod(grid)}, {self._patch_values}] for a grid of "
                f"{grid}, got {list(pixels.shape)}"
            )
        self._check_room(names.grid, grid, item.placeholder)
        scalars = {}
        for name in names.scalars:
            value = _tensor(name, fields[name].data)
            if value.numel() != 1 or not value.isfinite().all():
                raise _mismatch(f"{name} is one finite number")
            scalars[name] = float(value)
        if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
            raise _mismatch(f"{names.pixels} is uint8 or floating point, got {pixels.dtype}")
        return Features(item.modality, pixels, torch.tensor([grid]), (), scalars)

    def _read_embeddings(
        self, item: MediaItem, told: Embeddings, names: FieldNames, payload: KwargsItem
    ) -> Features:
        """Check what an encode worker made of an item."""
        fields, name = payload.fields, f"{item.modality}_embeds"
        if fields.keys() != {name, names.grid}:
            raise _mismatch(
                f"encoded {item.modality} has the fields {sorted((name, names.grid))}, got "
                f"{sorted(fields)}"
            )
        embeddings = _tensor(name, fields[name].data)
        dtype = str(embeddings.dtype).removeprefix("torch.")
        if (tuple(embeddings.shape), dtype) != (told.shape, told.dtype):
            raise _mismatch(
                f"{name} is {told.dtype} {list(told.shape)} by its handle, got {dtype} "
                f"{list(embeddings.shape)}"
            )
        grid = self._grid(names.grid, fields[names.grid].data)
        if told.grid is None or list(told.grid) != grid:
            raise _mismatch(f"{names.grid} is {told.grid} by its handle, got {grid}")
        self._check_room(names.grid, grid, item.placeholder)
        if embeddings.shape != (prod(grid) // self._merge**2, self._width):
            raise _mismatch(
                f"{name} has shape [{prod(grid) // self._merge**2}, {self._width}] for a grid of "
                f"{grid}, got {list(embeddings.shape)}"
            )
        scalars: dict[str, float] = {}
        if names.scalars:  # of which there is one: the seconds
            if told.seconds_per_grid is None:
                raise _mismatch(
                    f"the handle does not say the seconds of the {item.modality}'s grid"
                )
            scalars = dict.fromkeys(names.scalars, told.seconds_per_grid)
        return Features(item.modality, embeddings, torch.tensor([grid]), (), scalars, encoded=True)

    def normalised(self, features: Features, tokens: Sequence[int]) -> Features:
        """`features` as the vision tower takes them, in memory of their own.

        Takes milliseconds for large media; may be called on any thread.

        Args:
            features: from `read`.
            tokens: what stands for the item in the expanded prompt.
        """
        pixels = features.pixels
        if pixels.dtype == torch.uint8:
            channels = pixels.reshape(pixels.shape[0], self._mean.shape[1], -1).to(torch.float32)
            channels.sub_(self._mean).div_(self._std)
            pixels = channels.reshape(pixels.shape).to(self.dtype)
        else:
            pixels = pixels.to(self.dtype, copy=True)
        return replace(features, pixels=pixels, tokens=tuple(tokens))

    def positions(self, length: int, first: int, image: Features) -> dict[str, torch.Tensor]:
        """The M-RoPE positions of a prompt whose only item is an image, under SGLang's names.

        Text counts on by one in all three directions. The image's tokens lie on their grid, which
        begins where the text before it ends; the text behind it begins after the longer side.

        Args:
            length: of the expanded prompt.
            first: index of the image's first token.
            image: its features.

        Returns:
            Positions, [3, length] int64, and by how much the next token's is not `length`, [1, 1];
            nothing for an image of several frames, which is left to SGLang.
        """
        time, height, width = image.grid[0].tolist()
        if time != 1:
            return {}
        rows, columns = height // self._merge, width // self._merge
        end = first + rows * columns
        behind = first + max(rows, columns) - end
        positions = np.tile(np.arange(length), (3, 1))
        grid = positions[:, first:end].reshape(3, rows, columns)
        grid[0] = first
        grid[1] = np.arange(first, first + rows)[:, None]
        grid[2] = np.arange(first, first + columns)
        positions[:, end:] += behind
        return {
            "mrope_positions": torch.from_numpy(positions),
            "mrope_position_delta": torch.tensor([[behind]]),
        }

    def _grid(self, name: str, data: object) -> list[int]:
        grid = _tensor(name, data)
        if grid.dtype != torch.int64 or grid.numel() != 3:
            raise _mismatch(f"{name} is three int64, got {list(grid.shape)} {grid.dtype}")
        sides: list[int] = grid.flatten().tolist()
        if any(not 0 < side < _MAX_GRID for side in sides):
            raise _mismatch(f"{name} is {sides}")
        if sides[1] % self._merge or sides[2] % self._merge:
            raise _mismatch(f"{name} is {sides}; sides are multiples of {self._merge}")
        return sides

    def _check_room(self, name: str, grid: list[int], where: Placeholder) -> None:
        embeds = where.embeds
        made = prod(grid) // self._merge**2
        if made != embeds:
            raise _mismatch(
                f"{name} {grid} makes {made} embeddings, but the placeholder has room for {embeds}"
            )


def bundle(items: Sequence[Features], fields: Mapping[Modality, FieldNames]) -> dict[str, Any]:
    """The media arguments of ``Engine.async_generate``: one dict a modality, as it demands.

    Args:
        items: in prompt order within a modality.
        fields: of the model's family.
    """
    arguments: dict[str, Any] = {}
    for modality in MODALITIES:
        group = [item for item in items if item.modality == modality]
        if not group:
            continue
        names = fields[modality]
        data: dict[str, Any] = {
            "format": "processor_output",
            # Embeddings of no kind are an image's.
            "modality": modality,
            # All of one kind: SGLang takes no embeddings beside pixels.
            "precomputed_embeddings" if group[0].encoded else names.pixels: _joined(
                [item.pixels for item in group]
            ),
            names.grid: _joined([item.grid for item in group]),
        }
        for name in names.scalars:
            data[name] = torch.tensor([item.scalars[name] for item in group])
        arguments[f"{modality}_data"] = [data]
    return arguments


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _tensor(name: str, data: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise _mismatch(f"{name} is a tensor, got {type(data).__name__}")
    return data


def _mismatch(message: str) -> InvalidTransferError:
    return InvalidTransferError(message, reason="invalid_type")
