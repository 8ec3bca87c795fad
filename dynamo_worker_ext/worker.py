"""What the workers of both engines share: options, lifecycle, errors.

A worker is one ``LLMEngine`` of Dynamo's Backend SDK, which owns discovery, registration,
transport of requests, cancellation and signals. Added here: requests in flight are drained before
the engine stops; a dead engine takes the worker out of discovery; a taken system port is fatal;
our errors become Dynamo's. Lives in the worker process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from dynamo.common.backend.engine import EngineConfig, LLMEngine
from dynamo.common.backend.metrics import register_engine_registry, register_global_registry
from dynamo.common.configuration.utils import add_argument
from dynamo.llm import exceptions as dynamo_errors

from dynamo_worker_ext import transfer
from dynamo_worker_ext.errors import (
    EngineDeadError,
    EngineError,
    MediaLostError,
    RequestError,
    StartupError,
    TransportUnavailableError,
    WorkerExtError,
)
from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.metrics import Metrics, WarnOnceAMinute
from dynamo_worker_ext.transfer import Limits, MmKwargsReceiver

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the engine lives; out of discovery within 2 s is promised.
_WATCH_INTERVAL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Our own command-line options.

    Attributes:
        transports: what pre-processed media is taken over, in order of preference.
        all_transports: whether each of them was asked for by name, so that one that cannot be had
            is an error.
        max_item_bytes: largest payload of one media item.
        transfer_timeout_s: seconds for one request's payloads to arrive.
        hash_mode: how media is identified to the router; None for what this Dynamo expects.
        media_cache_mb: size of the cache of decoded raw images, in MB.
        drain_timeout_s: seconds that requests in flight get after SIGTERM.
    """

    transports: tuple[str, ...]
    all_transports: bool
    max_item_bytes: int
    transfer_timeout_s: float
    hash_mode: HashMode | None
    media_cache_mb: int
    drain_timeout_s: float


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add our own options to a worker's parser."""
    group = parser.add_argument_group("dynamo-worker-ext Options")
    add_argument(
        group,
        flag_name="--mm-transfer",
        env_var="DYN_MM_TRANSFER",
        default="auto",
        help="Transports over which pre-processed media is accepted: a comma-separated list in "
        f"order of preference from {', '.join(transfer.usable())}; 'auto' for all of them, "
        "'off' for none (the frontend then has to send URLs).",
    )
    add_argument(
        group,
        flag_name="--mm-max-item-mb",
        env_var="DYN_MM_MAX_ITEM_MB",
        default=256,
        arg_type=int,
        help="Largest pre-processed media item that is accepted, in MB.",
    )
    add_argument(
        group,
        flag_name="--mm-transfer-timeout",
        env_var="DYN_MM_TRANSFER_TIMEOUT",
        default=10.0,
        arg_type=float,
        help="Seconds for the pre-processed media of one request to arrive.",
    )
    add_argument(
        group,
        flag_name="--mm-hash-mode",
        env_var="DYN_MM_HASH_MODE",
        default="auto",
        choices=["auto", *(mode.value for mode in HashMode)],
        help="How media is identified to the router. 'auto' is pad_value, which Dynamo expects "
        "since 1.3; block_mm_infos is for Dynamo up to 1.2.",
    )
    add_argument(
        group,
        flag_name="--mm-media-cache-mb",
        env_var="DYN_MM_MEDIA_CACHE_MB",
        default=64,
        arg_type=int,
        help="Memory for images decoded from data URIs, in MB; 0 for none.",
    )
    add_argument(
        group,
        flag_name="--drain-timeout",
        env_var="DYN_WORKER_DRAIN_TIMEOUT",
        default=60.0,
        arg_type=float,
        help="Seconds that requests in flight get to finish after SIGTERM.",
    )


def worker_options(args: argparse.Namespace) -> WorkerOptions:
    """Read and check what `add_worker_arguments` added.

    Raises:
        StartupError: a value is out of range; the message names the flag.
    """
    for flag, value in (
        ("--mm-max-item-mb", args.mm_max_item_mb),
        ("--mm-transfer-timeout", args.mm_transfer_timeout),
    ):
        if not value > 0:
            raise StartupError(f"{flag} is {value}; it must be above 0")
    for flag, value in (
        ("--mm-media-cache-mb", args.mm_media_cache_mb),
        ("--drain-timeout", args.drain_timeout),
    ):
        if not value >= 0:
            raise StartupError(f"{flag} is {value}; it must not be negative")
    return WorkerOptions(
        transports=_transports(args.mm_transfer),
        all_transports=args.mm_transfer != "auto",
        max_item_bytes=args.mm_max_item_mb * 1024 * 1024,
        transfer_timeout_s=args.mm_transfer_timeout,
        hash_mode=None if args.mm_hash_mode == "auto" else HashMode(args.mm_hash_mode),
        media_cache_mb=args.mm_media_cache_mb,
        drain_timeout_s=args.drain_timeout,
    )


def _transports(value: str) -> tuple[str, ...]:
    known = transfer.usable()
    if value == "auto":
        return known
    if value == "off":
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise StartupError(
            f"--mm-transfer {value!r}: this worker takes {', '.join(known)}, 'auto' or 'off'"
        )
    return names


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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartupError(
                f"system port {port} on {host} cannot be had ({error.strerror}); free it or set "
                "DYN_SYSTEM_PORT to another"
            ) from None


def to_dynamo_error(error: WorkerExtError, *, chat_processor: bool) -> Exception:
    """The exception of Dynamo's that makes a frontend do the right thing about `error`.

    Args:
        error: one of ours.
        chat_processor: the request came through a Python chat processor, which (1.6.1) makes a
            500 of every error whose text does not carry a status in the form used here; the Rust
            preprocessor in turn would show that form to the client as it is.
    """
    text = str(error)
    kind: type[Exception]
    if isinstance(error, RequestError):
        kind, status = dynamo_errors.InvalidArgument, error.status
        if status != 400 and not chat_processor:
            http_error: Exception = dynamo_errors.HttpError(status, text)
            return http_error
    elif isinstance(error, MediaLostError):
        # Retried on another worker where --migration-limit allows it, as are the next two.
        kind, status = dynamo_errors.CannotConnect, 503
    elif isinstance(error, EngineDeadError):
        kind, status = dynamo_errors.EngineShutdown, 503
    elif isinstance(error, EngineError):
        kind, status = dynamo_errors.StreamIncomplete, 503
    else:
        kind, status = dynamo_errors.Unknown, 500
    return kind(_with_status(status, text) if chat_processor else text)


def _with_status(status: int, message: str) -> str:
    # Source: dynamo.frontend.utils.backend_invalid_argument_to_http_error, 1.6.1.
    return "BackendInvalidArgument: " + json.dumps({"message": message, "code": status})


class Worker(LLMEngine):
    """An engine behind the Backend SDK.

    Subclasses start and stop their engine and turn one request into chunks.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.engine_failed = False
        self.startup_error: StartupError | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._watchdog: asyncio.Task[None] | None = None
        self._warn = WarnOnceAMinute(log)
        # The SDK kills what is not done by then; the drain is to have its time.
        budget = int(options.drain_timeout_s) + 30
        os.environ.setdefault("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", str(budget))

    # What a subclass provides.

    @property
    @abstractmethod
    def engine_prefix(self) -> str:
        """Prefix of the engine's own Prometheus series, such as ``vllm:``."""

    @abstractmethod
    async def _start(self, worker_id: int) -> EngineConfig:
        """Start the engine and say what to register.

        Raises:
            StartupError: it cannot serve as it was asked to.
        """

    @abstractmethod
    def engine_is_dead(self) -> bool:
        """Whether the engine has failed for good. Cheap; never raises."""

    @abstractmethod
    def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Serve one request as Dynamo's chunks; errors are `WorkerExtError`."""

    @abstractmethod
    async def _stop(self) -> None:
        """Stop everything that `start` made, also after it failed half-way. Idempotent."""

    # The SDK's hooks.

    async def start(self, worker_id: int) -> EngineConfig:
        try:
            return await self._start(worker_id)
        except StartupError as error:
            # The SDK makes an untyped error of it; the entry point asks for it here.
            self.startup_error = error
            raise

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        with self._serving():
            try:
                async for chunk in self._stream(request, context):
                    yield chunk
            except WorkerExtError as error:
                if isinstance(error, RequestError):
                    self.metrics.refused.labels(type(error).__name__).inc()
                    log.debug("request %s refused: %s", context.id(), error)
                else:
                    self._warn(type(error).__name__, "request %s: %s", context.id(), error)
                # The Rust preprocessor stamps its requests with the card's checksum.
                raise to_dynamo_error(
                    error, chat_processor=request.get("mdc_sum") is None
                ) from error

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self.metrics.registry)
        register_global_registry(metrics, engine_prefix=self.engine_prefix)

    async def cleanup(self) -> None:
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            with suppress(asyncio.CancelledError):
                await self._watchdog
            self._watchdog = None
        await self._drain()
        await self._stop()

    # Shared machinery.

    def start_watchdog(self) -> None:
        """Leave discovery as soon as the engine is dead, idle or not."""
        self._watchdog = asyncio.create_task(self._watch(), name="engine-watchdog")

    async def _watch(self) -> None:
        while not self.engine_is_dead():  # noqa: ASYNC110 - the engine sets no event
            await asyncio.sleep(_WATCH_INTERVAL_S)
        self.fail("the engine died")

    def fail(self, why: str) -> None:
        """Leave for good: out of discovery at once, then exit with a status that is not 0."""
        if self.engine_failed or self._closing:
            return
        self.engine_failed = True
        log.critical("%s; this worker leaves", why)
        # Nothing that comes in can be served any more, so there is nothing to wait for.
        os.environ["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
        # The SDK has no call for this; its own signal path unregisters and cleans up.
        os.kill(os.getpid(), signal.SIGTERM)

    def open_receivers(self) -> dict[str, MmKwargsReceiver[Any]]:
        """Receivers of the transports that were asked for, the preferred first.

        Raises:
            StartupError: one that was asked for by name cannot be had here.
        """
        limits = Limits(self.options.max_item_bytes, self.options.transfer_timeout_s)
        receivers: dict[str, MmKwargsReceiver[Any]] = {}
        for name in self.options.transports:
            try:
                receivers[name] = transfer.open_receiver(name, limits, self.metrics)
            except TransportUnavailableError as error:
                if self.options.all_transports:
                    raise StartupError(f"--mm-transfer {name}: {error}") from error
                log.warning("media is not taken over %s: %s", name, error)
        return receivers

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self._in_flight += 1
        self._idle.clear()
        self.metrics.in_flight.set(self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= 1
            self.metrics.in_flight.set(self._in_flight)
            if not self._in_flight:
                self._idle.set()

    async def _drain(self) -> None:
        """Wait until nothing is in flight, the time is up, or the engine is dead."""
        deadline = time.monotonic() + self.options.drain_timeout_s
        while self._in_flight and not self.engine_is_dead():
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning(
                    "%d request(s) still in flight after %.0f s (--drain-timeout); ending them",
                    self._in_flight,
                    self.options.drain_timeout_s,
                )
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), min(left, _WATCH_INTERVAL_S))
