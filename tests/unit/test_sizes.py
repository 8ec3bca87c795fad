"""An identity stands for one item, of one size."""

from __future__ import annotations

import pytest

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.worker.sizes import ItemSizes, Size


def transfer(*items: wire.MediaItem) -> wire.Transfer:
    return wire.Transfer([0] * 64, items, {})


def image(mm_hash: str, length: int, mask: tuple[bool, ...] | None = None) -> wire.MediaItem:
    return wire.MediaItem("image", mm_hash, wire.Placeholder(0, length, mask))


def test_an_item_with_another_room_or_modality_is_refused() -> None:
    sizes = ItemSizes()
    sizes.enter("a", Size("image", 4))
    sizes.check(transfer(image("a", 4), image("b", 9)))
    sizes.check(transfer(image("a", 6, (False, True, True, True, True, False))))
    video = wire.MediaItem("video", "a", wire.Placeholder(0, 4))
    for wrong in (image("a", 5), video):
        with pytest.raises(InvalidTransferError) as caught:
            sizes.check(transfer(wrong))
        assert caught.value.reason == "invalid_placeholder"


def test_one_item_twice_in_a_request_has_one_size() -> None:
    sizes = ItemSizes()
    sizes.check(transfer(image("a", 4), image("a", 4)))
    with pytest.raises(InvalidTransferError, match="known as image of 4"):
        sizes.check(transfer(image("a", 4), image("a", 5)))
    assert "a" not in sizes  # what was merely claimed is not remembered


def test_those_used_last_are_remembered() -> None:
    sizes = ItemSizes(capacity=2)
    for mm_hash in ("a", "b", "a", "c"):
        sizes.enter(mm_hash, Size("image", 4))
    assert "a" in sizes
    assert "b" not in sizes
    assert sizes.differs("a", Size("image", 5))
    assert not sizes.differs("b", Size("image", 5))
