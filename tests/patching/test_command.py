"""`python -m dynamo_worker_ext.patching`: what it prints, and its exit status for each state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.patching import engines, verify
from dynamo_worker_ext.patching.__main__ import main
from dynamo_worker_ext.patching.report import PatchReport, installed
from dynamo_worker_ext.patching.state import State
from tests.patching.small import AFTER, BEFORE, VERSION, Small

REPO = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def call(small: Small, *arguments: str) -> int:
    return main([*arguments, "--site-packages", str(small.root)])


def as_version(small: Small, version: str) -> None:
    metadata = small.root / f"sglang-{VERSION}.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace(VERSION, version))


def test_exit_status_of_each_state(small: Small, capsys: Capture) -> None:
    assert call(small, "check") == 1
    assert call(small, "verify") == 1
    assert small.texts() == BEFORE
    assert call(small, "apply") == 0
    assert call(small, "check") == 0
    assert call(small, "apply", "--engine", "sglang") == 0
    assert small.texts() == AFTER
    assert call(small, "revert") == 0
    assert call(small, "revert") == 0
    assert small.texts() == BEFORE
    assert call(small, "check", "--engine", "vllm") == 4
    small.write(AFTER, "sglang/one.py")
    for command in ("check", "apply", "revert", "verify"):
        assert call(small, command) == 3
    assert "partly patched" in capsys.readouterr().out
    as_version(small, "2.0")
    assert call(small, "check") == 0
    as_version(small, "3.0")
    with pytest.raises(SystemExit) as ended:
        call(small, "patch")
    assert ended.value.code == 2


def test_json(small: Small, capsys: Capture) -> None:
    def said() -> Any:
        return json.loads(capsys.readouterr().out)

    call(small, "apply", "--json")
    [found] = said()
    assert (found["engine"], found["version"], found["state"]) == ("sglang", VERSION, "applied")
    assert [(one["name"], one["state"]) for one in found["patches"]] == [
        ("first", "applied"),
        ("second", "applied"),
        ("third", "already-upstream"),
    ]
    assert found["patches"][0]["files"] == ["sglang/one.py", "sglang/two.py"]
    (small.root / "sglang/two.py").write_text("other\n")
    call(small, "check", "--json")
    [found] = said()
    assert found["state"] == "refused"
    assert "line 1: expected 'beta'" not in found["patches"][0]["reason"]
    assert "line 2: expected 'beta', found the end" in found["patches"][0]["reason"]
    assert main(["list", "--json"]) == 0
    assert [one["versions"] for one in said()] == [[VERSION, "1.1"], ["2.0"]]
    assert call(small, "check", "--json", "--engine", "vllm") == 4
    assert "vllm" in said()["error"]


def test_a_run_that_meets_another_one_ends_with_3(small: Small, capsys: Capture) -> None:
    import fcntl

    descriptor = os.open(small.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert call(small, "apply") == 3
    finally:
        os.close(descriptor)
    assert "another run is at work" in capsys.readouterr().err


def test_list_shows_reasons_and_files(small: Small, capsys: Capture) -> None:
    assert main(["list", "--engine", "sglang"]) == 0
    said = capsys.readouterr().out
    assert f"sglang {VERSION}, 1.1\n  first: patch\n" in said
    assert "sglang/deep/three.py" in said
    assert "third: already-upstream\n    merged\n" in said


# Takes the place of a script that checks an engine's behaviour.
_CHECK = """
import json, sys, sglang
report, *names = sys.argv[1:]
faults = {"first": "", "second": sglang.fault}
json.dump({name: faults[name] for name in names}, open(report, "w"))
"""


def test_verify_runs_the_checks_beside_the_engine_that_was_looked_at(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/check_sglang.py").write_text(_CHECK)
    monkeypatch.setattr(verify, "__file__", str(tmp_path / "verify.py"))
    package = small.root / "sglang/__init__.py"
    package.write_text("fault = ''\n")
    assert call(small, "apply") == 0
    assert call(small, "verify") == 0
    said = capsys.readouterr().out
    assert "first, check first: passed" in said
    assert "second, check second: passed" in said
    package.write_text("fault = 'it is still 41'\n")
    assert call(small, "verify") == 5
    assert "second, check second: failed\n    it is still 41\n" in capsys.readouterr().out
    package.write_text("raise SystemExit('no engine today')\n")
    assert call(small, "verify", "--json") == 5
    proofs = json.loads(capsys.readouterr().out)[0]["proofs"]
    assert "ended with status 1: no engine today" in proofs[0]["fault"]
    package.write_text("import time\ntime.sleep(100)\n")
    assert call(small, "verify", "--timeout", "0.5") == 5
    assert "did not end within 0.5 s" in capsys.readouterr().out


def test_the_module_runs_without_any_engine_and_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    run = subprocess.run(
        [sys.executable, "-m", "dynamo_worker_ext.patching", "check", "--site-packages", tmp_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 4
    assert run.stderr.startswith("patching: not installed in")


def test_looking_at_an_engine_does_not_import_it(small: Small) -> None:
    call(small, "apply")
    assert "sglang" not in sys.modules


def test_the_report_of_a_worker(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(small.root)])
    report = installed("sglang")
    assert report.missing == ("first", "second")
    assert report.names == ()
    assert not report.is_complete
    assert report.describe() == [
        f"sglang {VERSION}: patch first: applicable",
        f"sglang {VERSION}: patch second: applicable",
        f"sglang {VERSION}: patch third: already-upstream",
        f"sglang {VERSION}: without first, second; "
        "python -m dynamo_worker_ext.patching apply --engine sglang",
    ]
    call(small, "apply")
    report = installed("sglang")
    assert (report.names, report.missing, report.is_complete) == (("first", "second"), (), True)
    assert len(report.describe()) == 3
    metrics = Metrics()
    report.show(metrics)
    shown = generate_latest(metrics.registry).decode()
    assert 'dynamo_worker_ext_engine_patch{patch="first",state="applied"} 1.0' in shown
    assert 'dynamo_worker_ext_engine_patch{patch="third",state="already-upstream"} 1.0' in shown
    small.write(BEFORE, "sglang/one.py")
    report = installed("sglang")
    assert report.missing == ("first",)
    assert "partly patched" in report.describe()[-1]
    as_version(small, "9.9")
    report = installed("sglang")
    assert not report.is_complete
    assert "nothing is known about sglang 9.9" in report.describe()[0]
    as_version(small, "2.0")


def test_the_report_of_what_is_not_there(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(small.root)])
    report = installed("vllm")
    assert isinstance(report, PatchReport)
    assert (report.version, dict(report.states), report.is_complete) == ("", {}, False)
    assert "not installed" in report.describe()[0]
    as_version(small, "2.0")
    report = installed("sglang")
    assert report.is_complete
    assert report.states == {"first": State.NOT_NEEDED}
    assert engines.find("sglang").version == "2.0"
