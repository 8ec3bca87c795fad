"""The life of a worker: start, serve, drain, stop, and leaving when its engine is dead.

A worker is one ``LLMEngine`` of Dynamo's Backend SDK, which owns discovery, registration,
transport of requests, cancellation and signals. Added here: requests in flight are drained before
the engine stops; a dead engine takes the worker out of discovery; our errors become Dynamo's.
Lives in the worker process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from dynamo.common.backend.engine import EngineConfig, LLMEngine
from dynamo.common.backend.metrics import register_engine_registry, register_global_registry

from dynamo_worker_ext import transfer
from dynamo_worker_ext.errors import (
    RequestError,
    StartupError,
    TransportUnavailableError,
    WorkerExtError,
)
from dynamo_worker_ext.metrics import Metrics, WarnOnceAMinute
from dynamo_worker_ext.transfer import Limits, MmKwargsReceiver
from dynamo_worker_ext.worker.dynamo_errors import to_dynamo_error
from dynamo_worker_ext.worker.options import WorkerOptions

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the engine lives; out of discovery within 2 s is promised.
_WATCH_INTERVAL_S: Final = 0.25

#: How long a worker that stops tries to take out of discovery what it put there besides.
_LEAVE_S: Final = 5.0


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

    def why_dead(self) -> str:
        """What the log says once the engine is dead."""
        return "the engine died"

    def holds_kv(self) -> bool:
        """Whether a prefill worker's engine still keeps KV that decode is to take. Cheap."""
        return False

    @abstractmethod
    def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Serve one request as Dynamo's chunks; errors are `WorkerExtError`."""

    async def _leave_discovery(self) -> None:
        """Take out what the SDK did not put in, before the drain. Idempotent."""

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

    async def is_quiescent(self) -> bool:
        """Whether a prefill worker that is to leave may: asked after the grace period."""
        return self.engine_is_dead() or not (self._in_flight or self.holds_kv())

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
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._leave_discovery()
        except Exception as error:  # no reason to drop what is in flight, or to leave an engine
            log.warning("could not take all cards out of discovery: %s", error)
        await self._drain()
        if self.engine_is_dead() and not self.engine_failed:  # as `fail` has it, but we leave
            self.engine_failed = True
            log.critical("%s while this worker was leaving", self.why_dead())
        await self._stop()

    # Shared machinery.

    def start_watchdog(self) -> None:
        """Leave discovery as soon as the engine is dead, idle or not."""
        self._watchdog = asyncio.create_task(self._watch(), name="engine-watchdog")

    async def _watch(self) -> None:
        while not self.engine_is_dead():  # noqa: ASYNC110 - the engine sets no event
            await asyncio.sleep(_WATCH_INTERVAL_S)
        self.fail(self.why_dead())

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
        """Wait until all is served and taken, the time is up, or the engine is dead."""
        deadline = time.monotonic() + self.options.drain_timeout_s
        while not await self.is_quiescent():
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning(
                    "%d request(s) still in flight%s after %.0f s (--drain-timeout); ending them",
                    self._in_flight,
                    " and KV not taken yet" if self.holds_kv() else "",
                    self.options.drain_timeout_s,
                )
                return
            if not self._in_flight:
                await asyncio.sleep(min(left, _WATCH_INTERVAL_S))
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), min(left, _WATCH_INTERVAL_S))
