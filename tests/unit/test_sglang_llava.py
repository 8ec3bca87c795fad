"""LLaVA's form, as far as it needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamo_worker_ext.sglang.llava import LlavaForm

IMAGE = 9


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "architectures": ["LlavaQwenForCausalLM"],
        "image_token_index": IMAGE,
        "image_aspect_ratio": "pad",
        "vision_config": SimpleNamespace(image_size=56, patch_size=14),
    }
    return SimpleNamespace(**(values | changes))


def form(**changes: Any) -> LlavaForm:
    found = LlavaForm.of(config(**changes))
    assert found is not None
    return found


def test_an_image_of_one_tile_is_its_patches() -> None:
    assert form().expand([1, IMAGE, 2]) == [1, *[IMAGE] * 16, 2]


@pytest.mark.parametrize("changes", [{"image_aspect_ratio": "anyres"}, {"vision_config": None}])
def test_what_is_not_known_to_be_one_tile_is_left_as_it_is(changes: dict[str, Any]) -> None:
    assert form(**changes).expand([1, IMAGE, 2]) == [1, IMAGE, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlavaForConditionalGeneration"]},
        {"architectures": None},
        {"image_token_index": None},
    ],
)
def test_another_form_is_told_from_it(changes: dict[str, Any]) -> None:
    assert form().token == IMAGE
    assert LlavaForm.of(config(**changes)) is None


def test_an_item_is_kept_as_the_engine_takes_it_again() -> None:
    feature = np.ones((1, 3, 56, 56), np.float16)
    more = {"image_sizes": [(40, 30)], "image_aspect_ratio": "pad", "other": 1}
    image = form().image(SimpleNamespace(feature=feature, model_specific_data=more))
    assert image is not None
    assert image.tokens == (IMAGE,)
    assert image.nbytes >= feature.nbytes
    argument = image.argument()
    assert argument == {
        "feature": feature,
        "image_sizes": [(40, 30)],
        "image_aspect_ratio": "pad",
    }
    argument["hash"] = 1  # of one request
    assert "hash" not in image.argument()


def test_an_item_of_another_form_is_not_kept() -> None:
    item = SimpleNamespace(feature=np.ones(3), model_specific_data={"image_grid_thw": 1})
    assert form().image(item) is None
