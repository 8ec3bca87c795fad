"""KV cache use of each rank, for the SDK's gauges and the router's idea of the load."""

from __future__ import annotations

import threading
from typing import Any, Final

from dynamo.common.backend.publisher import ComponentSnapshot
from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader

_INTERVAL_S: Final = 0.5


class LoadReporter:
    """Reads what SGLang's schedulers write about their load, and hands it to the SDK.

    Args:
        path: of the shared memory that they write.
        ranks: how many there are.
        page_size: tokens of a block.
        publisher: the SDK's ``SnapshotPublisher``.
    """

    def __init__(self, path: str, ranks: int, page_size: int, publisher: Any) -> None:
        self._reader = ShmLoadSnapshotReader(path, ranks)
        self._ranks = ranks
        self._page_size = page_size
        self._publisher = publisher
        self._stopping = threading.Event()
        # The SDK asks for it where no event loop runs.
        self._thread = threading.Thread(target=self._report, name="load-reporter", daemon=True)

    def start(self) -> None:
        """Report from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Report no more."""
        self._stopping.set()
        self._thread.join()
        self._reader.close()

    def _report(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            for rank in range(self._ranks):
                load = self._reader.read(rank)
                if load is not None and load.max_total_num_tokens:
                    self._publisher.publish(rank, self._snapshot(rank, load))

    def _snapshot(self, rank: int, load: Any) -> ComponentSnapshot:
        return ComponentSnapshot(
            kv_used_blocks=load.num_used_tokens // self._page_size,
            kv_total_blocks=load.max_total_num_tokens // self._page_size,
            gpu_cache_usage=load.token_usage,
            dp_rank=rank,
            kv_cache_hit_rate=load.cache_hit_rate,
        )
