"""The benchmark that operators run: its ways, its table and its files. Not how fast anything is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dynamo_worker_ext.bench.__main__ import parser, run
from dynamo_worker_ext.bench.transfer import BenchError, End, Row
from dynamo_worker_ext.errors import WorkerExtError

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def measure() -> Run:
    def measure(*argv: str) -> dict[str, Any]:
        return run(parser().parse_args(["transfer", *argv]))

    return measure


def test_a_run_prints_a_line_a_way_and_size_and_writes_both_files(
    measure: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(os.listdir("/dev/shm"))
    files = ("--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png"))
    measure(
        "--transports", "arena,shm", "--sizes", "0.1", "1", "--items", "2", "--rounds", "7",
        "--stall", "1", "--endure", "160", *files,
    )  # fmt: skip
    written = json.loads((tmp_path / "b.json").read_text())
    rows = {(row["way"], row["megabytes"]): row for row in written["transfer"]}
    assert set(rows) == {(way, size) for way in ("arena", "shm") for size in (0.1, 1)}
    for row in rows.values():
        assert (row["rounds"], row["items"]) == (7, 2)
        steps = sum(row[f"{step}_ms"] for step in ("offer", "receive", "copy", "free"))
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert steps == pytest.approx(row["p50_ms"], rel=1)
        assert row["times_memcpy"] > 0
    assert {way: len(longest) for way, longest in written["stall_ms"].items()} == {
        "arena": 3,
        "shm": 3,
    }
    assert set(written["growth"]["arena"]) == {"descriptors", "private_kb", "shared_kb"}
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert sum(line.startswith(("arena ", "shm ")) for line in shown.splitlines()) == 4
    assert "160 items left behind" in shown
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if name.startswith(f"dwe_{os.getpid()}_")]


def test_upstreams_classes_are_measured_in_the_same_run(
    measure: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("dynamo.common")
    written = measure("--transports", "shm", "--sizes", "0.1", "--rounds", "2", "--vs-upstream")
    assert [row["way"] for row in written["transfer"]] == ["shm", "upstream-shm"]
    assert "x faster than upstream's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--transports", "rdma"), "--transports rdma: there is arena, shm, nixl"),
        (("--transports", ","), "there is a transport"),
        (("--sizes", "0"), "are above 0"),
        (("--rounds", "-1"), "are above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    measure: Run, argv: tuple[str, ...], message: str
) -> None:
    with pytest.raises(WorkerExtError, match=message):
        measure(*argv)


def test_an_end_that_fails_says_so() -> None:
    with (
        End("sender", "arena") as end,
        pytest.raises(BenchError, match="the sender of arena has ended"),
    ):
        end.ask("offer", size=-1, items=1)


def test_a_row_counts_steps_together_and_bytes_of_all_items() -> None:
    row = Row("arena", 1.0, 4, [(0.001, 0.002, 0.0005, 0.0005)] * 3, [0.002] * 3)
    values = row.to_json()
    assert values["p50_ms"] == pytest.approx(4)
    assert values["times_memcpy"] == pytest.approx(2)
    assert values["gb_per_s"] == pytest.approx(4 * 2**20 / 0.004 / 1e9)
