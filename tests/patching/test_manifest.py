"""What a manifest may say, and what this package's own say."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_worker_ext.errors import PatchFormatError
from dynamo_worker_ext.patching import manifest
from dynamo_worker_ext.patching.engines import find
from dynamo_worker_ext.patching.state import inspect
from tests.patching.small import BEFORE, VERSION, Small, sha256

REPO = Path(__file__).parents[2]


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: "engine = ", "manifest.toml: Invalid value"),
        (replaced('"sglang"', '"trt"'), "engine: Input should be 'vllm' or 'sglang'"),
        (replaced('"sglang"', '"vllm"'), "a patch of vllm changes a file of something else"),
        (replaced('why = "w"', ""), r"patches\.0\.why: Field required"),
        (replaced('why = "w"', 'why = "w"\nfuzz = 2'), "fuzz: Extra inputs are not permitted"),
        (replaced("checks", "unchecks"), "unchecks"),
        (replaced('changes = "c"', ""), "changes, why_a_patch and checks are missing"),
        (replaced('before = "', 'before = "0'), "should match pattern"),
        (replaced("sglang/one.py", "sglang/../one.py"), "not a path inside a package"),
        (replaced("sglang/one.py", "/sglang/one.py"), "not a path inside a package"),
        (replaced("sglang/deep/three.py", "sglang/one.py"), "change the same file"),
        (replaced('name = "second"', 'name = "first"'), "have the same name"),
        (replaced('state = "already-upstream"', ""), "files belong to the state 'patch'"),
        (replaced(f'"{VERSION}", ', ""), "belongs elsewhere"),
        (replaced('"1.1"', '"2.0"'), r"two manifests are for sglang 2\.0"),
    ],
)
def test_a_malformed_manifest_is_refused(
    small: Small, change: Callable[[str], str], said: str
) -> None:
    small.manifest.write_text(change(small.manifest.read_text()))
    with pytest.raises(PatchFormatError, match=said):
        manifest.manifests()


def test_no_patches_at_all_are_refused(small: Small) -> None:
    for path in small.patches.rglob("manifest.toml"):
        path.unlink()
    with pytest.raises(PatchFormatError, match="this package is incomplete"):
        manifest.manifests()


def test_a_patch_that_does_not_fit_its_manifest_is_refused(small: Small) -> None:
    patch = small.manifest.parent / "second.patch"
    text = patch.read_text()
    for new, said in [
        (text.replace("42", "43"), "its SHA-256 differs"),
        (text.replace("41", "40"), "line 2: expected '    return 40'"),
        (text.replace("three.py", "four.py"), "but the manifest names"),
        ("", "it changes nothing"),
    ]:
        patch.write_text(new)
        manifest._load_all.cache_clear()
        with pytest.raises(PatchFormatError, match=said):
            inspect(find("sglang", small.root))
    patch.unlink()
    manifest._load_all.cache_clear()
    with pytest.raises(PatchFormatError, match=r"second\.patch: No such file"):
        inspect(find("sglang", small.root))
    assert {path: sha256(text) for path, text in small.texts().items()} == {
        path: sha256(text) for path, text in BEFORE.items()
    }


def test_every_version_of_the_issue_is_known() -> None:
    sglang = ["0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14"]
    for version in [*sglang, "0.5.21", "0.5.23"]:
        assert manifest.find("sglang", version), version
    minors = [manifest.find("vllm", f"0.{minor}.0") for minor in range(20, 34)]
    assert all(minors)
    assert {patch.state for one in minors if one for patch in one.patches} == {"not-needed"}
    assert manifest.find("vllm", "0.19.1")
    assert not manifest.find("sglang", "0.5.10")
    assert not manifest.find("vllm", "0.34.0")


def test_versions_that_this_package_pins_are_known() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for engine in manifest.ENGINES:
        pins = [one for one in extras["optional-dependencies"][engine] if one.startswith(engine)]
        assert manifest.find(engine, pins[0].partition("==")[2])


def test_every_patch_of_this_package_can_be_read() -> None:
    read = 0
    for one in manifest.manifests():
        for patch in one.patches:
            if patch.files:
                assert all(hunk.new != hunk.old for d in patch.diffs.values() for hunk in d.hunks)
                read += 1
        directory = one.patches[0].directory
        named = {f"{patch.name}.patch" for patch in one.patches if patch.files}
        assert {path.name for path in directory.iterdir()} == {"manifest.toml", *named}
    assert read == 9
