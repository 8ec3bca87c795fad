"""What an operator sees: Prometheus series, NVTX ranges and warnings that do not flood.

All series are in one registry of their own, which a worker joins to its ``/metrics``. A stage is
measured once and shows up both as a histogram and, with ``DYN_NVTX=1``, as an NVTX range.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX: Final = "dynamo_worker_ext_"

#: Stages of a request's way, in order: ``send`` in the frontend and in an encode worker, ``encode``
#: in an encode worker, the others in the worker.
#: ``prepare`` is the whole of the worker's part, from the request to the engine's input.
STAGES: Final = (
    *("send", "parse", "receive", "decode", "load"),
    *("process", "inject", "encode", "prepare"),
)

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)


class Metrics:
    """The series of one worker. Lives in the worker process; all methods are thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=self.registry)

        self.requests = counter(
            "requests", "Requests by what became of their media.", "outcome", "transport"
        )
        self.items = counter(
            "mm_items", "Media items by where the engine had them from.", "modality", "source"
        )
        self.bytes = counter("mm_received_bytes", "Payload bytes received.", "transport")
        self.sent_bytes = counter("mm_sent_bytes", "Payload bytes offered.", "transport")
        self.failures = counter(
            "mm_transfer_failures", "Transfers that failed, by reason.", "transport", "reason"
        )
        self.handoff_failures = counter(
            "handoff_failures", "Prompts of prefill that decode could not go on from.", "reason"
        )
        self.resends = counter(
            "mm_resends", "Requests resent once after the engine had evicted an item."
        )
        self.refused = counter("requests_refused", "Requests refused as invalid.", "reason")
        self.kv_events = counter("kv_events", "KV events passed on to the router.", "kind")
        self.kv_event_gaps = counter(
            "kv_event_gaps", "Gaps in the engine's KV event sequence numbers."
        )
        self.seconds = Histogram(
            PREFIX + "mm_stage_seconds",
            "Seconds of each stage from a request to the engine's input.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = gauge("requests_in_flight", "Requests now being served.")
        self.engine_patch = gauge(
            "engine_patch",
            "1, for the state of each patch that the engine's version has.",
            "patch",
            "state",
        )
        self.info = gauge(
            "worker_info",
            "1, with what the worker's card says.",
            "backend_framework",
            "engine_version",
            "package_version",
            "mm_hash_mode",
        )
        self.cache_bytes = gauge(
            "mm_cache_bytes",
            "Memory of processed media or embeddings that this worker keeps itself.",
        )
        self.mm_hash_support = gauge(
            "mm_hash_support",
            "1, with what the engine does with the media hashes of a frontend.",
            "support",
        )
        self._stages = {stage: self.seconds.labels(stage) for stage in STAGES}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Measure one of `STAGES`, also when it ends in an error."""
        return _Stage(name, self._stages[name])


class _Stage:
    """One run of a stage. Half as much work as a generator with `contextmanager`."""

    __slots__ = ("_mark", "_name", "_seconds", "_start")

    def __init__(self, name: str, seconds: Histogram) -> None:
        self._name, self._seconds = name, seconds

    def __enter__(self) -> None:
        self._mark = _nvtx_push(self._name)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds.observe(time.perf_counter() - self._start)
        _nvtx_pop(self._mark)


class WarnOnceAMinute:
    """Logs at most one warning a key and minute, and says how many it kept back.

    Args:
        log: where to.
        clock: seconds, monotonic.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def __call__(self, key: str, message: str, *args: object) -> None:
        now = self._clock()
        last, kept_back = self._seen.get(key, (float("-inf"), 0))
        if now - last < 60:
            self._seen[key] = (last, kept_back + 1)
            return
        self._seen[key] = (now, 0)
        suffix = f" ({kept_back} more like this since the last warning)" if kept_back else ""
        self._log.warning("%s%s", message % args if args else message, suffix)


def _load_nvtx() -> Any:
    if os.environ.get("DYN_NVTX", "0") in ("", "0"):
        return None
    try:
        import nvtx
    except ImportError:
        logging.getLogger(__name__).warning(
            "DYN_NVTX is set but the nvtx package is not installed; no ranges are recorded"
        )
        return None
    return nvtx


_NVTX = _load_nvtx()


def _nvtx_push(name: str) -> Any:
    # start/end ranges, not push/pop: stages of concurrent requests interleave on one thread.
    return _NVTX.start_range(f"dynamo_worker_ext:{name}") if _NVTX is not None else None


def _nvtx_pop(mark: Any) -> None:
    if mark is not None:
        _NVTX.end_range(mark)
