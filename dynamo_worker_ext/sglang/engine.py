"""Starting and stopping ``sglang.Engine`` so that nothing of it is left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.server_args import PortArgs

from dynamo_worker_ext.errors import StartupError


def launch(server_args: Any) -> Any:
    """The running engine.

    Raises:
        StartupError: it did not start; nothing of it is left.
    """
    made: list[Any] = []
    init = PortArgs.init_new

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(init(*args, **kwargs))
        return made[-1]

    # An engine that does not start tells nobody what it has called its shared memory.
    PortArgs.init_new = staticmethod(noted)
    try:
        return sglang.Engine(server_args=server_args)
    except (ValueError, RuntimeError, OSError) as error:
        for ports in made:
            _remove_loads(ports)
        raise StartupError(f"SGLang did not start: {error}") from error
    finally:
        PortArgs.init_new = staticmethod(init)


def shut_down(engine: Any) -> None:
    """Stop the engine's processes."""
    engine.shutdown()
    _remove_loads(engine.port_args)
    # Media on its way to a scheduler that died; the names say that this process has made them.
    folder = Path("/dev/shm")  # noqa: S108 - where SGLang puts them
    for segment in folder.glob(f"sgl_shm_*_{os.getpid()}_*"):
        segment.unlink(missing_ok=True)


def _remove_loads(ports: Any) -> None:
    """Remove the shared memory that SGLang 0.5.21 leaves behind."""
    with suppress(FileNotFoundError):
        os.unlink(shm_path_for(ports.instance_id))
