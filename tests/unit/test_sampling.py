"""What a client asked for, as both of Dynamo's frontends forward it, arrives in vLLM or is refused.

The requests are recordings: see data/preprocessed/README.md.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import RequestOutputKind, SamplingParams

from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError
from dynamo_worker_ext.vllm.sampling import (
    EngineCall,
    SamplingContext,
    build_call,
    continued_call,
)

DATA = Path(__file__).parent / "data" / "preprocessed"
RECORDED: dict[str, dict[str, dict[str, Any]]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))
}
RUST, COMPLETIONS, VLLM = "rust_chat", "rust_completions", "vllm_processor_chat"
ENGINE = SamplingContext(vocab_size=512, lora_names={"my-lora"})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def request_of(frontend: str, name: str) -> dict[str, Any]:
    return copy.deepcopy(RECORDED[frontend][name]["request"])


def call_of(frontend: str, name: str, context: SamplingContext = ENGINE) -> EngineCall:
    return build_call(request_of(frontend, name), context)


def params_of(frontend: str, name: str) -> SamplingParams:
    return call_of(frontend, name).sampling_params


def asking(section: str = "sampling_options", **options: Any) -> dict[str, Any]:
    return {"token_ids": [1, 2, 3], section: options}


def params(section: str = "sampling_options", **options: Any) -> SamplingParams:
    return build_call(asking(section, **options), ENGINE).sampling_params


def refused(request: dict[str, Any], error: type[RequestError] = UnsupportedOptionError) -> str:
    with pytest.raises(error) as caught:
        build_call(request, ENGINE)
    return str(caught.value)


@pytest.mark.parametrize(
    ("frontend", "name"),
    [(frontend, name) for frontend, names in RECORDED.items() for name in names],
)
def test_a_recorded_request_is_mapped_or_refused_as_unsupported(frontend: str, name: str) -> None:
    request = request_of(frontend, name)
    kept = copy.deepcopy(request)
    try:
        call = build_call(request, ENGINE)
    except UnsupportedOptionError:
        assert name in {"best_of", "guided_ws", "guided_backend"}
    else:
        assert isinstance(call.sampling_params, SamplingParams)
    assert request == kept


@pytest.mark.parametrize("frontend", [RUST, COMPLETIONS, VLLM])
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("temperature", "temperature", pytest.approx(0.3)),
        ("min_p", "min_p", pytest.approx(0.1)),
        ("seed", "seed", 7),
        ("seed-1", "seed", None),
        ("presence", "presence_penalty", 0.5),
        ("repetition", "repetition_penalty", pytest.approx(1.2)),
        ("min_tokens", "min_tokens", 3),
        ("ignore_eos", "ignore_eos", True),
        ("n2", "n", 2),
        ("stop", "stop", ["x", "yy"]),
        ("skip_special", "skip_special_tokens", False),
        ("prompt_logprobs", "prompt_logprobs", 1),
    ],
)
def test_an_option_arrives_from_every_frontend(
    frontend: str, name: str, field: str, value: object
) -> None:
    assert getattr(params_of(frontend, name), field) == value


@pytest.mark.parametrize(
    ("section", "option", "value", "field", "arrived"),
    [
        ("sampling_options", "top_p", 0.25, "top_p", 0.25),
        ("sampling_options", "top_k", 7, "top_k", 7),
        ("sampling_options", "top_k", -1, "top_k", -1),
        ("sampling_options", "frequency_penalty", -0.5, "frequency_penalty", -0.5),
        ("sampling_options", "presence_penalty", -0.5, "presence_penalty", -0.5),
        ("sampling_options", "bad_words", ["no"], "bad_words", ["no"]),
        (
            "sampling_options",
            "include_stop_str_in_output",
            True,
            "include_stop_str_in_output",
            True,
        ),
        ("sampling_options", "skip_reading_prefix_cache", True, "skip_reading_prefix_cache", True),
        ("stop_conditions", "max_tokens", 9, "max_tokens", 9),
        ("stop_conditions", "stop_token_ids", [9, 4], "stop_token_ids", [9, 4]),
        ("stop_conditions", "stop_token_ids_visible", [9], "stop_token_ids", [9]),
        ("stop_conditions", "max_thinking_tokens", 30, "thinking_token_budget", 30),
        ("output_options", "logprobs", 2, "logprobs", 2),
        ("output_options", "prompt_logprobs", 2**32 - 1, "prompt_logprobs", -1),
    ],
)
def test_an_option_changes_its_own_field_alone(
    section: str, option: str, value: object, field: str, arrived: object
) -> None:
    plain, asked = params(section), params(section, **{option: value})
    assert getattr(asked, field) == arrived
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    # Follow from other options: vLLM makes text or computes cached tokens anew where it has to.
    names -= {"detokenize", "output_text_buffer_length", "skip_reading_prefix_cache"}
    changed = {name for name in names if getattr(plain, name) != getattr(asked, name)}
    assert changed <= {field}


def test_all_options_arrive_beside_each_other() -> None:
    request = {
        "sampling_options": {
            "temperature": 0.7, "top_p": 0.6, "top_k": 11, "min_p": 0.05, "seed": 13, "n": 2,
            "frequency_penalty": 0.25, "presence_penalty": 0.5, "repetition_penalty": 1.25,
            "logit_bias": {"5": 1.5}, "guided_decoding": {"regex": "[ab]+"},
        },
        "stop_conditions": {
            "stop": ["end"], "stop_token_ids": [9], "stop_token_ids_hidden": [8],
            "ignore_eos": True, "max_tokens": 21, "min_tokens": 3,
        },
        "output_options": {"logprobs": 4, "prompt_logprobs": 2, "skip_special_tokens": False},
        "routing": {"priority": 6, "cache_salt": "salt", "dp_rank": 1, "lora_name": "my-lora"},
    }  # fmt: skip
    call = build_call(request, SamplingContext(vocab_size=512, dp_ranks=2, lora_names={"my-lora"}))
    given = call.sampling_params
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.7, 0.6, 11, 0.05)
    assert (given.seed, given.n, given.logit_bias) == (13, 2, {5: 1.5})
    penalties = given.frequency_penalty, given.presence_penalty, given.repetition_penalty
    assert penalties == (0.25, 0.5, 1.25)
    assert given.structured_outputs is not None
    assert given.structured_outputs.regex == "[ab]+"
    assert (given.stop, given.stop_token_ids, given.ignore_eos) == (["end"], [9, 8], True)
    assert (given.max_tokens, given.min_tokens) == (21, 3)
    assert (given.logprobs, given.prompt_logprobs, given.skip_special_tokens) == (4, 2, False)
    assert (call.priority, call.cache_salt) == (-6, "dynamo-cache-salt:salt")
    assert (call.data_parallel_rank, call.lora_name) == (1, "my-lora")


@pytest.mark.parametrize("tag", [{"type": "structural_tag", "format": {}}, '{"type": "x"}'])
def test_a_structural_tag_may_be_an_object_or_text(tag: object) -> None:
    guided = params(guided_decoding={"structural_tag": tag}).structured_outputs
    assert guided is not None
    assert guided.structural_tag == (tag if isinstance(tag, str) else json.dumps(tag))
    assert (guided.json, guided.regex, guided.choice, guided.grammar) == (None,) * 4


@pytest.mark.parametrize("frontend", [RUST, VLLM])
@pytest.mark.parametrize(
    ("name", "constraint"),
    [
        ("guided_json", {"json": SCHEMA}),
        ("guided_regex", {"regex": "[ab]+"}),
        ("guided_choice", {"choice": ["a", "b"]}),
        ("guided_grammar", {"grammar": 'root ::= "a"'}),
        ("rf_json", {"json": {"type": "object"}}),
        ("rf_schema", {"json": SCHEMA}),
    ],
)
def test_guided_decoding_arrives_as_one_constraint(
    frontend: str, name: str, constraint: dict[str, Any]
) -> None:
    guided = params_of(frontend, name).structured_outputs
    assert guided is not None
    given = {k: v for k, v in vars(guided).items() if v and not k.startswith("_")}
    assert given == constraint


@pytest.mark.parametrize("frontend", [RUST, VLLM])
@pytest.mark.parametrize("name", ["parsers_tools_auto", "parsers_tools_req", "parsers_tools_named"])
def test_a_structural_tag_of_tool_calls_arrives_as_json_text(frontend: str, name: str) -> None:
    guided = params_of(frontend, name).structured_outputs
    assert guided is not None
    assert json.loads(guided.structural_tag)["type"] == "structural_tag"


def test_the_stream_is_deltas_of_token_ids() -> None:
    result = params_of(RUST, "temperature")
    assert (result.output_kind, result.detokenize) == (RequestOutputKind.DELTA, False)


@pytest.mark.parametrize("frontend", [RUST, VLLM])
def test_the_engine_makes_text_where_it_has_to_find_a_stop_string(frontend: str) -> None:
    assert params_of(frontend, "stop").detokenize


def test_an_engine_without_tokenizer_leaves_stop_strings_to_the_frontend() -> None:
    call = call_of(RUST, "stop", SamplingContext(has_tokenizer=False))
    assert (call.sampling_params.stop, call.sampling_params.detokenize) == ([], False)


def test_the_models_own_stop_tokens_are_added_to_the_clients() -> None:
    assert params_of(RUST, "stop_ids").stop_token_ids == [5, 6, 500, 498]


def test_without_max_tokens_the_engine_fills_what_the_prompt_leaves() -> None:
    assert params_of(RUST, "max_null").max_tokens is None


def test_defaults_of_the_model_hold_where_the_client_is_silent() -> None:
    context = SamplingContext(defaults={"temperature": 0.5, "top_k": 20, "max_tokens": 99})
    result = build_call(
        {"sampling_options": {"top_k": 3, "temperature": None}}, context
    ).sampling_params
    assert (result.temperature, result.top_k, result.max_tokens) == (0.5, 3, 99)


def test_the_number_of_logprobs_arrives() -> None:
    assert params_of(RUST, "logprobs3").logprobs == 3
    assert params_of(VLLM, "logprobs").logprobs == 0
    assert params_of(COMPLETIONS, "logprobs_cmpl").logprobs == 2


def test_logprobs_of_the_whole_vocabulary_can_be_asked_for() -> None:
    assert params("output_options", logprobs=2**32 - 1).logprobs == -1


def test_logprobs_of_named_tokens_replace_those_of_the_likeliest() -> None:
    result = params_of(RUST, "logprob_token_ids")
    assert (result.logprob_token_ids, result.logprobs) == ([5, 6], None)


def test_token_id_options_of_the_rust_frontend_arrive() -> None:
    assert params_of(RUST, "allowed").allowed_token_ids == [5, 6]
    assert params_of(RUST, "bad_ids").bad_words_token_ids == [[5], [6, 7]]


def test_logit_bias_has_token_ids_as_keys_and_is_cut_to_its_range() -> None:
    assert params(logit_bias={"5": 10, "6": -1000}).logit_bias == {5: 10, 6: -100}


def test_a_thinking_budget_arrives() -> None:
    assert params_of(VLLM, "think").thinking_token_budget == 50


def test_dynamos_priority_turns_its_sign_in_vllm() -> None:
    assert call_of(RUST, "agent_prio").priority == -5
    assert call_of(RUST, "parsers_prio").priority == 5


def test_a_cache_salt_is_marked_as_dynamos() -> None:
    assert call_of(RUST, "cache_salt").cache_salt == "dynamo-cache-salt:abc"
    assert call_of(RUST, "temperature").cache_salt is None


@pytest.mark.parametrize("frontend", [RUST, COMPLETIONS, VLLM])
def test_a_lora_adapter_is_known_by_its_name(frontend: str) -> None:
    assert call_of(frontend, "parsers_lora").lora_name == "my-lora"
    assert call_of(frontend, "temperature").lora_name is None


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"my-lora.*loaded: other"):
        call_of(RUST, "parsers_lora", SamplingContext(lora_names={"other"}))


def test_reasoning_state_arrives() -> None:
    call = call_of(VLLM, "parsers_ctk")
    assert call.reasoning_ended is True
    assert call.reasoning_parser_kwargs is not None
    assert call.reasoning_parser_kwargs["chat_template_kwargs"]["enable_thinking"] is False
    assert call_of(RUST, "parsers_reff").reasoning_ended is None


def test_engine_data_is_wanted_only_by_who_asks_for_it() -> None:
    assert call_of(RUST, "extra_fields").wants_engine_data
    assert not call_of(RUST, "temperature").wants_engine_data


def test_a_data_parallel_rank_is_counted_within_the_worker() -> None:
    context = SamplingContext(first_dp_rank=4, dp_ranks=2)
    assert build_call({"routing": {"dp_rank": 5}}, context).data_parallel_rank == 1


def test_the_only_rank_of_a_worker_is_not_named_to_the_engine() -> None:
    assert build_call({"routing": {"dp_rank": 0}}, ENGINE).data_parallel_rank is None


def test_a_rank_of_another_worker_is_refused() -> None:
    message = refused({"routing": {"dp_rank": 3}})
    assert "dp_rank=3" in message
    assert "ranks 0 to 0" in message


def test_a_prefill_worker_draws_one_token_whatever_the_client_wants_at_least() -> None:
    request = request_of(RUST, "min_tokens")
    result = build_call(request, ENGINE, first_token_only=True).sampling_params
    assert (result.max_tokens, result.min_tokens, result.n) == (1, 0, 1)


def test_a_prefill_worker_leaves_to_decode_what_decode_does_again() -> None:
    request = {
        "sampling_options": {"guided_decoding": {"regex": "a+"}},
        "stop_conditions": {"stop": ["end"], "max_tokens": 500},
        "output_options": {"logprobs": 3},
    }
    result = build_call(request, ENGINE, first_token_only=True).sampling_params
    assert (result.max_tokens, result.stop, result.logprobs) == (1, [], None)
    assert result.structured_outputs is None
    assert result.extra_args is not None
    assert result.extra_args["kv_transfer_params"]["do_remote_decode"] is True


@pytest.mark.parametrize(
    "request_", [asking(n=2), asking("output_options", prompt_logprobs=0)], ids=["n", "prompt"]
)
def test_what_two_workers_cannot_do_together_is_refused_by_both(request_: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match="prefill and decode"):
        build_call(request_, ENGINE, first_token_only=True)
    with pytest.raises(UnsupportedOptionError, match="prefill and decode"):
        continued_call(build_call(request_, ENGINE), {})


def test_where_the_kv_lies_is_said_of_one_request_alone() -> None:
    request = asking("stop_conditions", max_tokens=5)
    shared = build_call(request, ENGINE)
    call = continued_call(shared, {"remote_port": 1})
    assert call.sampling_params.extra_args == {"kv_transfer_params": {"remote_port": 1}}
    assert call.sampling_params.max_tokens == 5
    assert shared.sampling_params.extra_args is None
    assert build_call(request, ENGINE).sampling_params is shared.sampling_params


@pytest.mark.parametrize(
    "request_",
    [
        asking(use_beam_search=True),
        asking(length_penalty=0.5),
        asking(best_of=3, n=2),
        asking(something_new=1),
        asking("stop_conditions", something_new=1),
        asking("output_options", something_new=1),
        {"extra_args": {"sampling_options": {"something_new": 1}}},
        {"extra_args": {"vllm_tito": {}}},
        asking(guided_decoding={"json": SCHEMA, "whitespace_pattern": " "}),
        asking(guided_decoding={"json": SCHEMA, "backend": "guidance"}),
    ],
)
def test_what_vllm_cannot_honour_is_refused(request_: dict[str, Any]) -> None:
    assert refused(request_)


@pytest.mark.parametrize(
    "request_",
    [
        asking(use_beam_search=False, length_penalty=1.0, best_of=1, something_new=None),
        asking(n=2, best_of=2),
        asking(guided_decoding={"json": SCHEMA, "backend": "auto"}),
        asking(guided_decoding={"json": None}),
        asking("output_options", formatted_prompt=True, return_tokens_as_token_ids=True),
        {"sampling_options": None, "stop_conditions": None, "extra_args": None, "routing": None},
        {},
    ],
)
def test_neutral_values_are_no_reason_to_refuse(request_: dict[str, Any]) -> None:
    assert build_call(request_, ENGINE)


def test_a_refusal_names_the_option_and_its_value() -> None:
    assert "sampling_options.something_new=1" in refused(asking(something_new=1))


@pytest.mark.parametrize(
    "request_",
    [
        asking(temperature="hot"),
        asking(temperature=True),
        asking(temperature=float("nan")),
        asking(temperature=float("inf")),
        asking(temperature=10**400),
        asking(temperature=3.0),
        asking(top_p=0.0),
        asking(top_k=1.5),
        asking(top_k=True),
        asking(n=0),
        asking(n=2, temperature=0.0),
        asking(seed=2**64),
        asking(logit_bias={"x": 1}),
        asking(logit_bias={"5": "much"}),
        asking(logit_bias=[5]),
        asking(allowed_token_ids=[True]),
        asking(bad_words_token_ids=[[512]]),
        asking(bad_words_token_ids=[[]]),
        asking(bad_words_token_ids=[[1]], bad_words=["a"]),
        asking("stop_conditions", stop=[""]),
        asking("stop_conditions", stop=[5]),
        asking("stop_conditions", stop_token_ids=["5"]),
        asking("stop_conditions", max_tokens=0),
        asking("stop_conditions", max_tokens=2, min_tokens=3),
        asking("stop_conditions", ignore_eos=1),
        asking("output_options", logprobs=True),
        asking("output_options", logprobs=-2),
        asking("output_options", skip_special_tokens="no"),
        asking(guided_decoding={"json": SCHEMA, "regex": "a"}),
        asking(guided_decoding={"backend": "auto"}) | {"routing": {"priority": "high"}},
        asking(guided_decoding={"choice": "ab"}),
        asking(guided_decoding={"regex": 5}),
        asking(guided_decoding={"json": True}),
        asking(guided_decoding={"json": {"$ref": "#"}}),
        asking(guided_decoding="json"),
        {"sampling_options": [1]},
        {"routing": {"dp_rank": "0"}},
        {"routing": {"cache_salt": 5}},
        {"extra_args": {"reasoning_ended": "yes"}},
    ],
)
def test_a_value_of_a_wrong_type_or_range_is_a_clients_error(request_: dict[str, Any]) -> None:
    assert refused(request_, RequestError)


# What was asked for before


def test_options_of_other_types_are_not_taken_for_those_that_are_known() -> None:
    assert params(temperature=1, n=1).temperature == 1
    assert params(temperature=None, n=1).temperature == SamplingParams().temperature
    refused(asking(temperature=True, n=1), RequestError)
    refused(asking(temperature=float("nan"), n=1), RequestError)
    refused(asking(temperature=1, n=1.0), RequestError)
    refused(asking(temperature=1, n=2**70), RequestError)
    refused(asking(temperature=1, n=1, seed=object()), RequestError)


def test_each_section_counts_on_its_own() -> None:
    one, other = asking("stop_conditions", max_tokens=5), asking("stop_conditions", max_tokens=6)
    assert build_call(one, ENGINE).sampling_params.max_tokens == 5
    assert build_call(other, ENGINE).sampling_params.max_tokens == 6
    assert build_call(one, ENGINE, first_token_only=True).sampling_params.max_tokens == 1
    assert build_call(one, ENGINE).sampling_params.max_tokens == 5
    by_token_id = {**one, "extra_args": {"sampling_options": {"allowed_token_ids": [7]}}}
    assert build_call(by_token_id, ENGINE).sampling_params.allowed_token_ids == [7]
    assert build_call(one, ENGINE).sampling_params.allowed_token_ids is None


def test_what_vllm_fills_in_for_one_request_is_not_in_the_next() -> None:
    request = asking("stop_conditions", stop_token_ids=[9], max_tokens=None)
    clones = []
    for length in (10, 20):
        clone = build_call(request, ENGINE).sampling_params.clone()
        assert clone.max_tokens is None
        assert clone.stop_token_ids == [9]
        # As `InputProcessor.process_inputs` does.
        clone.max_tokens = length
        clone.update_from_generation_config({"eos_token_id": [5, 6]}, 5)
        clones.append(clone)
    assert [clone.max_tokens for clone in clones] == [10, 20]
    assert all(set(clone.stop_token_ids) == {6, 9} for clone in clones)
    assert all(clone.all_stop_token_ids == {5, 6, 9} for clone in clones)


def test_constraints_are_made_for_each_request() -> None:
    request = asking(guided_decoding={"regex": "[ab]+"})
    one, other = (build_call(request, ENGINE).sampling_params for _ in range(2))
    assert one.structured_outputs == other.structured_outputs
    assert one.structured_outputs is not other.structured_outputs


def test_not_all_that_was_ever_asked_for_is_kept() -> None:
    context = SamplingContext()
    for seed in range(1000):
        build_call(asking(seed=seed), context)
    assert 0 < len(context.known) <= 256
    before = dict(context.known)
    build_call(asking("stop_conditions", stop=["x" * 4000]), context)
    assert context.known == before
