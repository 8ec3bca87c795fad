"""Whose a segment is, so that what a killed sender left behind can be told from everything else.

    dwe_<pid>_<start time>_<identity>_<random>_<index>

Pid and start time, in clock ticks since boot, name a process; the identity stands for the boot and
the pid namespace in which they mean anything.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(r"dwe_(\d{1,10})_(\d{1,20})_([0-9a-f]{8})_[0-9a-f]{12}_\d{1,6}\Z")


def names(count: int) -> list[str]:
    """New names for segments of this process."""
    prefix = f"{_prefix(os.getpid())}_{secrets.token_hex(6)}"
    return [f"{prefix}_{index}" for index in range(count)]


def is_abandoned(name: str) -> bool:
    """Whether a segment's owner would be known here and is not alive.

    False for names of another form, another boot or another pid namespace, and for owners that we
    may not look at: nobody here can tell.
    """
    match = _NAME.match(name)
    if match is None or match[3] != identity():
        return False
    try:
        return start_time(int(match[1])) != int(match[2])
    except PermissionError:  # another user's, where /proc is mounted with hidepid=1
        return False


@lru_cache(maxsize=1)
def _prefix(pid: int) -> str:
    return f"dwe_{pid}_{start_time(pid)}_{identity()}"


def identity() -> str:
    """Equal for processes whose pids mean the same: 8 hex characters."""
    space = os.stat("/proc/self/ns/pid").st_ino
    seen = f"{_BOOT_ID.read_text().strip()}:{space}"
    return hashlib.sha256(seen.encode()).hexdigest()[:8]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none.

    Field 22 of ``/proc/<pid>/stat``.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name before it is in brackets and may itself hold spaces and brackets.
    return int(text.rpartition(")")[2].split()[19])
