"""What the tests of several rooms share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.base import Limits
from dynamo_worker_ext.transfer.kwargs import KwargsItem

_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "normal", max_examples=1000, deadline=None, derandomize=True, suppress_health_check=_SLOW
)
settings.register_profile(
    "nightly", max_examples=10_000, deadline=None, suppress_health_check=_SLOW
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "normal")
settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout looks
def pytest_configure(config: pytest.Config) -> None:
    """Give ten times as many cases ten times the time."""
    if PROFILE == "nightly" and config.option.timeout is None:
        config.option.timeout = 10 * float(config.getini("timeout"))


@pytest.fixture(scope="session", autouse=True)
def ucx_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep UCX's shared-memory files out of /dev/shm.

    UCX unlinks each as soon as it is made; one of a process that a test kills in between stays.
    """
    os.environ["UCX_POSIX_DIR"] = str(tmp_path_factory.mktemp("ucx"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny random model of a family, once a session."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            out = tmp_path_factory.mktemp("models") / family
            command = [sys.executable, "-m", "dynamo_worker_ext.tinyvlm"]
            subprocess.run([*command, "--family", family, "--out", out], check=True)
            made[family] = out
        return made[family]

    return make


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def limits() -> Limits:
    return Limits(max_item_bytes=256 << 20, timeout_s=10.0)


@pytest.fixture
def assert_same_item() -> Callable[[KwargsItem, KwargsItem], None]:
    """Compares two items: names in order, kinds, options, and every tensor bit for bit."""
    torch = pytest.importorskip("torch")

    def bits(tensor: Any) -> bytes:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        return bytes(flat.numpy().data)

    def same(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert bits(a) == bits(b)
        elif isinstance(a, list):
            assert len(a) == len(b)
            for one, other in zip(a, b, strict=True):
                same(one, other)
        else:
            assert a == b

    def check(a: KwargsItem, b: KwargsItem) -> None:
        assert list(a.fields) == list(b.fields)
        for name in a.fields:
            one, other = a.fields[name], b.fields[name]
            assert (one.kind, dict(one.options)) == (other.kind, dict(other.options))
            same(one.data, other.data)

    return check
