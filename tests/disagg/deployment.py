"""What tests of vLLM's encode workers start: deployments behind Dynamo's Rust frontend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.stack import FrontendSpec, Seen, Stack

ROLE = "--disaggregation-mode"
RUST = FrontendSpec("rust", "off")

#: Tests may run on machines that are busy with others.
START_TIMEOUT_S = 500.0


class Deployment(Stack):
    """A stack that waits for longer."""

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        super().wait_ready(timeout)


def aggregated_answers(
    model: Path, folder: Path, prompts: Mapping[str, list[Any]]
) -> dict[str, str]:
    """What one aggregated worker answers; it is gone afterwards."""
    with Deployment(model, folder, {"rust": RUST}, workers=1) as stack:
        return {name: stack.chat("rust", content).text for name, content in prompts.items()}


def ask(stack: Stack, *content: Any, **options: Any) -> Seen:
    """One request that is answered."""
    seen = stack.ask("rust", list(content), **options)
    assert seen.answer.status == 200, seen.answer.body
    return seen
