"""Every family that the engines load on a CPU is exact, by the command that operators run.

vLLM loads all of tinyvlm's; Phi-3-vision with weights that it draws itself, because its vision
tower has a fixed size. SGLang 0.5.21 loads the Qwen-VL families: LLaVA-1.5 fails in its model class
("'Conv2d' object has no attribute 'num_embeddings'"), LLaVA-NeXT in its processor (token ids where
transformers wants text), and it has no Phi-3-vision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.engines import BLOCK, ENGINES
from tests.model_folders import variant
from tests.stack import BASE_ENV, Process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

TinyModel = Callable[[str], Path]

CASES = [
    ("vllm", "qwen2_vl", "pad_value", 3),
    ("vllm", "qwen2_5_vl", "block_mm_infos", 3),
    ("vllm", "qwen3_vl", "pad_value", 3),
    ("vllm", "qwen3_5", "pad_value", 3),
    ("vllm", "llava", "pad_value", 3),
    ("vllm", "llava_next", "pad_value", 3),
    ("vllm", "phi3_v", "pad_value", 2),
    ("sglang", "qwen2_vl", "pad_value", 3),
    ("sglang", "qwen2_5_vl", "pad_value", 3),
    ("sglang", "qwen3_vl", "pad_value", 3),
]


def parity(
    name: str,
    model: Path,
    out: Path,
    *args: str,
    module: str = "dynamo_worker_ext.parity",
    engine_args: tuple[str, ...] = (),
    **env: str,
) -> tuple[int, str]:
    """Run the command: its exit status and what it printed."""
    engine, printed = ENGINES[name], out / "printed"
    command = [engine.python, "-m", module, "--model", str(model), "--engine", name]
    process = Process(
        name,
        [*command, *args, "--", *engine.args(BLOCK), *engine_args],
        {**BASE_ENV, **engine.env, "HF_MODULES_CACHE": str(out / "modules"), **env},
        log=out / "log",
        url="",
        output=printed,
    )
    process.start()
    try:
        status = process.wait(400)
    finally:
        process.kill()
    assert status in (0, 1), process.tail()
    return status, printed.read_text()


def case(
    tiny_model: TinyModel, out: Path, *, engine: str, family: str, mode: str, images: int
) -> Callable[[], tuple[int, str]]:
    """The command for one of `CASES`, whose model is there."""
    model, own = tiny_model(family), ()
    if family == "phi3_v":
        # The real ones have a window, as long as their context.
        model = variant(model, out / family, config=lambda c: c.update(sliding_window=32768))
        # float32: its full-size tower takes minutes on a CPU that does not multiply bfloat16.
        own = ("--load-format", "dummy", "--trust-remote-code", "--dtype", "float32")
    options = ("--mode", mode, "--images", str(images), "--json")
    return partial(parity, engine, model, out, *options, engine_args=own)


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[tuple[int, str]]]]:
    """What the command says of the cases that are asked for, by the test's name. Two run at a
    time: an engine that starts keeps one core busy."""
    commands = {
        item.name: case(tiny_model, tmp_path_factory.mktemp("parity"), **item.callspec.params)
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_a_family_is_exact
    }
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(command) for name, command in commands.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("engine", "family", "mode", "images"), CASES)
def test_a_family_is_exact(
    request: pytest.FixtureRequest,
    reports: Mapping[str, Future[tuple[int, str]]],
    engine: str,
    family: str,
    mode: str,
    images: int,
) -> None:
    status, out = reports[request.node.name].result()
    report = json.loads(out)
    wrong = [one for one in report["verdicts"] if one["by_processor"] or one["by_files"] != ""]
    assert wrong == []
    assert len(report["verdicts"]) == {2: 7, 3: 10}[images]
    assert (status, report["exact"], report["files"]) == (0, True, "")


def test_a_worker_that_publishes_other_pads_is_found_out(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    switch = tmp_path / "broken"
    switch.write_text("other_pads")
    status, out = parity(
        "vllm", tiny_model("qwen2_5_vl"), tmp_path, "--images", "1", module="tests.broken_parity",
        BROKEN_NORMALIZER=str(switch),
    )  # fmt: skip
    assert status == 1
    assert out.splitlines()[-1] == "not exact, 1 of 3"
    found = re.search(r"token \d+: a frontend has (\d+), the worker published (\d+)", out)
    assert found is not None
    assert int(found[2]) == int(found[1]) + 1
