"""``python -m tests.counted_worker``: our vLLM worker, with two series more on ``/metrics``.

``vllm:test_processed_images_total`` counts images that the Hugging Face image processor was given
in the worker process, ``vllm:test_requests_with_raw_media_total`` requests that carried raw media.
Nothing else is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily

PROCESSED = "vllm:test_processed_images_total"
WITH_RAW = "vllm:test_requests_with_raw_media_total"


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
def counted_images() -> Iterator[Count]:
    """Wrap the image processor of every model in this process, and show the count."""
    from transformers.image_processing_utils import BaseImageProcessor

    processed = Count(PROCESSED)
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


def count_raw_requests() -> None:
    """Show how many requests of this process carried raw media."""
    from dynamo_worker_ext import wire

    with_raw, parse = Count(WITH_RAW), wire.parse

    def counted(*args: Any, **kwargs: Any) -> wire.MediaRequest:
        request = parse(*args, **kwargs)
        with_raw.add(bool(request.raw))
        return request

    wire.parse = counted
    REGISTRY.register(with_raw)


if __name__ == "__main__":
    from dynamo_worker_ext.vllm.__main__ import main

    count_raw_requests()
    with counted_images():
        main()
