"""The arena: parts that come back by themselves and are joined again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_worker_ext.transfer.nixl_arena import Arena

PAGE = 4096


def test_a_part_comes_back_with_the_last_view_of_it() -> None:
    arena = Arena(PAGE)
    part = arena.lease(100)
    assert part is not None
    view = part[10:].data[5:]
    del part
    assert arena.statistics().leased == 1
    del view
    assert arena.statistics() == (PAGE, PAGE, PAGE, 0)
    arena.check()


def test_there_is_no_room_for_more_than_there_is() -> None:
    arena = Arena(2 * PAGE)
    assert arena.lease(2 * PAGE + 1) is None
    first = arena.lease(PAGE + 1)
    assert arena.lease(PAGE) is None
    del first
    assert arena.lease(2 * PAGE) is not None


def test_a_part_is_aligned_and_inside() -> None:
    arena = Arena(PAGE)
    parts = [arena.lease(1), arena.lease(65), arena.lease(64)]
    addresses = [part.ctypes.data for part in parts if part is not None]
    assert [address - arena.address for address in addresses] == [0, 64, 192]


def test_free_parts_are_joined_whatever_the_order() -> None:
    arena = Arena(PAGE)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [0, 2, 1, 3]):
        parts = {at: arena.lease(PAGE // 4) for at in range(4)}
        for at in order:
            del parts[at]
            arena.check()
        whole = arena.lease(PAGE)
        assert whole is not None
        del whole


def test_an_arena_that_is_not_whole_says_so() -> None:
    arena = Arena(PAGE)
    arena._free = [(64, PAGE - 64)]
    with pytest.raises(RuntimeError, match="not whole"):
        arena.check()


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_no_two_parts_share_a_byte(seed: int) -> None:
    dice = random.Random(seed)
    arena = Arena(8 * PAGE)
    held: list[tuple[int, object]] = []
    for step in range(60):
        if held and dice.random() < 0.45:
            mark, part = held.pop(dice.randrange(len(held)))
            assert (part == mark).all()  # type: ignore[attr-defined]
            del part
        elif (lease := arena.lease(dice.choice([1, 64, 100, 3000, 9000]))) is not None:
            lease[:] = step
            held.append((step, lease))
        arena.check()
    del lease
    held.clear()
    assert arena.statistics().leased == 0
