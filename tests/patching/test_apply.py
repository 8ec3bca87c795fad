"""Apply and revert: all or nothing, whatever happens on the way."""

from __future__ import annotations

import fcntl
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from dynamo_worker_ext.errors import PatchRefusedError
from dynamo_worker_ext.patching import engines
from dynamo_worker_ext.patching.apply import apply, check, revert
from dynamo_worker_ext.patching.state import EngineStatus, State
from tests.patching.small import AFTER, BEFORE, VERSION, Small, make_patches, make_tree


def states(status: EngineStatus) -> list[str]:
    return [one.state.value for one in status.patches]


def find(small: Small) -> engines.Installation:
    return engines.find("sglang", small.root)


def test_apply_and_revert_write_exactly_what_the_manifest_names(small: Small) -> None:
    old = small.snapshot()
    found = find(small)
    assert states(check(found)) == ["applicable", "applicable", "already-upstream"]
    assert states(apply(found)) == ["applied", "applied", "already-upstream"]
    assert small.texts() == AFTER
    assert small.snapshot().keys() == old.keys()
    assert check(found).state is State.APPLIED
    assert states(revert(found)) == ["applicable", "applicable", "already-upstream"]
    assert small.snapshot() == old


def test_a_second_apply_changes_nothing(small: Small) -> None:
    apply(find(small))
    files = [small.root / path for path in BEFORE]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
    assert apply(find(small)).state is State.APPLIED
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before


def test_mode_is_kept_and_hard_links_are_left_alone(small: Small, tmp_path: Path) -> None:
    file = small.root / "sglang/two.py"
    file.chmod(0o640)
    cached = tmp_path / "cache.py"
    os.link(file, cached)
    apply(find(small))
    assert file.stat().st_mode & 0o7777 == 0o640
    assert cached.read_text() == BEFORE["sglang/two.py"]


def test_stale_bytecode_does_not_survive(small: Small) -> None:
    file = small.root / "sglang/deep/three.py"
    stale = [Path(py_compile.compile(str(file), optimize=n) or "") for n in (0, 1, 2)]
    # Bytecode that Python takes without looking at the source.
    kept = py_compile.compile(
        str(small.root / "sglang/__init__.py"),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    apply(find(small))
    assert not any(path.exists() for path in stale)
    assert Path(kept or "").exists()
    run = [sys.executable, "-c", "import three; print(three.answer())"]
    said = subprocess.run(run, cwd=file.parent, capture_output=True, check=True, text=True).stdout
    assert said == "42\n"


def refused(small: Small, *said: str) -> None:
    """Every command refuses with these words, and nothing is touched."""
    old = small.snapshot()
    for act in (check, apply, revert):
        status = act(find(small))
        assert status.state is State.REFUSED
        text = " ".join([status.refusal, *(one.reason for one in status.patches)])
        for words in said:
            assert words in text
    assert small.snapshot() == old


def test_a_changed_file_is_refused_with_the_first_line_that_differs(small: Small) -> None:
    small.write({"sglang/one.py": BEFORE["sglang/one.py"].replace("line 16", "line xvi")})
    refused(small, "sglang/one.py", "line 16: expected 'line 16', found 'line xvi'", "reinstall")
    small.write({"sglang/one.py": AFTER["sglang/one.py"].replace("LINE 17", "LINE 71")})
    refused(small, "line 16: expected 'LINE 17', found 'LINE 71'")
    small.write({"sglang/one.py": BEFORE["sglang/one.py"].replace("line 9\n", "line ix\n")})
    refused(small, "another one is not")


def test_a_change_that_keeps_every_line_of_the_patch_is_refused(small: Small) -> None:
    with (small.root / "sglang/two.py").open("a") as file:
        file.write("delta\n")
    refused(small, "sglang/two.py is neither")


@pytest.mark.parametrize("path", list(BEFORE))
def test_a_partly_patched_tree_is_refused(small: Small, path: str) -> None:
    small.write(AFTER, path)
    refused(small, "partly patched")


def test_a_missing_file_a_link_and_a_directory_are_refused(small: Small, tmp_path: Path) -> None:
    file = small.root / "sglang/two.py"
    file.unlink()
    refused(small, "sglang/two.py: No such file")
    (tmp_path / "two.py").write_text(BEFORE["sglang/two.py"])
    file.symlink_to(tmp_path / "two.py")
    refused(small, "symbolic link")
    file.unlink()
    file.mkdir()
    refused(small, "sglang/two.py")


def test_a_package_outside_of_site_packages_is_refused(small: Small, tmp_path: Path) -> None:
    shutil.move(small.root / "sglang/deep", tmp_path / "deep")
    (small.root / "sglang/deep").symlink_to(tmp_path / "deep")
    refused(small, "outside of")


def test_an_unknown_version_is_refused(small: Small) -> None:
    info = small.root / f"sglang-{VERSION}.dist-info"
    text = (info / "METADATA").read_text()
    for version in ("1.0", "1.0.post2", "1.0.1", "3"):
        (info / "METADATA").write_text(text.replace(VERSION, version))
        refused(small, f"sglang {version}; known versions: {VERSION}, 1.1, 2.0")
    (info / "METADATA").write_text(text.replace(VERSION, "2.0"))
    assert check(find(small)).state is State.NOT_NEEDED
    (info / "METADATA").write_text(text.replace(VERSION, "1.1+cpu"))
    assert check(find(small)).state is State.APPLICABLE


def test_two_runs_at_once_are_refused(small: Small) -> None:
    descriptor = os.open(small.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for act in (check, apply, revert):
            with pytest.raises(PatchRefusedError, match="another run is at work"):
                act(find(small))
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        assert check(find(small)).state is State.APPLICABLE
        with pytest.raises(PatchRefusedError, match="another run is at work"):
            apply(find(small))
    finally:
        os.close(descriptor)
    assert small.texts() == BEFORE


@dataclass(frozen=True)
class Ended:
    """How a run in a process of its own ended; `left` is what `nth` counts, after it."""

    killed: bool
    error: str = ""
    left: int = 0


def run(small: Small, doing: str, nth: int = 0, how: str = "") -> Ended:
    """Apply or revert in a process whose nth change of the disk kills it, or fails.

    It is forked, for speed: it runs nothing but the tool.
    """
    found = find(small)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        ended = Ended(False, "the run did not come to its end")
        try:
            ended = _run(found, doing, nth, how)
        finally:
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(asdict(ended)))
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return Ended(True)
    return Ended(**json.loads(said))


def _run(found: engines.Installation, doing: str, nth: int, how: str) -> Ended:
    left = nth

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if left == 0:
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)

        return call

    if how == "nobody":
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for name in ("replace", "fsync", "unlink", "fchmod"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        (apply if doing == "apply" else revert)(found)
    except PatchRefusedError as error:
        return Ended(False, str(error), left)
    return Ended(False, "", left)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("doing", ["apply", "revert"])
def test_a_run_killed_anywhere_leaves_the_old_or_the_new_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    from dynamo_worker_ext.patching import manifest

    patches = tmp_path / "patches"
    make_patches(patches)
    monkeypatch.setattr(manifest, "patches_directory", lambda: patches)
    old, new = (BEFORE, AFTER) if doing == "apply" else (AFTER, BEFORE)
    seen = set()
    for nth in range(1, 100):
        small = Small(tmp_path / f"tree{nth}", patches)
        make_tree(small.root)
        clean = small.snapshot().keys()
        small.write(old)
        ended = run(small, doing, nth, "kill")
        if not ended.killed:
            assert not ended.error
            break
        mixed = small.texts() not in (old, new)
        interrupted = small.snapshot().keys() != clean
        assert interrupted or not mixed
        found = find(small)
        status = check(found)
        if interrupted:
            assert "interrupted" in status.refusal
        else:
            assert not status.refusal
        # What comes next repairs first, and says what it found.
        status = apply(found) if nth % 2 else revert(found)
        assert bool(status.notes) == interrupted
        if mixed:
            assert "as it was before" in status.notes[0]
        assert small.texts() == (AFTER if nth % 2 else BEFORE)
        assert small.snapshot().keys() == clean
        assert not status.refusal
        seen.add((mixed, interrupted))
    else:
        raise AssertionError("the run never came to its end")
    assert small.texts() == new
    assert (True, True) in seen
    assert (False, True) in seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("doing", ["apply", "revert"])
def test_a_write_that_fails_anywhere_leaves_all_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    from dynamo_worker_ext.patching import manifest

    patches = tmp_path / "patches"
    make_patches(patches)
    monkeypatch.setattr(manifest, "patches_directory", lambda: patches)
    old, new = (BEFORE, AFTER) if doing == "apply" else (AFTER, BEFORE)
    for nth in range(1, 100):
        small = Small(tmp_path / f"tree{nth}", patches)
        make_tree(small.root)
        clean = small.snapshot().keys()
        small.write(old)
        ended = run(small, doing, nth, "fail")
        assert small.snapshot().keys() == clean
        if ended.error:
            assert "No space left on device; all files are as they were" in ended.error
            assert small.texts() == old
        else:
            # Nothing failed, or only the tidying up, which was then done.
            assert small.texts() == new
            if ended.left > 0:
                break
        assert not check(find(small)).refusal
    else:
        raise AssertionError("the run never came to its end")
    assert small.texts() == new


def test_a_tree_that_may_not_be_written_is_refused(small: Small) -> None:
    if os.getuid() == 0:
        # Only root is not kept out by modes.
        for directory in [small.root, *small.root.parents]:
            if not directory.stat().st_mode & 0o005:
                directory.chmod(directory.stat().st_mode | 0o005)
    old = small.snapshot()
    directories = [small.root, *(path for path in small.root.rglob("*") if path.is_dir())]
    for closed in (directories, directories[1:]):
        for directory in directories:
            directory.chmod(0o555 if directory in closed else 0o777)
        ended = run(small, "apply", how="nobody" if os.getuid() == 0 else "")
        assert "cannot be written: Permission denied; all files are as they were" in ended.error
        assert small.snapshot() == old
    for directory in directories:
        directory.chmod(0o755)


def test_an_interrupted_tree_that_was_changed_since_is_refused(small: Small) -> None:
    (small.root / ".dynamo-worker-ext-patching-sglang.json").write_text('{"doing": "apply"}')
    small.write(AFTER, "sglang/one.py")
    small.write({"sglang/two.py": "something else\n"})
    for act in (apply, revert):
        with pytest.raises(PatchRefusedError, match=r"two\.py has been changed since; reinstall"):
            act(find(small))
    assert small.texts()["sglang/one.py"] == AFTER["sglang/one.py"]


def test_a_journal_that_was_cut_off_is_cleared(small: Small) -> None:
    journal = small.root / ".dynamo-worker-ext-patching-sglang.json"
    for text in ("", "{", "[]", '{"doing": 1'):
        journal.write_text(text)
        assert apply(find(small)).notes
        assert not journal.exists()
        assert small.texts() == AFTER
        journal.write_text(text)
        revert(find(small))
        assert small.texts() == BEFORE


def test_a_journal_of_another_version_is_kept_out_of_the_way(small: Small) -> None:
    journal = small.root / ".dynamo-worker-ext-patching-sglang.json"
    journal.write_text('{"doing": "apply"}')
    info = small.root / f"sglang-{VERSION}.dist-info/METADATA"
    text = info.read_text()
    info.write_text(text.replace(VERSION, "9.9"))
    assert "nothing is known" in apply(find(small)).refusal
    info.write_text(text)
    assert apply(find(small)).notes
    assert small.texts() == AFTER
    assert not journal.exists()
