"""The buffer pool: what it keeps, and when it gives it out again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynamo_worker_ext.transfer.buffers import BufferPool, size_class

MB = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_lease_is_writable_and_as_long_as_asked() -> None:
    view = BufferPool(MB).lease(5000)
    view[:] = b"x" * 5000
    assert (view.nbytes, view.readonly, view.format) == (5000, False, "B")


def test_a_dropped_buffer_is_used_again() -> None:
    pool = BufferPool(MB)
    view = pool.lease(10_000)
    first = address(view)
    del view
    assert address(pool.lease(9_000)) == first
    pool.check()


def test_a_held_buffer_is_not_used_again() -> None:
    pool = BufferPool(MB)
    views = [pool.lease(10_000) for _ in range(8)]
    assert len({address(view) for view in views}) == 8
    assert pool.statistics()[:2] == (0, 8)
    pool.check()


def test_whoever_holds_anything_over_a_buffer_holds_the_buffer() -> None:
    torch = pytest.importorskip("torch")
    makers: dict[str, Callable[[memoryview], Any]] = {
        "slice": lambda view: view[10:20],
        "cast": lambda view: view.cast("I"),
        "tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8),
        "tensor of a slice": lambda view: torch.frombuffer(view[8:], dtype=torch.uint8),
        "view of a tensor": lambda view: torch.frombuffer(view, dtype=torch.float32)[3:].view(-1),
        "array": lambda view: np.frombuffer(view, np.uint8),
        "view of an array": lambda view: np.frombuffer(view, np.uint8)[5:].view(np.int8),
        "asarray": lambda view: np.asarray(view)[1:],
        "tensor of an array": lambda view: torch.from_numpy(np.frombuffer(view, np.uint8)[3:]),
    }
    for name, make in makers.items():
        pool = BufferPool(MB)
        view = pool.lease(4000)
        holder = make(view)
        del view
        gc.collect()
        assert pool.statistics().leased == 1, name
        pool.check()
        del holder
        assert pool.statistics()[:2] == (1, 0), name
        pool.check()


def test_releasing_a_view_does_not_take_the_memory_from_a_slice() -> None:
    pool = BufferPool(MB)
    view = pool.lease(4000)
    part = view[:10]
    view.release()
    assert pool.statistics().leased == 1
    del part
    assert pool.statistics().leased == 0


@pytest.mark.parametrize("offset", [0, 1, 63, 5000])
def test_an_offset_is_kept_behind_a_page_boundary(offset: int) -> None:
    view = BufferPool(MB).lease(100, offset=offset)
    assert address(view) % 4096 == offset % 4096
    assert view.nbytes == 100


@pytest.mark.parametrize(("nbytes", "offset"), [(0, 0), (-1, 0), (1, -1)])
def test_a_lease_of_nothing_is_refused(nbytes: int, offset: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        BufferPool(MB).lease(nbytes, offset=offset)


def test_a_size_class_wastes_a_quarter_or_a_page_at_most() -> None:
    for nbytes in [*range(1, 70_000, 7), *(2**k + d for k in range(16, 40) for d in (-1, 0, 1))]:
        capacity = size_class(nbytes)
        assert nbytes <= capacity
        assert capacity % 4096 == 0
        assert capacity - nbytes < max(4096, nbytes / 4)
        assert size_class(capacity) == capacity


def test_what_does_not_fit_is_given_up_the_longest_unused_first() -> None:
    pool = BufferPool(3 * 65_536)
    views = [pool.lease(65_536) for _ in range(5)]
    addresses = [address(view) for view in views]
    while views:
        del views[0]
    pool.check()
    assert pool.statistics() == (3, 0, 3 * 65_536, 3 * 65_536)
    again = [pool.lease(65_536) for _ in range(3)]
    assert [address(view) for view in again] == addresses[:1:-1]


def test_a_buffer_of_another_size_makes_room_for_what_is_in_use_now() -> None:
    pool = BufferPool(MB)
    for _ in range(3):
        assert len([pool.lease(MB // 4) for _ in range(4)]) == 4  # and drops them
    view = pool.lease(MB)
    del view
    assert pool.statistics() == (1, 0, MB, MB)
    pool.check()


def test_a_buffer_larger_than_the_bound_is_leased_but_not_kept() -> None:
    pool = BufferPool(4096)
    view = pool.lease(3 * MB)
    assert pool.statistics().bytes >= 3 * MB
    del view
    assert pool.statistics() == (0, 0, 0, 0)


def test_a_pool_says_whether_it_has_used_memory() -> None:
    pool = BufferPool(MB)
    assert not pool.is_warm([5000])
    view = pool.lease(5000)
    assert not pool.is_warm([5000])
    del view
    assert pool.is_warm([5000])
    assert pool.is_warm([5001]), "the same size class"
    assert not pool.is_warm([5000, 5000])
    assert not pool.is_warm([50_000])
    assert pool.is_warm([])


def test_a_pool_that_is_not_whole_says_so() -> None:
    pool = BufferPool(MB)
    view = pool.lease(100)
    [slab] = pool._leased.values()
    assert slab.lease is not None
    pool._returning.append(slab.lease)
    with pytest.raises(RuntimeError, match="a free buffer is still held"):
        pool.check()
    del view


def test_threads_share_a_pool() -> None:
    pool = BufferPool(MB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for at in range(300):
            view = pool.lease(1000 + 97 * ((mark + at) % 40))
            view[:] = bytes([mark]) * view.nbytes
            if bytes(view) != bytes([mark]) * view.nbytes:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pool.check()
    assert pool.statistics().leased == 0
