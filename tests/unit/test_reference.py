"""What is let in: items that look like those that the model's own processor makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.vllm.reference import FieldReference, ItemReference

REFERENCE = ItemReference(
    fields={
        "pixel_values": FieldReference("flat", torch.uint8, (None, 1176)),
        "image_grid_thw": FieldReference("batched", torch.int64, (3,)),
    },
    merge=2,
)
PLACE = wire.MediaItem("image", "a" * 64, wire.Placeholder(0, 4))


def payload(**changes: Any) -> KwargsItem:
    fields: dict[str, KwargsField] = {
        "pixel_values": KwargsField(torch.zeros(16, 1176, dtype=torch.uint8), "flat", {}),
        "image_grid_thw": KwargsField(torch.tensor([1, 4, 4]), "batched", {}),
    }
    for name, (data, kind) in changes.items():
        if data is None:
            del fields[name]
        else:
            fields[name] = KwargsField(data, kind, {})
    return KwargsItem(fields)


def test_an_item_like_the_models_own_is_let_in() -> None:
    REFERENCE.check(payload(), PLACE)


@pytest.mark.parametrize(
    "changes",
    [
        {"pixel_values": (None, "")},
        {"extra": (torch.zeros(1), "batched")},
        {"pixel_values": (torch.zeros(16, 1176, dtype=torch.uint8), "batched")},
        {"pixel_values": (torch.zeros(16, 1176), "flat")},
        {"pixel_values": (torch.zeros(16, 1175, dtype=torch.uint8), "flat")},
        {"pixel_values": (torch.zeros(16, 1, 1176, dtype=torch.uint8), "flat")},
        {"pixel_values": (torch.zeros(15, 1176, dtype=torch.uint8), "flat")},
        {"pixel_values": ([torch.zeros(1)], "flat")},
        {"pixel_values": (7, "flat")},
        {"image_grid_thw": (torch.tensor([1, 4, 5]), "batched")},
        {"image_grid_thw": (torch.tensor([1, -4, -4]), "batched")},
        {"image_grid_thw": (torch.tensor([4, 2, 2]), "batched")},
        {"image_grid_thw": (torch.tensor([1, 1, 16]), "batched")},
        {"image_grid_thw": (torch.tensor([0, 4, 4]), "batched")},
        {"image_grid_thw": (torch.tensor([2**40, 4, 4]), "batched")},
        {"image_grid_thw": (torch.tensor([1, 4]), "batched")},
        {"image_grid_thw": (torch.tensor([1.0, 4.0, 4.0]), "batched")},
    ],
)
def test_an_item_that_would_end_the_engine_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidTransferError) as caught:
        REFERENCE.check(payload(**changes), PLACE)
    assert caught.value.reason == "invalid_type"


def test_an_item_that_does_not_fill_its_placeholder_is_refused() -> None:
    small = wire.MediaItem("image", "a" * 64, wire.Placeholder(0, 3))
    with pytest.raises(InvalidTransferError, match="placeholder"):
        REFERENCE.check(payload(), small)


def test_an_item_that_would_be_joined_in_another_way_is_refused() -> None:
    for options in ({"dim": 7}, {"keep_on_cpu": True}):
        item = payload()
        fields = dict(item.fields)
        pixels = fields["pixel_values"]
        fields["pixel_values"] = KwargsField(pixels.data, pixels.kind, options)
        with pytest.raises(InvalidTransferError, match=next(iter(options))):
            REFERENCE.check(KwargsItem(fields), PLACE)


def test_an_item_of_a_model_without_grids_has_a_known_number_of_embeddings() -> None:
    reference = ItemReference({"x": FieldReference("batched", torch.float32, (2,))}, None, 4)
    item = KwargsItem({"x": KwargsField(torch.zeros(2), "batched", {})})
    reference.check(item, PLACE)
    with pytest.raises(InvalidTransferError, match="placeholder"):
        reference.check(item, wire.MediaItem("image", "a" * 64, wire.Placeholder(0, 5)))


def test_a_mask_says_how_many_embeddings_fit() -> None:
    masked = wire.Placeholder(0, 6, (False, True, True, True, True, False))
    REFERENCE.check(payload(), wire.MediaItem("image", "a" * 64, masked))


def test_floats_of_another_width_are_let_in() -> None:
    reference = ItemReference({"x": FieldReference("batched", torch.bfloat16, (2,))}, None)
    item = KwargsItem({"x": KwargsField(torch.zeros(2), "batched", {})})
    reference.check(item, PLACE)
