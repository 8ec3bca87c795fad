"""A hybrid model behind Dynamo's frontends: two vLLM workers of the tiny Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import data_uri, part, picture
from tests.stack import FrontendSpec, Stack

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FRONTENDS = {"vllm": FrontendSpec("vllm", "shm"), "rust": FrontendSpec("rust", "off")}


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hybrid")
    with Stack(tiny_model("qwen3_5"), folder, FRONTENDS) as stack:
        yield stack


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_conversation_about_an_image_stays_where_its_state_is(
    stack: Stack, frontend: str
) -> None:
    content = [part(data_uri(picture())), {"type": "text", "text": "Describe it. " * 8}]
    first = stack.ask(frontend, content)
    assert first.outcome == ("received" if frontend == "vllm" else "raw")
    assert first.answer.cached_tokens == first.predicted_tokens == 0
    again = stack.ask(frontend, content)
    assert (again.text, again.worker, again.outcome) == (first.text, first.worker, "hit")
    assert again.predicted_tokens == again.answer.cached_tokens == again.answer.reusable_tokens > 0

    history = [said("user", content)]
    for question in ("Who made it?", "What else?"):
        history += [said("assistant", again.text), said("user", question + " Say more." * 8)]
        turn = stack.ask(frontend, content, messages=history)
        assert (turn.worker, turn.outcome) == (first.worker, "hit")
        # The prompt before was left with a state, its answer without.
        assert turn.predicted_tokens == turn.answer.cached_tokens == again.answer.reusable_tokens
        again = turn
