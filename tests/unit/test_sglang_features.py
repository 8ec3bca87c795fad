"""Received items as SGLang's features, and the cache of them. Needs torch, not SGLang."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.sglang.cache import FeatureCache
from dynamo_worker_ext.sglang.features import FeatureReader, Features, bundle
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.wire import Embeddings, MediaItem, Placeholder
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
VALUES = 3 * 2 * 14 * 14
WIDTH = 24


def reader(model_type: str = "qwen2_5_vl", dtype: Any = torch.float32) -> FeatureReader:
    return FeatureReader(
        model_type, patch_values=VALUES, merge=2, width=WIDTH, dtype=dtype, mean=MEAN, std=STD
    )


def item(length: int = 2, modality: Any = "image") -> MediaItem:
    return MediaItem(modality, "ab" * 8, Placeholder(3, length))


def payload(**fields: Any) -> KwargsItem:
    given = {
        "pixel_values": torch.randint(0, 255, (8, VALUES), dtype=torch.uint8),
        "image_grid_thw": torch.tensor([1, 2, 4]),
        **fields,
    }
    return KwargsItem({n: KwargsField(v, "batched", {}) for n, v in given.items() if v is not None})


def test_bytes_are_normalised_as_transformers_does() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(image_mean=MEAN, image_std=STD)
    picture = torch.randint(0, 255, (3, 28, 56), dtype=torch.uint8)
    options = {"do_resize": False, "return_tensors": "pt"}
    whole = processor(picture, **options)
    plain = processor(picture, do_rescale=False, do_normalize=False, **options)
    features = reader().read(item(), payload(pixel_values=plain.pixel_values.to(torch.uint8)))
    made = reader().normalised(features, [9, 9])
    assert torch.equal(made.pixels, whole.pixel_values)
    assert made.tokens == (9, 9)
    assert made.grid.tolist() == [[1, 2, 4]]


def test_floats_take_the_models_dtype_in_memory_of_their_own() -> None:
    pixels = torch.rand(8, VALUES)
    read = reader(dtype=torch.bfloat16)
    made = read.normalised(read.read(item(), payload(pixel_values=pixels)), [1, 1])
    assert made.pixels.dtype == torch.bfloat16
    same = reader()
    kept = same.normalised(same.read(item(), payload(pixel_values=pixels)), [1, 1])
    assert kept.pixels.data_ptr() != pixels.data_ptr()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"image_grid_thw": None}, "fields"),
        ({"other": torch.tensor(1)}, "fields"),
        ({"image_grid_thw": torch.tensor([1, 2, 2])}, "shape"),
        ({"image_grid_thw": torch.tensor([1, 2, 4], dtype=torch.int32)}, "int64"),
        ({"image_grid_thw": torch.tensor([1, 2])}, "three"),
        ({"image_grid_thw": torch.tensor([1, -2, -4])}, "is"),
        ({"image_grid_thw": torch.tensor([1, 2**40, 4])}, "is"),
        ({"image_grid_thw": torch.tensor([1, 1, 8])}, "multiples"),
        ({"image_grid_thw": [1, 2, 4]}, "tensor"),
        ({"pixel_values": torch.zeros(8, 5)}, "shape"),
        ({"pixel_values": torch.zeros(8, VALUES, dtype=torch.int64)}, "uint8 or floating"),
        ({"pixel_values": [1.0]}, "tensor"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidTransferError, match=says) as caught:
        reader().read(item(), payload(**fields))
    assert caught.value.reason == "invalid_type"


def test_what_clients_may_send_is_of_the_models_own_width_and_dtype() -> None:
    form = reader(dtype=torch.bfloat16).embeddings_form(9)
    assert form == EmbeddingsForm(token=9, width=WIDTH, dtype="bfloat16", merge=2)


def test_the_placeholder_has_room_for_exactly_what_the_grid_makes() -> None:
    reader().read(item(2), payload())
    for length in (1, 3):
        with pytest.raises(InvalidTransferError, match="room"):
            reader().read(item(length), payload())
    masked = Placeholder(3, 4, (True, False, True, False))
    reader().read(MediaItem("image", "ab" * 8, masked), payload())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 10), (10, 4)])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (1, 0), (5, 3)])
def test_positions_are_those_of_the_model(
    family: str, height: int, width: int, before: int, behind: int
) -> None:
    count = height * width // 4
    kinds = torch.tensor([[0] * before + [1] * count + [0] * behind])
    grid = torch.tensor([[1, height, width]])
    expected, delta = model(family).get_rope_index(kinds, kinds, image_grid_thw=grid)
    image = Features("image", torch.empty(0), grid, (), {})
    made = reader(family).positions(kinds.shape[1], before, image)
    assert torch.equal(made["mrope_positions"], expected.squeeze(1))
    assert torch.equal(made["mrope_position_delta"], delta)


def test_positions_of_an_image_of_several_frames_are_left_to_the_engine() -> None:
    image = Features("image", torch.empty(0), torch.tensor([[2, 4, 4]]), (), {})
    assert reader().positions(16, 0, image) == {}


@cache
def model(family: str) -> Any:
    """The family's own model, without weights."""
    config = AutoConfig.for_model(family)
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    with torch.device("meta"):
        return AutoModel.from_config(config)


def test_unknown_modalities_are_refused() -> None:
    with pytest.raises(InvalidTransferError, match="audio"):
        reader().read(item(modality="audio"), payload())


def test_videos_of_each_family() -> None:
    video = {
        "pixel_values": None,
        "image_grid_thw": None,
        "pixel_values_videos": torch.zeros(8, VALUES),
        "video_grid_thw": torch.tensor([1, 2, 4]),
    }
    where = item(modality="video")
    read = reader("qwen2_vl")
    assert bundle([read.read(where, payload(**video))], read.fields).keys() == {"video_data"}
    read = reader("qwen2_5_vl")
    seconds = torch.tensor(0.5, dtype=torch.bfloat16)
    made = read.read(where, payload(**video, second_per_grid_ts=seconds))
    (data,) = bundle([made], read.fields)["video_data"]
    assert data["second_per_grid_ts"].tolist() == [0.5]
    with pytest.raises(InvalidTransferError, match="finite"):
        read.read(where, payload(**video, second_per_grid_ts=torch.tensor(float("nan"))))
    reader("qwen3_vl").read(where, payload(**video, timestamps=[0.0]))


def test_several_items_are_one_dict_a_modality() -> None:
    read = reader()
    items = [
        read.read(item(2), payload()),
        read.read(
            item(1),
            payload(
                pixel_values=torch.zeros(4, VALUES, dtype=torch.uint8),
                image_grid_thw=torch.tensor([1, 2, 2]),
            ),
        ),
    ]
    (data,) = bundle(items, read.fields)["image_data"]
    assert data["format"] == "processor_output"
    assert data["pixel_values"].shape == (12, VALUES)
    assert data["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2]]


def encoded(**told: Any) -> MediaItem:
    """An item of an encode worker, as its handle describes it."""
    says = {"shape": (2, WIDTH), "dtype": "bfloat16", "grid": (1, 2, 4), **told}
    return MediaItem("image", "ab" * 8, Placeholder(3, 2), Embeddings(**says))


def embeddings(**fields: Any) -> KwargsItem:
    given = {
        "image_embeds": torch.rand(2, WIDTH, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([1, 2, 4]),
        **fields,
    }
    return KwargsItem({n: KwargsField(v, "batched", {}) for n, v in given.items() if v is not None})


def test_embeddings_go_where_pixels_would() -> None:
    read, payload = reader(dtype=torch.bfloat16), embeddings()
    made = read.normalised(read.read(encoded(), payload), [9, 9])
    (data,) = bundle([made, made], read.fields)["image_data"]
    given = payload.fields["image_embeds"].data
    assert torch.equal(data["precomputed_embeddings"], torch.cat([given, given]))
    assert data["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]
    assert "pixel_values" not in data


@pytest.mark.parametrize(
    ("told", "fields", "says"),
    [
        ({}, {"image_embeds": None}, "fields"),
        ({}, {"pixel_values": torch.zeros(1)}, "fields"),
        ({}, {"image_embeds": torch.zeros(2, WIDTH)}, "by its handle"),
        ({}, {"image_embeds": torch.zeros(3, WIDTH, dtype=torch.bfloat16)}, "by its handle"),
        ({}, {"image_embeds": [1.0]}, "tensor"),
        ({"grid": (1, 4, 2)}, {}, "by its handle"),
        ({"grid": None}, {}, "by its handle"),
        (
            {"shape": (2, WIDTH + 1)},
            {"image_embeds": torch.zeros(2, WIDTH + 1, dtype=torch.bfloat16)},
            "has shape",
        ),
        ({"grid": (1, 2, 2)}, {"image_grid_thw": torch.tensor([1, 2, 2])}, "room"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(
    told: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidTransferError, match=says) as caught:
        reader().read(encoded(**told), embeddings(**fields))
    assert caught.value.reason == "invalid_type"


def features(nbytes: int) -> Features:
    """An item that counts as `nbytes`."""
    return Features(
        "image", torch.zeros(nbytes - 256, dtype=torch.uint8), torch.tensor([[1, 1, 1]]), (), {}
    )


def test_the_cache_forgets_the_oldest_first() -> None:
    cache = FeatureCache(1000)
    for name in "abc":
        cache.put(("", name), features(300))
    assert cache.get(("", "a")) is not None  # the newest now
    cache.put(("", "d"), features(300))
    assert ("", "b") not in cache
    assert ("", "a") in cache
    assert cache.statistics() == (3, 900)


def test_scopes_are_kept_apart() -> None:
    cache = FeatureCache(1000)
    cache.put(("mine", "a"), features(300))
    assert ("", "a") not in cache
    assert cache.get(("theirs", "a")) is None


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = FeatureCache(0)
    cache.put(("", "a"), features(300))
    assert cache.statistics() == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(256, 700), st.booleans()), max_size=40
    )
)
def test_its_account_is_right(steps: list[tuple[str, int, bool]]) -> None:
    cache = FeatureCache(1500)
    for name, size, drop in steps:
        if drop:
            cache.drop(("", name))
        else:
            cache.put(("", name), features(size))
        held = [cache._entries[key].nbytes for key in cache._entries]
        assert cache.statistics() == (len(held), sum(held))
        assert sum(held) <= 1500
