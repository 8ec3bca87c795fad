"""The file in which a client sends embeddings of one image, and what a model takes of it.

It is a safetensors file: numbers with a JSON header, nothing that could be run. It holds

    image_embeds     [tokens, width], in the model's dtype
    image_grid_thw   [3] or [1, 3], int64: time, height and width in patches; for models with grids

and nothing else. Engines trust what they are given: a shape or grid that does not fit ends their
core for everybody, so all of it is checked here, and the file's size before anything is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from dynamo_worker_ext.errors import RequestError
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.wire import Embeddings
from dynamo_worker_ext.wire.encoded import MAX_TOKENS

if TYPE_CHECKING:
    import torch

EMBEDS: Final = "image_embeds"
GRID: Final = "image_grid_thw"

#: Of two tensors, with room for a few words of metadata.
_MAX_HEADER: Final = 16 << 10

#: What safetensors calls the types that models have.
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class EmbeddingsForm:
    """What embeddings of an image one model takes.

    Attributes:
        token: stands for an image in the prompt, and then for each of its embeddings.
        width: numbers of one embedding, deep-stack layers included.
        dtype: of the model, as torch names it.
        merge: patches of a side that become one token; None for a model without grids.
        tokens: embeddings of every image, where a model has one number for all; else None.
    """

    token: int
    width: int
    dtype: str
    merge: int | None
    tokens: int | None = None


def read_embeddings(data: bytes, form: EmbeddingsForm) -> tuple[Embeddings, KwargsItem]:
    """Check a client's file. Takes a millisecond for each MB; may be called on any thread.

    Args:
        data: the file.
        form: of the model that it is for.

    Returns:
        What it holds, and its tensors as an encode worker sends them.

    Raises:
        RequestError: it is no safetensors file, or holds what this model does not take.
    """
    from safetensors import SafetensorError, deserialize

    header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > len(data) - 8:
        raise _refused("a safetensors file was expected; this is none, or it was cut short")
    if header > _MAX_HEADER:
        raise _refused(f"the file's header has {header} bytes; at most {_MAX_HEADER} are taken")
    try:
        found: dict[str, dict[str, Any]] = dict(deserialize(data))
    except SafetensorError as error:
        raise _refused(f"not a safetensors file: {str(error)[:200]}") from None
    wanted = {EMBEDS} if form.merge is None else {EMBEDS, GRID}
    if found.keys() != wanted:
        names = [name[:80] for name in sorted(found)[:8]]
        raise _refused(f"the file holds {sorted(wanted)} for this model, got {names}")
    told = _told(found[EMBEDS], form)
    grid = None
    if form.merge is not None:
        grid = _grid(found[GRID], told[0], form.merge)
    return Embeddings(told, form.dtype, grid), _item(found[EMBEDS]["data"], told, grid, form)


def _told(tensor: Mapping[str, Any], form: EmbeddingsForm) -> tuple[int, int]:
    """The shape of embeddings, checked."""
    dtype, shape = tensor["dtype"], tensor["shape"]
    if _DTYPES.get(dtype) != form.dtype:
        raise _refused(f"{EMBEDS} is {form.dtype} for this model, got {dtype}")
    tokens = shape[0] if shape else 0
    if shape != [tokens, form.width] or not 0 < tokens <= MAX_TOKENS:
        raise _refused(f"{EMBEDS} has the shape [tokens, {form.width}] for this model, got {shape}")
    if form.tokens is not None and tokens != form.tokens:
        raise _refused(f"{EMBEDS} has {form.tokens} tokens for this model, got {tokens}")
    return tokens, form.width


def _grid(tensor: Mapping[str, Any], tokens: int, merge: int) -> tuple[int, int, int]:
    """A grid that makes so many tokens."""
    dtype, shape = tensor["dtype"], tensor["shape"]
    if dtype != "I64" or shape not in ([3], [1, 3]):
        raise _refused(f"{GRID} is I64 of shape [3] or [1, 3], got {dtype} of shape {shape}")
    numbers = tensor["data"]
    sides = [int.from_bytes(numbers[i : i + 8], "little", signed=True) for i in (0, 8, 16)]
    time, height, width = sides
    if time != 1 or min(height, width) < 1 or height % merge or width % merge:
        raise _refused(
            f"{GRID} is [1, height, width] with sides that are multiples of {merge}, got {sides}"
        )
    if prod(sides) != tokens * merge**2:
        raise _refused(
            f"{GRID} {sides} makes {prod(sides) // merge**2} embeddings, got {tokens} of them"
        )
    return time, height, width


def _item(
    numbers: bytearray,
    shape: tuple[int, int],
    grid: tuple[int, int, int] | None,
    form: EmbeddingsForm,
) -> KwargsItem:
    import torch

    embeds: torch.Tensor = torch.frombuffer(numbers, dtype=getattr(torch, form.dtype))
    if not embeds.isfinite().all():
        # It would stay in memory that other requests' attention reads past its masks.
        raise _refused(f"{EMBEDS} holds numbers that are not finite")
    fields = {
        EMBEDS: KwargsField(
            embeds.reshape(shape), "flat", {"slices": [slice(0, shape[0])], "dim": 0}
        )
    }
    if grid is not None:
        fields[GRID] = KwargsField(
            torch.tensor(grid, dtype=torch.int64), "batched", {"keep_on_cpu": True}
        )
    return KwargsItem(fields)


def _refused(message: str) -> RequestError:
    return RequestError(f"embeddings of an image: {message}")
