"""A worker that shares no memory with the frontends, as one in another container."""

from __future__ import annotations

import secrets
import subprocess

import pytest

from tests.stack import Stack


def private_shm(size: str) -> list[str]:
    """Runs a command with an empty ``/dev/shm`` of its own; skips a test where that cannot be."""
    tried = subprocess.run([*_in_namespace("1m"), "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespaces here: {tried.stderr.decode().strip()}")
    return _in_namespace(size)


def _in_namespace(size: str) -> list[str]:
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "-m", "bash", "-c", mount, "--"]


def prefix_held_by(stack: Stack, worker: int) -> str:
    """A text whose blocks one worker holds, so that routers send what begins with it there."""
    for attempt in range(40):
        text = f"{attempt} {secrets.token_hex(4)} " + "one two three four five six seven " * 10
        if stack.ask("rust", text).worker == worker:
            return text
    raise AssertionError(f"no request came to worker {worker}")
