"""SGLang on the CPU, before and after its patches: what callers call their media is what counts.

Each version is unpacked in front of the environment for SGLang (`launch/setup.sh sglang`, or the
Python in `DWE_SGLANG_PYTHON`), whose dependencies are those of one version, and close enough for
the others. Each is asked before and after, with images and with processed images.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynamo_worker_ext.patching import engines
from dynamo_worker_ext.patching.apply import apply, check, revert
from dynamo_worker_ext.patching.state import State
from tests.patching.sglang_engine import A_TOO, B_TOO, A, B
from tests.patching.wheels import unpack

REPO = Path(__file__).parents[2]
SHM = Path("/dev/shm")
PYTHON = Path(os.environ.get("DWE_SGLANG_PYTHON") or REPO / ".venv/sglang/bin/python")
VERSIONS = ["0.5.11", "0.5.12.post1", "0.5.14", "0.5.21", "0.5.23"]
#: What 0.5.23 imports and the environment for 0.5.21 does not have.
MORE = {"0.5.23": ["apache-tvm-ffi==0.1.11", "xgrammar==0.2.7"]}
#: Before 0.5.13 samples of one image request end the engine, with names or without.
CANNOT_SAMPLE = {"0.5.11", "0.5.12.post1"}
FAMILIES = ["qwen2_vl", "qwen3_vl"]
CHECKS = ["mm-hashes", "mm-hashes-batch", "padded-input-ids"]
NOT_NEEDED_HERE = ("sglang/multimodal_gen/", "sglang/test/")
TIMEOUT_S = 600.0

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
Seen = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Phase:
    """What one version did, as it is or patched.

    Attributes:
        faults: what its checks of behaviour found, by check.
        seen: what its engines answered, by family and step.
        status: how the engines ended, by family.
        log: what was printed.
    """

    faults: dict[str, str]
    seen: dict[str, Seen]
    status: dict[str, int]
    log: str


@dataclass(frozen=True)
class Runs:
    """One version, before and after.

    Attributes:
        patches: those that change its files.
        command: exit status and output of `verify`, for one version; importing takes long.
    """

    version: str
    patches: list[str]
    before: Phase
    after: Phase
    command: tuple[int, str] | None


@pytest.fixture(scope="module", params=VERSIONS)
def runs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str], Path],
) -> Iterator[Runs]:
    """An unpacked version is asked, patched, asked again and reverted."""
    version: str = request.param
    folder = tmp_path_factory.mktemp("sglang")
    try:
        tree = Tree(version, folder)
        models = [tiny_model(family) for family in FAMILIES]
        needed = [one.patch.name for one in check(tree.found).patches if one.patch.files]
        before = tree.ask("before", models)
        assert apply(tree.found).state is State.APPLIED
        after = tree.ask("after" if version in CANNOT_SAMPLE else "samples", models)
        verify = ["-m", "dynamo_worker_ext.patching", "verify", "--json", "--site-packages"]
        command = tree.run(*verify, tree.root) if version == "0.5.21" else None
        assert revert(tree.found).state is State.APPLICABLE
        yield Runs(version, needed, before, after, command)
    finally:
        shutil.rmtree(folder)


class Tree:
    """One unpacked version, and runs of it. What a run leaves behind goes with it."""

    def __init__(self, version: str, folder: Path) -> None:
        self.folder = folder
        wheel, site = f"sglang=={version}", folder / "site-packages"
        self.root = unpack(wheel, site, lambda name: not name.startswith(NOT_NEEDED_HERE))
        self.found = engines.find("sglang", self.root)
        more = [unpack(one, folder / one.partition("=")[0]) for one in MORE.get(version, [])]
        stand_in = REPO / "launch/cpu/sgl_kernel_stand_in"
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [self.root, *more, stand_in, REPO])),
            "TMPDIR": str(folder),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
        }

    def run(self, *command: str | Path) -> tuple[int, str]:
        """The exit status, and all that was printed."""
        assert PYTHON.exists(), (
            f"there is no {PYTHON}: make it with launch/setup.sh sglang, or name one in "
            "DWE_SGLANG_PYTHON"
        )
        apart = own_shm()
        before = set(os.listdir(SHM))
        out, log = self.folder / "out.txt", self.folder / "log.txt"
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                [*apart, PYTHON, *command],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not apart:
                    remove_stray(before)
        assert not status or "verify" in command, log.read_text(errors="replace")[-3000:]
        return status, out.read_text(errors="replace")

    def ask(self, phase: str, models: list[Path]) -> Phase:
        """Run the checks and an engine of each model."""
        out = self.folder / phase
        out.mkdir()
        _, log = self.run(REPO / "tests/patching/sglang_engine.py", out, phase, *models)
        log += (self.folder / "log.txt").read_text(errors="replace")
        seen = {}
        for model in models:
            lines = (out / f"{model.name}.jsonl").read_text().splitlines()
            seen[model.name] = {one.pop("step"): one for one in map(json.loads, lines)}
        status = {model.name: int((out / f"{model.name}.status").read_text()) for model in models}
        return Phase(json.loads((out / "checks.json").read_text()), seen, status, log)


def own_shm() -> list[str]:
    """Runs a command with a /dev/shm of its own, where Linux allows that."""
    mount = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    for unshare in (["unshare", "-m"], ["unshare", "-Urm"]):
        apart = [*unshare, "sh", "-c", mount, "sh"]
        if not subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
            return apart
    return []


def remove_stray(before: set[str]) -> None:
    """Remove what engines leave in /dev/shm, new and mapped by no process."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += maps.read_text()
        except OSError:
            continue
    for path in SHM.iterdir():
        new = path.name not in before and path.name.startswith(("sglang_", "psm_", "sem.mp-"))
        if new and str(path) not in mapped:
            path.unlink(missing_ok=True)


def test_checks_of_behaviour_fail_before_and_pass_after(runs: Runs) -> None:
    failed = [name for name in CHECKS if runs.before.faults[name]]
    assert failed == (CHECKS if runs.patches == ["mm-hashes"] else runs.patches)
    assert runs.after.faults == dict.fromkeys(CHECKS, "")


@pytest.mark.parametrize("runs", ["0.5.21"], indirect=True)
def test_verify_runs_them_from_the_command_line(runs: Runs) -> None:
    assert runs.command
    status, said = runs.command
    assert status == 0, said
    assert {proof["check"]: proof["fault"] for proof in json.loads(said)[0]["proofs"]} == (
        dict.fromkeys(CHECKS, "")
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_applied_and_tokens_are_what_they_were(runs: Runs, family: str) -> None:
    before, after = runs.before.seen[family], runs.after.seen[family]
    assert "processed two" in before, runs.before.log[-3000:]
    expect_defects(runs.version, family, runs.before.status[family], before)
    assert runs.after.status[family] == 0, runs.after.log[-3000:]
    assert not [step for step in after if "error" in after[step]]
    # Without names nothing has changed.
    for step in ("raw", "raw b", "processed", "processed b", "processed two"):
        assert after[step] == before[step]
    expect_tokens(after)
    expect_names(after)
    assert ("samples" in after) == (runs.version not in CANNOT_SAMPLE)


def expect_defects(version: str, family: str, status: int, before: Seen) -> None:
    """What an unpatched engine does with names: the reason for each patch."""
    if version in CANNOT_SAMPLE:
        assert status == 0
        for step in ("named", "processed named"):
            assert "unexpected keyword argument 'mm_hashes'" in before[step]["error"]
    elif version == "0.5.14":
        assert status == 0
        assert before["named"]["pads"]
        assert not before["processed named"]["pads"]
    elif family == "qwen3_vl":
        assert status == -signal.SIGKILL
        assert "named" not in before
    else:
        assert status == -signal.SIGKILL
        assert before["named"]["hashes"] == [A]
        assert "processed named" not in before


def expect_tokens(after: Seen) -> None:
    """A picture gives the same tokens under every name."""
    [raw], [raw_b] = after["raw"]["tokens"], after["raw b"]["tokens"]
    assert raw != raw_b
    for step in ("named", "named again", "renamed", "no name", "too many names"):
        assert after[step]["tokens"] == [raw], step
    assert after["wide name"]["tokens"] == [raw_b]
    assert after["batch"]["tokens"] == [raw, raw_b]
    if "samples" in after:
        assert after["samples"]["tokens"] == [raw_b, raw_b]
    # Of another picture under a name that is taken the cache gives the first one's answer.
    assert after["misnamed"]["tokens"] == [raw]
    assert after["processed named"]["tokens"] == after["processed b"]["tokens"]
    for step in ("processed two named", "processed one named"):
        assert after[step]["tokens"] == after["processed two"]["tokens"], step


def expect_names(after: Seen) -> None:
    """Names are hashes, pad values follow them, and the prefix cache goes by them."""
    assert all(seen["pads"] for step, seen in after.items() if "pads" in seen)
    own, own_b = after["raw"]["hashes"], after["raw b"]["hashes"]
    [processed, _] = after["processed two"]["hashes"]
    expected = {
        "named": [A],
        "named again": [A],
        "renamed": [A_TOO],
        "misnamed": [A],
        "two named": [A_TOO, B],
        "no name": own,
        "wide name": own_b,
        "too many names": own,
        "processed named": [B_TOO],
        "processed two named": [A_TOO, B_TOO],
        "processed one named": [processed, B_TOO],
        "batch": [A_TOO, B],
    }
    assert {step: after[step]["hashes"] for step in expected} == expected
    # All but the last token under a name that has been seen, what is before the image otherwise.
    [whole] = after["raw"]["prompt"]
    [text] = after["raw b"]["cached"]
    assert text < whole - 1
    for step, cached in [("named", text), ("renamed", text), ("processed named", None)]:
        assert after[step]["cached"] == [cached or after["processed b"]["cached"][0]], step
    for step in ("named again", "misnamed", "no name", "wide name", "too many names"):
        assert after[step]["cached"] == [whole - 1], step
    assert after["batch"]["cached"] == [whole - 1, text]
