"""The life of a worker's process: start, serve, exit status."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.worker.base import Worker
from dynamo_worker_ext.worker.memory import keep_freed_memory


def serve(
    prog: str,
    make_worker: Callable[[Any], Worker],
    parse_args: Callable[[Sequence[str] | None], Any],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Serve until told to stop, then end the process.

    Exits with 0 after an orderly stop, 2 when it cannot serve as it was started, 1 when the
    engine died.

    Args:
        prog: what errors begin with.
        make_worker: makes the worker of what `parse_args` returned.
        parse_args: of the engine; its result has the SDK's configuration as ``worker``.
        argv: the command line, without the program.
    """
    from dynamo.common.backend.run import run

    keep_freed_memory()
    worker: Worker | None = None

    async def make(_argv: list[str] | None) -> tuple[Worker, object]:
        nonlocal worker
        worker = make_worker(config)
        return worker, config.worker

    try:
        config = parse_args(argv)
        check_system_port()
        run(Worker, engine_factory=make)
    except Exception as error:
        # What `start` raises comes back from the SDK without its type.
        reason = worker.startup_error if worker is not None else None
        if reason is None and not isinstance(error, StartupError):
            raise
        print(f"{prog}: {reason or error}", file=sys.stderr)
        _leave(2)
    _leave(1 if worker is not None and worker.engine_failed else 0)


def _leave(status: int) -> NoReturn:
    """End the process with what is registered for its end, but with the interpreter in place.

    Threads of Dynamo's runtime (1.6.1) may be in Python still, and one that comes back to an
    interpreter which was taken apart ends the process with SIGSEGV.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def check_system_port(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a system port that the runtime would fail on quietly.

    Dynamo 1.6.1 only logs a failed bind, after which frontends reject the worker as incompatible;
    it reads the number as a signed 16-bit integer.

    Raises:
        StartupError: the port is not a number, out of range, or taken.
    """
    text = environ.get("DYN_SYSTEM_PORT", "").strip()
    if text in ("", "-1", "0"):
        return
    host = environ.get("DYN_SYSTEM_HOST", "0.0.0.0")  # noqa: S104 - the runtime's own default
    try:
        port = int(text)
    except ValueError:
        raise StartupError(f"DYN_SYSTEM_PORT is {text!r}; it must be a port number") from None
    if not 0 < port < 2**15:
        raise StartupError(f"DYN_SYSTEM_PORT is {port}; Dynamo takes ports from 1 to {2**15 - 1}")
    check_port(port, host, f"system port {port}", "DYN_SYSTEM_PORT")


def check_port(port: int, host: str, what: str, setting: str) -> None:
    """Refuse a port that somebody else listens on, where the owner would only log it.

    Args:
        port: a TCP port.
        host: the address that it will be bound to.
        what: its name in the message.
        setting: what says which port it is.

    Raises:
        StartupError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise StartupError(
                f"{what} on {host} cannot be had ({getattr(error, 'strerror', error)}); free it "
                f"or set {setting} to another"
            ) from None
