"""Where an engine publishes its KV events and where they can be had."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.kv_events import engine_endpoint, private_endpoint


@pytest.mark.parametrize(
    ("published", "rank", "subscribed"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://[::]:5557", 0, "tcp://[::1]:5557"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
    ],
)
def test_where_an_engine_listens_can_be_subscribed_to(
    published: str, rank: int, subscribed: str
) -> None:
    assert engine_endpoint(published, rank) == subscribed


@pytest.mark.parametrize(
    ("published", "rank", "why"),
    [
        ("tcp://127.0.0.1:5557", 0, "would connect to it, not listen"),
        ("tcp://0.0.0.0:5557", 0, "would connect to it, not listen"),
        ("tcp://localhost:5557", 0, "would connect to it, not listen"),
        ("tcp://*:0", 0, "needs a port"),
        ("tcp://*", 0, "needs a port"),
        ("tcp://*:65535", 1, "needs a port"),
        ("inproc://kv", 0, "cannot be reached"),
        ("ipc:///run/kv", 1, "rank 0 only"),
        ("ipc://", 0, "SCHEME://ADDRESS"),
        ("5557", 0, "SCHEME://ADDRESS"),
        ("", 0, "SCHEME://ADDRESS"),
    ],
)
def test_an_endpoint_whose_events_would_be_lost_is_refused(
    published: str, rank: int, why: str
) -> None:
    with pytest.raises(StartupError, match=why):
        engine_endpoint(published, rank)


def test_a_refusal_says_what_to_use() -> None:
    with pytest.raises(StartupError, match=r"use tcp://\*:PORT"):
        engine_endpoint("tcp://127.0.0.1:5557")


def test_a_private_endpoint_is_for_its_user_only() -> None:
    endpoint, cleanup = private_endpoint()
    folder = Path(endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert engine_endpoint(endpoint) == endpoint
    cleanup()
    assert not folder.exists()
    cleanup()


def test_private_endpoints_differ() -> None:
    one, two = private_endpoint(), private_endpoint()
    assert one.endpoint != two.endpoint
    one.cleanup()
    two.cleanup()


def test_what_a_killed_worker_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = """if True:
        import os
        from dynamo_worker_ext.kv_events import private_endpoint
        print(private_endpoint().endpoint, flush=True)
        os._exit(0)"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    left = Path(ended.stdout.strip().removeprefix("ipc://")).parent
    assert left.parent == tmp_path
    assert left.is_dir()
    own, unmarked = private_endpoint(), tmp_path / "dwe-kv-unmarked"
    unmarked.mkdir()
    other = private_endpoint()
    assert not left.exists()
    assert unmarked.is_dir()
    assert Path(own.endpoint.removeprefix("ipc://")).parent.is_dir()
    own.cleanup()
    other.cleanup()


def test_a_temporary_directory_too_deep_for_a_socket_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(StartupError, match="TMPDIR"):
        private_endpoint()
    assert list(deep.iterdir()) == []
