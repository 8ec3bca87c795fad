"""Where an engine publishes and where a subscriber finds it.

Both engines decide by the spelling of the endpoint whether their PUB socket binds or connects:
it binds where there is a ``*`` or ``::`` in it, and for ``ipc://`` and ``inproc://``; otherwise it
connects, nobody listens, and every event is lost without a word.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.transfer import owner

_PREFIX: Final = "dwe-kv-"

_ADVICE: Final = (
    "use tcp://*:PORT, or leave the endpoint out and the worker makes a private ipc:// one"
)

#: sun_path holds 108 bytes with its final NUL.
_MAX_IPC_PATH: Final = 107


class PrivateEndpoint(NamedTuple):
    """An endpoint that only this user can reach.

    Attributes:
        endpoint: for the engine and for the subscriber alike.
        cleanup: removes it; may be called more than once, and after the engine is gone.
    """

    endpoint: str
    cleanup: Callable[[], None]


def private_endpoint() -> PrivateEndpoint:
    """Make an ``ipc://`` endpoint in a directory of its own with mode 0700.

    Removes what workers of this user left behind when they were killed.

    For one engine, data-parallel rank 0: vLLM 0.31 refuses ``ipc://`` for the other ranks.

    Raises:
        StartupError: the temporary directory's path is too long for a unix socket.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    cleanup = partial(shutil.rmtree, folder, ignore_errors=True)
    _sweep(folder.parent)
    (folder / owner.names(1)[0]).touch(mode=0o600)  # not in its own name: paths are short here
    path = folder / "events"
    if len(str(path).encode()) > _MAX_IPC_PATH:
        cleanup()
        raise StartupError(
            f"{path} is too long for a unix socket (at most {_MAX_IPC_PATH} bytes); "
            "set TMPDIR to a shorter path"
        )
    return PrivateEndpoint(f"ipc://{path}", cleanup)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or swept by somebody else
            mine = folder.lstat().st_uid == os.geteuid()
            if mine and any(map(owner.is_abandoned, os.listdir(folder))):
                shutil.rmtree(folder)


def engine_endpoint(pub_endpoint: str, dp_rank: int = 0) -> str:
    """The endpoint to which a subscriber on the same host connects.

    Args:
        pub_endpoint: what the engine was configured with (``kv_events_config.endpoint`` or
            ``.replay_endpoint``).
        dp_rank: the engine adds it to a TCP port.

    Raises:
        StartupError: the engine would not listen there, or not where it can be known.
    """
    scheme, sep, address = pub_endpoint.partition("://")
    if not sep or not address:
        raise StartupError(f"KV event endpoint {pub_endpoint!r} is not SCHEME://ADDRESS; {_ADVICE}")
    if scheme == "ipc":
        if dp_rank:
            raise StartupError(
                f"KV event endpoint {pub_endpoint!r}: the engine takes ipc:// for data-parallel "
                f"rank 0 only, and this is rank {dp_rank}; use tcp://*:PORT"
            )
        return pub_endpoint
    if scheme != "tcp":
        raise StartupError(
            f"KV event endpoint {pub_endpoint!r} cannot be reached from outside the engine "
            f"process; {_ADVICE}"
        )
    if "*" not in address and "::" not in address:
        raise StartupError(
            f"KV event endpoint {pub_endpoint!r}: the engine would connect to it, not listen, "
            f"and lose every event; {_ADVICE}"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) + dp_rank <= 65535 or int(port) == 0:
        raise StartupError(
            f"KV event endpoint {pub_endpoint!r} needs a port from 1 to 65535, not chosen by the "
            f"system; {_ADVICE}"
        )
    host = {"*": "127.0.0.1", "[::]": "[::1]", "::": "[::1]", "[*]": "[::1]"}.get(host, host)
    return f"tcp://{host}:{int(port) + dp_rank}"
