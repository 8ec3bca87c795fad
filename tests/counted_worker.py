"""``python -m tests.counted_worker ENGINE``: our worker, with a few series more on ``/metrics``.

``ENGINE:test_processed_images_total`` counts images and videos that the Hugging Face processors
were given in the worker process, ``ENGINE:test_requests_with_raw_media_total`` requests that
carried raw media; for SGLang ``sglang:test_running_requests`` says what its scheduler works on, and
``sglang:test_hashed_media_total`` how many items its tokenizer manager hashed all bytes of, and
``sglang:test_positioned_prompts_total`` for how many prompts it computed M-RoPE positions. Nothing
else is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

# Here, so that the engine's processes have it too: they import what their parent was started with.
if importlib.util.find_spec("dwe_nixl_dram"):
    importlib.import_module("dwe_nixl_dram")
if os.environ.get("DWE_TESTS_UNPINNED"):
    importlib.import_module("tests.unpinned")

RUNNING = "sglang:test_running_requests"
PROCESSED = ":test_processed_images_total"
HASHED = "sglang:test_hashed_media_total"
POSITIONED = "sglang:test_positioned_prompts_total"
WITH_RAW = ":test_requests_with_raw_media_total"


class Count:
    """One number, as a Prometheus collector.

    Not a `prometheus_client.Counter`: when an engine starts, vLLM takes every metric with "vllm"
    in its name out of the global registry, and only those with its prefix are on ``/metrics``.

    Args:
        name: of the series.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self.name.removesuffix("_total"), self.name, value=self.count)


@contextmanager
def counted_images(engine: str = "vllm") -> Iterator[Count]:
    """Wrap the image and video processors of all models in this process, and show the count."""
    from transformers.image_processing_utils import BaseImageProcessor
    from transformers.video_processing_utils import BaseVideoProcessor

    processed = Count(engine + PROCESSED)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            media = (
                args[0] if args else next(kwargs[m] for m in ("images", "videos") if m in kwargs)
            )
            processed.add(len(media) if isinstance(media, (list, tuple)) else 1)
            return original(self, *args, **kwargs)

        return call

    originals = {kind: kind.__call__ for kind in (BaseImageProcessor, BaseVideoProcessor)}
    for kind, original in originals.items():
        kind.__call__ = counted(original)
    REGISTRY.register(processed)
    try:
        yield processed
    finally:
        REGISTRY.unregister(processed)
        for kind, original in originals.items():
            kind.__call__ = original


def count_raw_requests(engine: str) -> None:
    """Show how many requests of this process carried raw media."""
    from dynamo_worker_ext import wire

    with_raw, parse = Count(engine + WITH_RAW), wire.parse

    def counted(*args: Any, **kwargs: Any) -> wire.MediaRequest:
        request = parse(*args, **kwargs)
        with_raw.add(bool(request.raw))
        return request

    wire.parse = counted
    REGISTRY.register(with_raw)


def count_hashed_media() -> None:
    """Show how many items SGLang computed a hash for in this process."""
    from sglang.srt.multimodal import cache

    hashed, resolve = Count(HASHED), cache.resolve_multimodal_item_hash

    def counted(*, existing_hash: int | None, **item: Any) -> Any:
        hashed.add(existing_hash is None)
        return resolve(existing_hash=existing_hash, **item)

    cache.resolve_multimodal_item_hash = counted
    REGISTRY.register(hashed)


def count_positioned_prompts() -> None:
    """Show for how many prompts SGLang computed M-RoPE positions in this process."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    positioned = Count(POSITIONED)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            positioned.add(made is not None)
            return made

        return call

    from_offsets = QwenVLImageProcessor._compute_image_only_mrope_positions_from_offsets
    QwenVLImageProcessor._compute_image_only_mrope_positions_from_offsets = counted(from_offsets)
    MRotaryEmbedding.get_rope_index = staticmethod(counted(MRotaryEmbedding.get_rope_index))
    REGISTRY.register(positioned)


def count_in_other_processes(processed: Count) -> None:
    """Count images that SGLang has processed outside of this process, as it does for LLaVA."""
    from sglang.srt.multimodal.processors.llava import LlavaImageProcessor

    process = LlavaImageProcessor._process_single_image

    async def counted(*args: Any) -> Any:
        processed.add(1)
        return await process(*args)

    LlavaImageProcessor._process_single_image = counted


class Running:
    """Requests that SGLang's scheduler works on, as a Prometheus collector.

    Its own gauge is minutes late on an idle engine; this is what it writes at each step.
    """

    def __init__(self) -> None:
        from dynamo_worker_ext.sglang import stats

        self._path = ""
        init = stats.LoadReporter.__init__

        def noted(reporter: Any, path: str, *args: Any) -> None:
            self._path = path
            init(reporter, path, *args)

        stats.LoadReporter.__init__ = noted  # type: ignore[method-assign]

    def collect(self) -> Iterator[Metric]:
        from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader

        count = 0
        if self._path:
            reader = ShmLoadSnapshotReader(self._path, 1)
            load = reader.read(0)
            reader.close()
            count = load.num_running_reqs if load else 0
        yield GaugeMetricFamily(RUNNING, RUNNING, value=count)


if __name__ == "__main__":
    engine = sys.argv.pop(1)
    count_raw_requests(engine)
    if engine == "sglang":
        REGISTRY.register(Running())
        count_hashed_media()
        count_positioned_prompts()
    with counted_images(engine) as processed:
        if engine == "sglang":
            count_in_other_processes(processed)
        importlib.import_module(f"dynamo_worker_ext.{engine}.__main__").main()
