"""How an SGLang worker starts, and on which versions of SGLang."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.engines import ROOT, SGLANG
from tests.patching.test_sglang import MORE, NOT_NEEDED_HERE
from tests.patching.wheels import unpack
from tests.pictures import data_uri, part, picture
from tests.stack import BASE_ENV, FrontendSpec, Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


def start(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A worker whose command line is wrong, or that only says something."""
    return subprocess.run(
        [SGLANG.python, "-m", SGLANG.module, *args],
        env={**os.environ, **BASE_ENV, **SGLANG.env, **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--disaggregation-mode", "decode", "--route-to-encoder"), "--route-to-encoder is for"),
        (("--embedding-worker",), "--embedding-worker is not served"),
        (("--schedule-low-priority-values-first",), "--schedule-low-priority-values-first: in"),
        (("--kv-events-config", "{"), "--kv-events-config is not JSON"),
        (("--mm-cache-mb", "-1"), "--mm-cache-mb is -1"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    args: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    ended = start("--model-path", str(tmp_path), *args)
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert f"dynamo_worker_ext.sglang: {says}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_has_every_group() -> None:
    text = start("--help").stdout
    for flag in ("--mm-transfer", "--mm-cache-mb", "--endpoint", "--page-size", "--model-path"):
        assert flag in text


def test_an_engine_that_cannot_start_is_an_error_and_leaves_nothing(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("qwen2"), model)
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = set(os.listdir("/dev/shm"))
    ended = start("--model-path", str(model), *SGLANG.args(1), env={"TMPDIR": str(temporary)})
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "dynamo_worker_ext.sglang: SGLang did not start" in ended.stderr
    assert list(temporary.glob("dwe-kv-*")) == []
    left = set(os.listdir("/dev/shm")) - before
    assert [name for name in left if name.startswith("sglang_loads_")] == []


def test_a_text_model_is_served_as_well(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    frontends = {"rust": FrontendSpec("rust", "off")}
    model = tiny_model("qwen2")
    with Stack(model, tmp_path / "s", frontends, workers=1, engine=SGLANG) as stack:
        prompt = "one two three four five six seven eight " * 8
        first, again = stack.ask("rust", prompt), stack.ask("rust", prompt)
        assert (first.outcome, again.outcome) == ("text", "text")
        assert again.text == first.text
        assert again.answer.cached_tokens == again.answer.reusable_tokens > 0
        refused = stack.chat("rust", [part(data_uri(picture(size=56))), "Describe it"])
        assert 400 <= refused.status < 500, refused.body
        # Everything that a client may ask for, and what this engine cannot do.
        options = {"stop": ["zz"], "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.5}
        asked = stack.chat("rust", "hello", n=2, temperature=1.0, **options)
        assert asked.status == 200, asked.body
        assert len(asked.body["choices"]) == 2
        assert len(asked.body["choices"][0]["logprobs"]["content"]) == 8
        for bad in ({"seed": 3, "temperature": 1.0}, {"top_p": 2.0}, {"guided_regex": "a"}):
            nvext = {"nvext": bad} if "guided_regex" in bad else bad
            assert stack.chat("rust", "hello", **nvext).status == 400, bad


@pytest.fixture(scope="module")
def newer(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A worker on SGLang 0.5.23, whose scheduler would die of a named image."""
    version, folder = "0.5.23", tmp_path_factory.mktemp("newer")
    site = folder / "site-packages"
    unpack(f"sglang=={version}", site, lambda name: not name.startswith(NOT_NEEDED_HERE))
    for requirement in MORE[version]:
        unpack(requirement, site)
    stack = Stack(
        tiny_model("qwen3_vl"),
        folder / "stack",
        {"shm": FrontendSpec("vllm", "shm"), "rust": FrontendSpec("rust", "off")},
        workers=1,
        engine=SGLANG,
        worker_env={"PYTHONPATH": str(site)},
    )
    with stack:
        yield stack


@pytest.mark.parametrize("frontend", ["shm", "rust"])
def test_wide_pads_are_routed_exactly(newer: Stack, frontend: str) -> None:
    said = newer.worker[0].log.read_text()
    assert "this worker: sglang 0.5.23" in said
    assert "applied to raw and processed media, wide pads, padded ids rebuilt" in said
    assert "text_prefix" not in said
    uri = part(data_uri(picture()))
    first = newer.ask(frontend, [uri, "Describe it"])
    assert first.answer.status == 200, first.answer.body
    assert first.outcome == ("raw" if frontend == "rust" else "received")
    again = newer.ask(frontend, [uri, "Describe it"])
    assert again.outcome == "hit"
    assert again.text == first.text
    assert again.answer.cached_tokens == again.answer.reusable_tokens > 0
    assert again.predicted_tokens == again.answer.cached_tokens
    other = newer.ask(frontend, [part(data_uri(picture())), "Describe it"])
    assert other.answer.cached_tokens == other.predicted_tokens == 0
