"""What this process has open, for tests that nothing stays open."""

from __future__ import annotations

import os


def descriptors() -> set[str]:
    """Descriptors of this process by number and target."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return found
