"""What tests share that run workers in their own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.counted_worker import Count, counted_images
from tests.engines import VLLM
from tests.stack import BASE_ENV


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**BASE_ENV, **VLLM.env}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2])]))
        yield


@pytest.fixture(scope="module")
def processed() -> Iterator[Count]:
    with counted_images() as processed:
        yield processed
