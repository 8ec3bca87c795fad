"""What tests of vLLM's roles start, and what they ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.pictures import data_uri, part, picture
from tests.stack import FrontendSpec, Process, Seen, Stack

ROLE = "--disaggregation-mode"
RUST = FrontendSpec("rust", "off")

ONE, OTHER = part(data_uri(picture(201))), part(data_uri(picture(202)))

#: What one aggregated worker answers to these is the measure; see `conftest`.
PROMPTS: Mapping[str, list[Any]] = {
    "text": ["one two three four five six seven eight " * 8],
    "one image": [ONE, "Describe the image"],
    "two images": [ONE, OTHER, "Compare the images"],
    "two images swapped": [OTHER, ONE, "Compare the images"],
    "one image twice": [OTHER, OTHER, "Compare the images"],
    "image at the end": ["What is in this image?", ONE],
}

#: Tests may run on machines that are busy with others.
START_TIMEOUT_S = 500.0


class Deployment(Stack):
    """A stack that waits for longer."""

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        super().wait_ready(timeout)


def the(stack: Stack, role: str) -> Process:
    """The one live worker of a role."""
    (worker,) = [one for one in stack.worker if one.role == role and one.alive]
    return worker


def ask(stack: Stack, *content: Any, **options: Any) -> Seen:
    """One request that is answered."""
    seen = stack.ask("rust", list(content), **options)
    assert seen.answer.status == 200, seen.answer.body
    return seen
