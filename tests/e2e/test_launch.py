"""The launch scripts, run as a user runs them.

Every process that a script starts inherits a mark in its environment, by which it is found
whatever it does to its name, its parent or its session.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.engines import ENGINES, SGLANG
from tests.pictures import data_uri, part, picture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

REPO = Path(__file__).resolve().parents[2]
LAUNCH = REPO / "launch"
TOPOLOGIES = (
    "agg_multimodal_router.sh", "disagg.sh", "multimodal_disagg.sh", "multimodal_epd.sh",
)  # fmt: skip
SCRIPTS = (*TOPOLOGIES, "demo.sh", "demo_client.py", "setup.sh", "test.sh")
MARK = "DWE_LAUNCH_TEST"

#: Gives SIGINT its default meaning back, which children of a script in the background lack.
INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Run:
    """One run of a script, and what it leaves; use it as a context manager.

    Attributes:
        seen: the most processes of it that there were at once.
    """

    def __init__(self, folder: Path, script: str, *args: str) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        env = {
            **os.environ,
            name: value,
            "DWE_PYTHON": sys.executable,
            "DWE_SGLANG_PYTHON": SGLANG.python,
            "SPT_NOENV": "1",  # setproctitle of the engines would overwrite the environment
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        env.pop("NO_COLOR", None)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", INTERRUPTIBLE, str(LAUNCH / script), *args],
                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        self.seen = 0
        self.segments: set[Path] = set()
        self._done = threading.Event()
        self._observer = threading.Thread(target=self._observe)

    def __enter__(self) -> Self:
        self._observer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._observer.join()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def processes(self) -> list[int]:
        """Everything alive that the script started, itself included."""
        mark = self._mark.encode()
        return [pid for pid in _pids() if mark in _read(Path(f"/proc/{pid}/environ")).split(b"\0")]

    def wait(self, timeout: float) -> int:
        return self.popen.wait(timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.popen.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.1)

    def assert_nothing_is_left(self) -> None:
        assert self.seen, "the observer saw nothing"
        assert [_read(Path(f"/proc/{pid}/cmdline")) for pid in self.processes()] == []
        assert sorted(path for path in self.segments if path.exists()) == []
        # Its folder of temporary files, which is named in what it says.
        assert [
            path for path in re.findall(r"/\S*/dwe\.\w+", self.err) if Path(path).exists()
        ] == []

    def _observe(self) -> None:
        while not self._done.wait(0.5):
            pids = self.processes()
            self.seen = max(self.seen, len(pids))
            for pid in pids:
                maps = _read(Path(f"/proc/{pid}/maps")).decode(errors="replace")
                self.segments |= {Path(p) for p in re.findall(r"/dev/shm/\S+", maps)}


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read(path: Path) -> bytes:
    """A file of /proc; nothing where its process is gone or another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _help(script: str) -> str:
    command = [sys.executable] if script.endswith(".py") else []
    done = subprocess.run(
        [*command, LAUNCH / script, "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_exits_with_0_and_names_every_flag(script: str) -> None:
    text = (LAUNCH / script).read_text()
    if script.endswith(".py"):
        flags = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))
    else:
        if script in TOPOLOGIES:
            text += (LAUNCH / "topology.sh").read_text()
        parser = re.search(r"^while \(\(\$#\)\); do$.*?^done$", text, re.DOTALL | re.MULTILINE)
        assert parser is not None
        counts = re.search(r"COUNT_FLAG=.*", text)
        given = parser[0] + (counts[0] if counts else "")
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", given))
    assert flags
    named = set(re.findall(r"--[a-z][a-z-]+", _help(script)))
    assert flags - named == set()


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.endswith(".sh")])
def test_an_unknown_flag_is_refused(script: str) -> None:
    done = subprocess.run(
        [LAUNCH / script, "--no-such-flag"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "--no-such-flag" in done.stdout + done.stderr
    assert "--help" in done.stdout + done.stderr


def test_a_model_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [LAUNCH / "agg_multimodal_router.sh", "--model", tmp_path / "nothing"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert time.monotonic() - begin < 10
    assert str(tmp_path / "nothing") in done.stderr
    assert "no such folder" in done.stderr


@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_demo_shows_what_it_promises_and_leaves_nothing(tmp_path: Path, engine: str) -> None:
    with Run(tmp_path, "demo.sh", "--json", "--engine", engine) as run:
        assert run.wait(400) == 0, run.err
        run.assert_nothing_is_left()
        assert run.seen >= 6, "two workers with their engines, a frontend and the script"
        assert run.segments, "the observer saw no segment at all"
        report = json.loads(run.out)
        assert "\x1b" not in run.out + run.err
    assert report["ok"]
    assert [check for check in report["checks"] if check["wrong"]] == []
    rows = report["requests"]
    assert [row["http_status"] for row in rows] == [200] * 8
    assert [row["outcome"] for row in rows if "image" not in row["request"]] == ["text", "text"]
    for first, again in zip(rows[::2], rows[1::2], strict=True):
        full = again["prompt_tokens"] // report["block_size"]
        assert again["request"] == f"{first['request']} again"
        assert again["worker"] == first["worker"]
        assert again["bytes_received"] == 0
        assert again["blocks_overlapping"] == full > 0
        assert again["cached_tokens"] == full * report["block_size"]
        assert again["text"] == first["text"]
    by_name = {row["request"]: row for row in rows}
    assert by_name["image A"]["outcome"] == "received"
    assert by_name["image A"]["bytes_received"] > 1_000_000
    assert by_name["image A again"]["outcome"] == "hit"
    assert by_name["images A, B"]["text"] != by_name["images B, A"]["text"]


def ask(url: str, model: str, content: object) -> str:
    """The greedy answer to one chat request."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    asked = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("script", "engine", "roles"),
    [
        ("disagg.sh", "vllm", ("prefill", "decode")),
        ("multimodal_epd.sh", "sglang", ("encode", "worker")),
        ("multimodal_disagg.sh", "vllm", ("encode", "prefill", "decode")),
    ],
)
def test_workers_for_parts_of_a_request_serve_a_tiny_model(
    tmp_path: Path, script: str, engine: str, roles: tuple[str, ...]
) -> None:
    ready = tmp_path / "ready.json"
    with Run(
        tmp_path, script, "--tiny", "--engine", engine, "--http-port", "0",
        "--log-dir", str(tmp_path / "logs"), "--ready-file", str(ready), "--drain-timeout", "5",
    ) as run:  # fmt: skip
        run.wait_for(ready.exists, 400)
        deployment = json.loads(ready.read_text())
        assert [worker["name"].rstrip("0") for worker in deployment["workers"]] == [*roles]
        image = part(data_uri(picture(1)))
        answers = {
            ask(deployment["url"], "tiny", [image, {"type": "text", "text": "Describe it"}])
            for _ in range(2)
        }
        run.popen.send_signal(signal.SIGTERM)
        assert run.wait(120) == 0, run.err
        run.assert_nothing_is_left()
    assert len(answers) == 1


def test_both_engines_serve_side_by_side(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    ready, cards = tmp_path / "ready.json", []
    engines = ("--dtype", "float32"), ("--dtype", "float32", "--max-total-tokens", "32768")
    lengths = ("--max-model-len", "8192", "--enforce-eager"), ("--context-length", "8192")
    with Run(
        tmp_path, "agg_multimodal_router.sh", "--model", str(tiny_model("qwen2_5_vl")),
        "--engine", "both", "--served-model-name", "tiny", "--cpu", "--http-port", "0",
        "--log-dir", str(tmp_path / "logs"), "--ready-file", str(ready), "--drain-timeout", "1",
        "--", *engines[0], *lengths[0], "--", *engines[1], *lengths[1],
    ) as run:  # fmt: skip
        run.wait_for(ready.exists, 400)
        deployment = json.loads(ready.read_text())
        content = [part(data_uri(picture(1))), {"type": "text", "text": "Describe it"}]
        answers = set()
        for name in ("tiny-vllm", "tiny-sglang"):
            answers.add(ask(deployment["url"], name, content))
        for file in Path(deployment["discovery"]).glob("v1/mdc/*"):
            cards.append(json.loads(file.read_text())["card_json"]["runtime_config"])
        run.popen.send_signal(signal.SIGTERM)
        assert run.wait(120) == 0, run.err
        run.assert_nothing_is_left()
    assert len(answers) == 1, f"both engines see the same picture: {answers}"
    assert {card["runtime_data"]["backend_framework"] for card in cards} == {"vllm", "sglang"}


def test_a_worker_that_cannot_start_is_shown_and_stops_everything(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    with Run(
        tmp_path, "agg_multimodal_router.sh", "--model", str(tiny_model("qwen2_5_vl")),
        "--workers", "2", "--http-port", "0", "--log-dir", str(tmp_path / "logs"),
        "--ready-file", str(tmp_path / "ready.json"), "--drain-timeout", "1",
        "--", "--mm-transfer", "pigeon",
    ) as run:  # fmt: skip
        assert run.wait(200) == 1, run.err
        run.assert_nothing_is_left()
    assert "ended while starting, with status 2" in run.err
    assert "--mm-transfer 'pigeon'" in run.err, "the end of its log is shown"
    assert str(tmp_path / "logs" / "worker") in run.err
    assert not (tmp_path / "ready.json").exists()


def test_an_interrupt_during_the_start_leaves_nothing(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    with Run(
        tmp_path, "agg_multimodal_router.sh", "--model", str(tiny_model("qwen2_5_vl")),
        "--workers", "2", "--http-port", "0", "--log-dir", str(tmp_path / "logs"),
        "--drain-timeout", "1",
    ) as run:  # fmt: skip
        run.wait_for(lambda: run.seen >= 4, 60)
        run.popen.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, run.err
        run.assert_nothing_is_left()
    assert "everything is stopped" in run.err
