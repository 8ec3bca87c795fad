"""Patches are in the wheel, and are found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

REPO = Path(__file__).parents[2]


def listed(package: Path, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-m", "dynamo_worker_ext.patching", "list", "--json"],
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_wheel_has_the_patches_of_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=REPO, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    inside = unpacked / "dynamo_worker_ext/patches"
    files = [path.relative_to(inside) for path in inside.rglob("*") if path.is_file()]
    assert {path: (inside / path).read_bytes() for path in files} == {
        path.relative_to(REPO / "patches"): path.read_bytes()
        for path in (REPO / "patches").rglob("*")
        if path.is_file()
    }
    said = listed(unpacked, tmp_path)
    assert said == listed(REPO, tmp_path)
    assert len(json.loads(said)) >= 8
