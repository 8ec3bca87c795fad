"""What a chat or completion client can ask for, on a text-only model with a LoRA adapter, through
both of Dynamo's frontends and a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_adapter
from tests.stack import Answer, FrontendSpec, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = "the quick brown fox jumps over the lazy dog and asks what is in this picture " * 3
FRONTENDS = ("vllm", "rust")


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("options")
    model = tiny_model("qwen2")
    make_adapter(model, folder / "adapter")
    with Stack(
        model=model,
        folder=folder,
        frontends={"vllm": FrontendSpec("vllm"), "rust": FrontendSpec("rust")},
        workers=1,
        module="dynamo_worker_ext.vllm",
        worker_args=("--enable-lora", "--lora-modules", f"my-lora={folder / 'adapter'}"),
        worker_env={"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_CANARY_WAIT_TIME": "1"},
    ) as running:
        yield running


@pytest.fixture(params=FRONTENDS)
def frontend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def chat(stack: Stack, frontend: str, content: str = PROMPT, **options: Any) -> Answer:
    return stack.post(frontend, "/v1/chat/completions", stack.body(content, **options))


def texts(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    choices = sorted(answer.body["choices"], key=lambda choice: choice["index"])
    return [choice["message"]["content"] for choice in choices]


def test_a_text_only_model_is_served_and_repeats_are_cached(stack: Stack, frontend: str) -> None:
    first = chat(stack, frontend, f"{frontend} {PROMPT}")
    again = chat(stack, frontend, f"{frontend} {PROMPT}")
    assert first.text == again.text
    assert first.usage["completion_tokens"] == 8
    assert again.cached_tokens >= again.prompt_tokens // 32 * 32 - 32


def test_media_for_a_text_only_model_is_refused(stack: Stack) -> None:
    url = "data:image/png;base64,AAAA"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
    for name in FRONTENDS:
        assert 400 <= stack.post(name, "/v1/chat/completions", stack.body(content)).status < 500


def test_sampling_follows_the_seed(stack: Stack, frontend: str) -> None:
    hot = {"temperature": 2.0, "max_tokens": 16}
    one, same, other = (chat(stack, frontend, seed=seed, **hot).text for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_n_choices_are_streamed_apart_and_counted_together(stack: Stack, frontend: str) -> None:
    answer = chat(stack, frontend, n=3, temperature=2.0, seed=5, max_tokens=8)
    choices = texts(answer)
    assert len(choices) == 3
    assert len(set(choices)) > 1
    assert answer.usage["completion_tokens"] == 24


def test_generation_ends_at_the_length(stack: Stack, frontend: str) -> None:
    answer = chat(stack, frontend, max_tokens=5)
    assert answer.usage["completion_tokens"] == 5
    assert answer.body["choices"][0]["finish_reason"] == "length"


def test_generation_ends_at_a_stop_string(stack: Stack, frontend: str) -> None:
    whole = chat(stack, frontend, max_tokens=32).text
    # Letters only: a stop string cannot match bytes that are no text.
    stop = re.findall(r"[a-z]{3}", whole)[3]
    # The Rust frontend (Dynamo 1.6.1) drops stop strings where it is told to ignore EOS.
    answer = chat(stack, frontend, max_tokens=32, stop=[stop], ignore_eos=False)
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    assert stop not in answer.text
    assert whole.startswith(answer.text)


def test_min_tokens_and_penalties_reach_the_engine(stack: Stack, frontend: str) -> None:
    answer = chat(stack, frontend, min_tokens=7, max_tokens=12, ignore_eos=True)
    assert answer.usage["completion_tokens"] == 12
    plain, penalised = (
        chat(stack, frontend, max_tokens=64, **options).text
        for options in ({}, {"frequency_penalty": 2.0, "presence_penalty": 2.0})
    )
    assert plain != penalised


def test_logprobs_come_with_every_token(stack: Stack, frontend: str) -> None:
    answer = chat(stack, frontend, max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.body["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) >= 3 for entry in content)


@pytest.mark.parametrize(
    ("guided", "fits"),
    [
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[ab]{4}"}, lambda text: len(text) == 4 and set(text) <= {"a", "b"}),
        (
            {"guided_json": {"type": "object", "properties": {"x": {"type": "boolean"}},
                             "required": ["x"], "additionalProperties": False}},
            lambda text: isinstance(json.loads(text)["x"], bool),
        ),
        ({"guided_grammar": 'root ::= "ok" | "fine"'}, lambda text: text in ("ok", "fine")),
    ],
    ids=["choice", "regex", "json", "grammar"],
)  # fmt: skip
def test_guided_decoding_guides(
    stack: Stack, frontend: str, guided: dict[str, Any], fits: Callable[[str], bool]
) -> None:
    answer = chat(
        stack, frontend, max_tokens=64, temperature=1.0, seed=3, ignore_eos=False, **guided
    )
    assert fits(answer.text), answer.text


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 7}, {"max_tokens": -5}, {"n": 0}, {"top_k": -9}]
)
def test_what_the_engine_cannot_honour_is_a_4xx(
    stack: Stack, frontend: str, wrong: dict[str, Any]
) -> None:
    assert 400 <= chat(stack, frontend, **wrong).status < 500


def test_a_salt_keeps_caches_apart(stack: Stack) -> None:
    # The vLLM chat processor of Dynamo 1.6.1 drops the salt, so only the other one is asked.
    body = stack.body(f"salt {PROMPT}")
    first, same, other = (
        stack.post("rust", "/v1/chat/completions", {**body, "nvext": {"cache_salt": salt}})
        for salt in ("a", "a", "b")
    )
    assert first.text == same.text == other.text
    assert same.cached_tokens > 0
    assert other.cached_tokens == 0


def test_completions_are_served_too(stack: Stack) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    answer = stack.post("rust", "/v1/completions", body)
    assert answer.status == 200, answer.body
    assert answer.body["usage"]["completion_tokens"] == 6


def test_an_adapter_is_a_model_of_its_own_and_routed_exactly(stack: Stack, frontend: str) -> None:
    def ask(model: str) -> Answer:
        body = {**stack.body(f"lora {frontend} {PROMPT}"), "model": model}
        return stack.post(frontend, "/v1/chat/completions", body)

    wait_for(lambda: ask("my-lora").status == 200, "the adapter to be known")
    base, adapted, again = ask("tiny"), ask("my-lora"), ask("my-lora")
    assert adapted.text == again.text
    assert adapted.text != base.text
    assert again.cached_tokens > 0
    predicted = stack.frontend[frontend].metrics()
    name = "dynamo_component_router_kv_selected_cached_prefix_tokens_total"
    assert predicted.total(name, model="my-lora") >= again.cached_tokens
    assert ask("no-such-adapter").status == 404


def test_the_canary_keeps_the_worker_healthy(stack: Stack) -> None:
    status, body = stack.worker[0].get("/health")
    assert status == 200, body
    assert stack.worker[0].get("/live")[0] == 200
