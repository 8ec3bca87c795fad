"""Runs a script of this folder, which has an engine of its own, and takes its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines import ROOT, VLLM
from tests.stack import BASE_ENV


def report_of(script: str, model: Path, out: Path) -> dict[str, Any]:
    """What the script writes to ``report.json`` in `out`.

    Raises:
        AssertionError: with the end of its log, if it fails.
    """
    log = out / "log"
    with log.open("w") as file:
        code = subprocess.run(
            [sys.executable, Path(__file__).with_name(script), model, out],
            env={**os.environ, **BASE_ENV, **VLLM.env, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=500,
            check=False,
        ).returncode
    assert code == 0, log.read_text()[-4000:]
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report
