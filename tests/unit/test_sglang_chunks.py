"""SGLang's outputs as chunks. Needs no SGLang."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("dynamo.llm")

from dynamo_worker_ext.errors import EngineError, RequestError
from dynamo_worker_ext.sglang.chunks import ChunkStream
from dynamo_worker_ext.sglang.sampling import EngineCall


def stream(**call: Any) -> ChunkStream:
    params = {"n": call.pop("n", 1), "stop_token_ids": call.pop("stops", [])}
    return ChunkStream(EngineCall(sampling_params=params, **call), [1, 2, 3])


def output(ids: list[int], finish: Any = None, *, index: int = 0, **meta: Any) -> dict[str, Any]:
    meta = {"id": "r", "prompt_tokens": 3, "cached_tokens": 2, "finish_reason": finish, **meta}
    return {"output_ids": ids, "index": index, "meta_info": meta}


def chunks(of: ChunkStream, *outputs: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk for one in outputs for chunk in of.of(one)]


def test_tokens_and_usage() -> None:
    first, middle, last = chunks(
        stream(), output([5]), output([6]), output([7], {"type": "length", "length": 3})
    )
    assert (first["token_ids"], middle, last["token_ids"]) == (
        [5],
        {"index": 0, "token_ids": [6]},
        [7],
    )
    assert first["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["finish_reason"] == "length"
    assert last["completion_usage"]["total_tokens"] == 6


def test_nothing_new_says_nothing() -> None:
    assert chunks(stream(), output([])) == []


def test_an_eos_is_no_stop_that_was_asked_for() -> None:
    (chunk,) = chunks(stream(), output([9], {"type": "stop", "matched": 9}))
    assert chunk["finish_reason"] == "stop"
    assert "stop_reason" not in chunk
    (chunk,) = chunks(stream(stops=[9]), output([9], {"type": "stop", "matched": 9}))
    assert chunk["stop_reason"] == 9


def test_the_end_after_a_stop_string_stands_alone() -> None:
    text, end = chunks(stream(), output([9], {"type": "stop", "matched": "end"}))
    assert (text["token_ids"], end["token_ids"]) == ([9], [])
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "end")


def test_all_choices_are_complete_before_one_ends() -> None:
    got = chunks(
        stream(n=2),
        output([5], {"type": "length", "length": 1}, index=1),
        output([6], index=0),
        output([7], {"type": "stop", "matched": 7}, index=0, cached_tokens=0),
    )
    assert [(c["index"], c["token_ids"]) for c in got[:-1]] == [(1, [5]), (0, [6]), (0, [7])]
    assert not any("finish_reason" in chunk for chunk in got[:-1])
    assert (got[-1]["index"], got[-1]["finish_reason"]) == (1, "length")
    usage = got[-1]["completion_usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (3, 0)


@pytest.mark.parametrize("cumulative", [False, True])
def test_logprobs_belong_to_their_tokens(cumulative: bool) -> None:
    of = stream(return_logprob=True, top_logprobs_num=1)
    first = {
        "output_token_logprobs": [(-1.0, 5, None)],
        "output_top_logprobs": [[(-0.5, 4, None)]],
    }
    second = {
        "output_token_logprobs": [(-2.0, 6, None)],
        "output_top_logprobs": [[(-2.0, 6, None)]],
    }
    if cumulative:
        second = {name: first[name] + second[name] for name in first}
    one, two = chunks(of, output([5], **first), output([6], **second))
    assert (one["log_probs"], two["log_probs"]) == ([-1.0], [-2.0])
    assert one["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 4, "logprob": -0.5},
            {"rank": 2, "token_id": 5, "logprob": -1.0},
        ]
    ]
    assert two["top_logprobs"] == [[{"rank": 1, "token_id": 6, "logprob": -2.0}]]


def test_infinite_logprobs_become_numbers() -> None:
    of = stream(return_logprob=True)
    (chunk,) = chunks(of, output([5], output_token_logprobs=[(float("-inf"), 5, None)]))
    assert chunk["log_probs"] == [-9999.0]


@pytest.mark.parametrize("given", [[], [(-1.0, 6, None)]])
def test_logprobs_of_other_tokens_are_an_error(given: list[Any]) -> None:
    with pytest.raises(EngineError):
        chunks(stream(return_logprob=True), output([5], output_token_logprobs=given))


def test_prompt_logprobs_and_engine_data() -> None:
    of = stream(return_logprob=True, logprob_start_len=0, wants_engine_data=True)
    (chunk,) = chunks(
        of,
        output(
            [5],
            {"type": "length", "length": 1},
            output_token_logprobs=[(-1.0, 5, None)],
            input_token_logprobs=[(None, 1, None), (-1.5, 2, None)],
            input_top_logprobs=[None, [(-0.5, 9, None)]],
        ),
    )
    assert chunk["engine_data"] == {
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [5],
        "completion_logprobs": [-1.0],
        "finished": True,
        "prompt_logprobs": [None, {"2": {"logprob": -1.5}, "9": {"logprob": -0.5}}],
    }


def test_aborts() -> None:
    (chunk,) = chunks(stream(), output([], {"type": "abort", "message": "Aborted"}))
    assert chunk["finish_reason"] == "cancelled"
    bad = {"type": "abort", "message": "no such grammar", "status_code": 400}
    with pytest.raises(RequestError, match="no such grammar"):
        chunks(stream(), output([], bad))
    failed = {"type": "abort", "message": "out of memory", "status_code": 500}
    with pytest.raises(EngineError, match="out of memory"):
        chunks(stream(), output([], failed))
    with pytest.raises(EngineError, match="'odd'"):
        chunks(stream(), output([], {"type": "odd"}))
