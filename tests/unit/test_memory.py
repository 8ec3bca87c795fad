"""Freed memory that stays: in processes of their own, as it is for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Blocks as large as a photo's tensors, touched and freed; what is printed is page faults a block.
PROGRAM = """
import ctypes, resource, sys, threading
from dynamo_worker_ext.worker.memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = libc.free.argtypes = [ctypes.c_size_t]

def touch(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        block = libc.malloc(25 << 20)
        ctypes.memset(block, 1, 25 << 20)
        libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // count

touch(2)
seen = [touch(5)]
thread = threading.Thread(target=lambda: seen.append(touch(5)))
thread.start()
thread.join()
print(kept, *seen)
"""


def run(how: str, **environment: str) -> tuple[str, int, int]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        check=True, capture_output=True, text=True, env={**plain, **environment},
    ).stdout.split()  # fmt: skip
    return answer[0], int(answer[1]), int(answer[2])


def test_freed_blocks_are_used_again_in_all_threads() -> None:
    kept, *faults = run("keep")
    assert kept == "True"
    assert max(faults) < 100
    assert run("as it is")[2] > 1_000  # of 6,400 pages, in a thread: or the test shows nothing


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_operator_has_set_stays(name: str) -> None:
    value = "glibc.malloc.arena_max=2" if name == "GLIBC_TUNABLES" else "2"
    assert run("keep", **{name: value})[0] == "False"
