"""Engine wheels from the package index, and their files."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path


def unpack(
    requirement: str, directory: Path, wanted: Callable[[str], bool] = lambda _name: True
) -> Path:
    """Download a wheel as pip does, or take it from pip's cache, and unpack it.

    Args:
        requirement: a name and an exact version.
        directory: an empty one, which is to be like site-packages.
        wanted: which files to unpack, besides metadata and the package's `__init__.py`.
    """
    downloads = directory.with_name(f"{directory.name}-download")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", downloads]
    run = subprocess.run(
        [*pip, "--disable-pip-version-check", requirement],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if run.returncode:
        raise AssertionError(
            f"{requirement} cannot be downloaded, so nothing is known about it: "
            f"{run.stderr.strip()[-500:]}"
        )
    [wheel] = downloads.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if wanted(name) or ".dist-info/" in name or _is_package(name):
                archive.extract(name, directory)
    wheel.unlink()
    downloads.rmdir()
    return directory


def _is_package(name: str) -> bool:
    return name.count("/") == 1 and name.endswith("/__init__.py")
