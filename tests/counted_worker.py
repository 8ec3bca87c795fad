"""``python -m tests.counted_worker``: our vLLM worker, with one series more on ``/metrics``.

``vllm:test_processed_images_total`` counts images that the Hugging Face image processor was given
in the worker process. Nothing else is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily

PROCESSED = "vllm:test_processed_images_total"


class ProcessedImages:
    """The count, as a Prometheus collector.

    Not a `prometheus_client.Counter`: when an engine starts, vLLM takes every metric with "vllm"
    in its name out of the global registry, and only those with its prefix are on ``/metrics``.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, images: int) -> None:
        with self._lock:
            self.count += images

    def collect(self) -> Iterator[Metric]:
        name = PROCESSED.removesuffix("_total")
        yield CounterMetricFamily(name, "Images given to the image processor.", value=self.count)


@contextmanager
def counted_images() -> Iterator[ProcessedImages]:
    """Wrap the image processor of every model in this process, and show the count."""
    from transformers.image_processing_utils import BaseImageProcessor

    processed = ProcessedImages()
    original = BaseImageProcessor.__call__

    def counted(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        processed.add(len(images) if isinstance(images, (list, tuple)) else 1)
        return original(self, images, *args, **kwargs)

    BaseImageProcessor.__call__ = counted
    REGISTRY.register(processed)
    try:
        yield processed
    finally:
        REGISTRY.unregister(processed)
        BaseImageProcessor.__call__ = original


if __name__ == "__main__":
    from dynamo_worker_ext.vllm.__main__ import main

    with counted_images():
        main()
