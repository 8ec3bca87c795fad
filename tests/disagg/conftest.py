"""What the files about one engine share: its aggregated worker, which takes a start of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.disagg.deployment import PROMPTS, RUST, Deployment
from tests.disagg.sglang_deployment import DOORS, questions
from tests.engines import SGLANG
from tests.stack import Stack


@pytest.fixture(scope="session")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen2_5_vl")


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What one aggregated vLLM worker answers to `PROMPTS`; it is gone afterwards."""
    folder = tmp_path_factory.mktemp("aggregated")
    with Deployment(model, folder, {"rust": RUST}, workers=1) as stack:
        return {name: stack.chat("rust", content).text for name, content in PROMPTS.items()}


@pytest.fixture(scope="session")
def asked() -> Mapping[str, Mapping[str, Any]]:
    """What SGLang's roles are asked, at each door."""
    return {door: questions(door) for door in DOORS}


@pytest.fixture(scope="session")
def sglang_expected(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    asked: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Mapping[str, str]]:
    """What one aggregated SGLang worker answers to them; it is gone afterwards."""
    folder = tmp_path_factory.mktemp("aggregated")
    with Stack(model, folder, {"rust": RUST}, workers=1, engine=SGLANG) as stack:
        return {
            door: {name: stack.chat("rust", content).text for name, content in contents.items()}
            for door, contents in asked.items()
        }
