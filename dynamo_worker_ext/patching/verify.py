"""Proves by behaviour that an engine's patches are in effect.

The checks run in a process of their own, with the engine that was looked at before any other: it
is imported there, never here. They need the engine's dependencies, but no GPU and no model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo_worker_ext.patching.state import EngineStatus, State

#: For importing an engine on a slow disk.
TIMEOUT_S: Final = 600.0
_SHOWN: Final = 2000


@dataclass(frozen=True, slots=True)
class Proof:
    """What one check of behaviour found.

    Attributes:
        patch: the patch that it is about.
        check: its name.
        fault: what is not as it should be; empty if all is.
    """

    patch: str
    check: str
    fault: str


def verify(status: EngineStatus, timeout_s: float = TIMEOUT_S) -> list[Proof]:
    """Run the checks of all patches that are applied, or already upstream.

    Args:
        status: the engine's state, from `check`.
        timeout_s: for all of them together.
    """
    proving = [
        (one.patch.name, check)
        for one in status.patches
        if one.state in {State.APPLIED, State.ALREADY_UPSTREAM}
        for check in one.patch.checks
    ]
    if not proving:
        return []
    found = _run(status, sorted({check for _, check in proving}), timeout_s)
    return [Proof(patch, check, found[check]) for patch, check in proving]


def _run(status: EngineStatus, checks: list[str], timeout_s: float) -> dict[str, str]:
    """Faults by check."""
    engine = status.installation.engine
    script = Path(__file__).parent / "checks" / f"check_{engine}.py"
    path = [str(status.installation.site_packages), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        try:
            run = subprocess.run(  # noqa: S603 - this interpreter, with a script of this package
                [sys.executable, "-P", str(script), str(report), *checks],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(checks, f"the check did not end within {timeout_s:g} s")
        if run.returncode == 0 and report.is_file():
            faults: dict[str, str] = json.loads(report.read_text())
            return faults
        said = run.stdout.decode(errors="replace")[-_SHOWN:].strip()
        return dict.fromkeys(checks, f"the check ended with status {run.returncode}: {said}")
