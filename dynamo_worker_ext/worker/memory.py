"""Memory that a worker has used stays warm."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

#: Larger than the tensors of a photo.
_LARGEST: Final = 32 << 20

#: Freed memory that is kept at most.
_KEPT: Final = 128 << 20


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have glibc keep large blocks that are freed, for the next that are needed.

    By default each large tensor of an image is new memory of the operating system, whose first
    touch costs more than what is done with it (2.7 us for 4 KB), and what a thread has freed is for
    that thread. To be called before there are threads; forked children inherit it.

    Returns:
        Whether it is so now: not with another allocator, and not where the operator has set
        glibc's own variables.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _KEPT}
    return all([mallopt(option, value) == 1 for option, value in wanted.items()])
