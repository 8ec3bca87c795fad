"""What a client asked for, as SGLang is given it. Needs no SGLang."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("dynamo.llm")

from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError
from dynamo_worker_ext.sglang.sampling import EngineCall, SamplingContext, build_call

SOUND = SamplingContext()


def call(context: SamplingContext = SOUND, **sections: Any) -> EngineCall:
    return build_call(sections, context)


def sampling(context: SamplingContext = SOUND, **values: Any) -> dict[str, Any]:
    return call(context, sampling_options=values).sampling_params


def test_nothing_asked_generates_to_the_end_of_the_context() -> None:
    assert call().sampling_params == {"max_new_tokens": None}
    assert call().arguments() == {"sampling_params": {"max_new_tokens": None}}


@pytest.mark.parametrize(
    ("name", "value", "theirs"),
    [
        ("n", 2, "n"),
        ("temperature", 0.5, "temperature"),
        ("top_p", 0.9, "top_p"),
        ("top_k", 7, "top_k"),
        ("min_p", 0.1, "min_p"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", 0.5, "frequency_penalty"),
        ("repetition_penalty", 1.1, "repetition_penalty"),
    ],
)
def test_sampling_options(name: str, value: Any, theirs: str) -> None:
    assert sampling(**{name: value})[theirs] == value


def test_stopping() -> None:
    params = call(
        stop_conditions={
            "max_tokens": 5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop": "end",
            "stop_token_ids": [7],
            "stop_token_ids_hidden": [8],
        }
    ).sampling_params
    assert params == {
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop": ["end"],
        "stop_token_ids": [7, 8],
    }


def test_the_models_defaults_come_first() -> None:
    context = SamplingContext(defaults={"temperature": 0.6, "top_k": 20})
    assert sampling(context, temperature=0.1)["temperature"] == 0.1
    assert sampling(context, temperature=0.1)["top_k"] == 20


def test_logit_bias_has_strings_as_keys() -> None:
    assert sampling(logit_bias={"5": 200, 6: -1.5})["logit_bias"] == {"5": 100.0, "6": -1.5}


@pytest.mark.parametrize(
    ("guided", "params"),
    [
        ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"choice": ["a.b", "c"]}, {"regex": r"(a\.b|c)"}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"structural_tag": {"type": "x"}}, {"structural_tag": '{"type": "x"}'}),
        ({"json": None}, {}),
        ({"backend": "xgrammar", "regex": "a"}, {"regex": "a"}),
    ],
)
def test_guided_decoding(guided: dict[str, Any], params: dict[str, str]) -> None:
    assert sampling(guided_decoding=guided) == {"max_new_tokens": None, **params}


@pytest.mark.parametrize(
    "guided",
    [
        {"json": {}, "regex": "a"},
        {"backend": "auto"},
        {"choice": []},
        {"choice": [1]},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"whitespace_pattern": " "},
        {"backend": "outlines", "regex": "a"},
    ],
)
def test_guided_decoding_that_cannot_be_had(guided: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        sampling(guided_decoding=guided)


def test_guided_decoding_needs_a_grammar_backend() -> None:
    with pytest.raises(UnsupportedOptionError, match="--grammar-backend none"):
        sampling(SamplingContext(grammar_backend="none"), guided_decoding={"regex": "a"})


def test_a_seed_is_honoured_or_refused() -> None:
    assert sampling(SamplingContext(deterministic=True), seed=3)["sampling_seed"] == 3
    with pytest.raises(UnsupportedOptionError, match="--enable-deterministic-inference"):
        sampling(seed=3)
    # Greedy decoding is the same under every seed.
    assert "sampling_seed" not in sampling(seed=3, temperature=0.0)
    assert "sampling_seed" not in sampling(seed=3, top_k=1)


def test_min_p_would_end_a_deterministic_scheduler() -> None:
    with pytest.raises(UnsupportedOptionError, match="min_p"):
        sampling(SamplingContext(deterministic=True), min_p=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"use_beam_search": True},
        {"length_penalty": 2.0},
        {"best_of": 3},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_what_sglang_cannot_honour_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError):
        sampling(**options)


def test_a_thinking_budget_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="max_thinking_tokens"):
        call(stop_conditions={"max_thinking_tokens": 5})


@pytest.mark.parametrize("values", [{"n": 0}, {"n": True}, {"temperature": "hot"}, {"top_k": 1.5}])
def test_malformed_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        sampling(**values)


def test_without_a_tokenizer_nothing_can_be_stopped_by_text() -> None:
    context = SamplingContext(has_tokenizer=False)
    with pytest.raises(UnsupportedOptionError, match="--skip-tokenizer-init"):
        call(context, stop_conditions={"stop": ["a"]})
    assert "stop" not in call(context, stop_conditions={"stop": []}).sampling_params


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({}, (False, 0, -1)),
        ({"logprobs": 0}, (True, 0, -1)),
        ({"logprobs": 3}, (True, 3, -1)),
        ({"prompt_logprobs": 1}, (True, 1, 0)),
        ({"logprobs": 5, "prompt_logprobs": 1}, (True, 5, 0)),
    ],
)
def test_logprobs(output: dict[str, Any], expected: tuple[bool, int, int]) -> None:
    got = call(output_options=output)
    assert (got.return_logprob, got.top_logprobs_num, got.logprob_start_len) == expected


@pytest.mark.parametrize("count", [-1, 2**32 - 1, True])
def test_a_count_of_logprobs_that_no_engine_has(count: Any) -> None:
    with pytest.raises(RequestError):
        call(output_options={"logprobs": count})


def test_arguments_of_the_engine() -> None:
    context = SamplingContext(priorities=True, traces=True, dp_ranks=2, lora_names={"mine"})
    got = build_call(
        {
            "routing": {"priority": 4, "dp_rank": 1, "lora_name": "mine"},
            "extra_args": {"nvext": {"cache_salt": "s", "extra_fields": ["engine_data"]}},
            "output_options": {"skip_special_tokens": False},
        },
        context,
        trace_headers={"traceparent": "x"},
    )
    assert got.wants_engine_data
    assert got.arguments() == {
        "sampling_params": {"max_new_tokens": None, "skip_special_tokens": False},
        "priority": 4,
        "cache_salt": "s",
        "routed_dp_rank": 1,
        "lora_path": "mine",
        "external_trace_header": {"traceparent": "x"},
    }


def test_what_the_engine_was_not_started_for_is_not_passed_on() -> None:
    got = build_call({"routing": {"priority": 4, "dp_rank": 0}}, SOUND, trace_headers={"a": "b"})
    assert got.arguments() == {"sampling_params": {"max_new_tokens": None}}


def test_another_workers_rank_and_unknown_adapters_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="ranks 0 to 0"):
        call(routing={"dp_rank": 1})
    with pytest.raises(UnsupportedOptionError, match="not loaded"):
        call(routing={"lora_name": "other"})


def test_the_native_api_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="native"):
        call(extra_args={"sglang_tito": {}})
