"""What each rank's scheduler says, for the SDK's gauges, the router's idea of the load, the drain
and the watchdog."""

from __future__ import annotations

import time
from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot
from vllm.v1.metrics.loggers import StatLoggerBase


class Snapshots:
    """Hands what the engine records to the SDK, once the SDK has said where to.

    Attributes:
        publisher: the SDK's ``SnapshotPublisher``, or None while there is none.
    """

    def __init__(self) -> None:
        self.publisher: Any = None
        self._held: dict[int, bool] = {}
        self._waited: dict[int, float] = {}
        self._waiting_at: dict[int, float] = {}

    @property
    def holds_blocks(self) -> bool:
        """Whether any rank keeps KV that is in use: by a request, or until decode has taken it.

        An engine that waits for decode keeps stepping, and with every step says what it uses.
        """
        return any(self._held.values())

    @property
    def waited_s(self) -> float:
        """Seconds that a decode engine's rank has done nothing but wait for KV since it last ran
        anything; of several ranks the most.

        An engine that waits for KV keeps stepping. Time in which it has no request does not count.
        """
        return max(self._waited.values(), default=0.0)

    def note(self, rank: int, stats: Any) -> None:
        """Remember what a rank's scheduler says of itself."""
        self._held[rank] = stats.kv_cache_usage > 0
        now, before = time.monotonic(), self._waiting_at.pop(rank, None)
        if stats.num_running_reqs:
            self._waited[rank] = 0.0
        elif stats.num_skipped_waiting_reqs and self._held[rank]:
            # What waits for KV has its blocks; what waits for a grammar to compile has none.
            if before is not None:
                self._waited[rank] = self._waited.get(rank, 0.0) + now - before
            self._waiting_at[rank] = now

    def logger(self, vllm_config: Any, rank: int = 0) -> StatLoggerBase:
        """A stat logger for one rank, in the form `AsyncLLM` asks for."""
        return _Logger(self, vllm_config, rank)


class _Logger(StatLoggerBase):
    def __init__(self, snapshots: Snapshots, vllm_config: Any, engine_index: int = 0) -> None:
        self._snapshots = snapshots
        self._config = vllm_config
        self._rank = engine_index

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kw: Any) -> None:
        publisher = self._snapshots.publisher
        if scheduler_stats is None:
            return
        self._snapshots.note(self._rank, scheduler_stats)
        if publisher is None:
            return
        blocks = self._config.cache_config.num_gpu_blocks or 0
        prefix = scheduler_stats.prefix_cache_stats
        publisher.publish(
            self._rank,
            ComponentSnapshot(
                kv_used_blocks=int(scheduler_stats.kv_cache_usage * blocks),
                kv_total_blocks=blocks,
                gpu_cache_usage=scheduler_stats.kv_cache_usage,
                dp_rank=self._rank,
                kv_cache_hit_rate=(
                    prefix.hits / prefix.queries if prefix and prefix.queries else None
                ),
            ),
        )

    def log_engine_initialized(self) -> None:
        """Nothing to say: the worker logs its card."""
