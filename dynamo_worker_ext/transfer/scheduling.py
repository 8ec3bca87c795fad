"""Threads that copy for milliseconds let the event loop have a core when it wakes up."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from typing import Final

# Linux's `struct sched_attr` (include/uapi/linux/sched/types.h) as it was first: size, policy,
# flags, nice, priority, runtime, deadline, period.
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")

#: Number of the system call, for which glibc has no function before 2.41.
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}

#: How long such a thread asks to run without a break, in nanoseconds: longer than others, which
#: ask for 3 ms at most.
_SLICE_NS: Final = 4_000_000


def give_way() -> None:
    """Have the calling thread, and those that it starts, interrupt no other and be interrupted.

    An event loop that wakes up on the core of such a thread would wait for the next tick, up to
    4 ms, even beside a core that is free. Now it goes first; the price is that, where none is free,
    a copy may begin some milliseconds later. The thread's share of the cores stays what it was.
    ``SCHED_BATCH`` does one half; the other, a longer slice, needs Linux 6.12. Where the system
    does not allow it, or the operator chose another policy, nothing changes.
    """
    with suppress(OSError):
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if (number := _SCHED_SETATTR.get(platform.machine())) is not None:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            attributes = _ATTRIBUTES.pack(
                _ATTRIBUTES.size, os.SCHED_BATCH, 0, nice, 0, _SLICE_NS, 0, 0
            )
            # Its failure is no harm: the policy is set, and older systems have no slices.
            ctypes.CDLL(None).syscall(number, 0, attributes, 0)
