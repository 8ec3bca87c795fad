"""What the frontends are sent, from what vLLM puts out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from dynamo_worker_ext.errors import EngineError
from dynamo_worker_ext.vllm.chunks import ChunkStream
from dynamo_worker_ext.vllm.sampling import EngineCall

PROMPT = [1, 2, 3, 4]


def stream(n: int = 1, *, each: bool = False, engine_data: bool = False) -> ChunkStream:
    call = EngineCall(SamplingParams(n=n), wants_engine_data=engine_data)
    return ChunkStream(call, one_finish_reason=not each)


def choice(
    tokens: Sequence[int] = (),
    finish: str | None = None,
    *,
    index: int = 0,
    reason: int | str | None = None,
    logprobs: list[dict[int, Logprob]] | None = None,
) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text="",
        token_ids=list(tokens),
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=finish,
        stop_reason=reason,
    )


def output(*choices: CompletionOutput, cached: int | None = 2, **more: Any) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=PROMPT,
        prompt_logprobs=more.pop("prompt_logprobs", None),
        outputs=list(choices),
        finished=False,
        num_cached_tokens=cached,
        **more,
    )


def chunks(of: ChunkStream, *outputs: RequestOutput) -> list[dict[str, Any]]:
    return [chunk for one in outputs for chunk in of.of(one)]


def usage(completion: int, cached: int | None = 2) -> dict[str, Any]:
    return {
        "prompt_tokens": 4,
        "completion_tokens": completion,
        "total_tokens": 4 + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def test_tokens_and_the_finish_reason_pass_through() -> None:
    sent = chunks(
        stream(), output(choice([5])), output(choice([6, 7])), output(choice([8], "length"))
    )
    assert sent == [
        {"index": 0, "token_ids": [5], "completion_usage": usage(1)},
        {"index": 0, "token_ids": [6, 7]},
        {"index": 0, "token_ids": [8], "finish_reason": "length", "completion_usage": usage(4)},
    ]


@pytest.mark.parametrize(
    ("vllm", "dynamo"), [("stop", "stop"), ("length", "length"), ("abort", "cancelled")]
)
def test_finish_reasons_are_named_in_dynamos_words(vllm: str, dynamo: str) -> None:
    (sent,) = chunks(stream(), output(choice([5], vllm)))
    assert sent["finish_reason"] == dynamo


def test_an_error_of_the_engine_is_no_finish_reason() -> None:
    with pytest.raises(EngineError, match="error"):
        chunks(stream(), output(choice([], "error")))


def test_a_delta_that_carries_nothing_is_not_sent() -> None:
    assert chunks(stream(), output(choice([]))) == []


def test_after_a_stop_string_the_reason_comes_after_the_tokens() -> None:
    sent = chunks(stream(), output(choice([5, 6], "stop", reason="END")))
    assert [(one["token_ids"], one.get("finish_reason")) for one in sent] == [
        ([5, 6], None),
        ([], "stop"),
    ]
    assert sent[1]["stop_reason"] == "END"


def test_after_a_stop_token_the_reason_comes_with_it() -> None:
    (sent,) = chunks(stream(), output(choice([5, 6], "stop", reason=6)))
    assert (sent["token_ids"], sent["finish_reason"], sent["stop_reason"]) == ([5, 6], "stop", 6)


def test_repetition_is_a_stop_whose_tokens_are_all_shown() -> None:
    sent = chunks(stream(), output(choice([5, 5], "repetition", reason="repetition_detected")))
    assert [one.get("finish_reason") for one in sent] == [None, "stop"]


def test_logprobs_are_aligned_with_the_tokens() -> None:
    position = [
        {5: Logprob(-1.0, rank=1), 9: Logprob(-2.0, rank=2)},
        {6: Logprob(-3.0, rank=3), 9: Logprob(-0.5, rank=1)},
    ]
    (sent,) = chunks(stream(), output(choice([5, 6], logprobs=position)))
    assert sent["log_probs"] == [-1.0, -3.0]
    assert sent["top_logprobs"] == [
        [{"rank": 1, "token_id": 5, "logprob": -1.0}, {"rank": 2, "token_id": 9, "logprob": -2.0}],
        [{"rank": 3, "token_id": 6, "logprob": -3.0}, {"rank": 1, "token_id": 9, "logprob": -0.5}],
    ]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_a_logprob_that_json_cannot_hold_becomes_the_least_one(logprob: float) -> None:
    (sent,) = chunks(stream(), output(choice([5], logprobs=[{5: Logprob(logprob, rank=1)}])))
    assert sent["log_probs"] == [-9999.0]


@pytest.mark.parametrize("positions", [[], [{7: Logprob(-1.0)}]])
def test_logprobs_that_do_not_fit_the_tokens_are_never_sent(positions: list[Any]) -> None:
    with pytest.raises(EngineError, match="logprob"):
        chunks(stream(), output(choice([5], logprobs=positions)))


def test_prompt_logprobs_come_with_the_end() -> None:
    prompt = [None, {2: Logprob(-1.5, rank=1, decoded_token="b")}]
    sent = chunks(
        stream(), output(choice([5]), prompt_logprobs=prompt), output(choice([6], "length"))
    )
    assert "engine_data" not in sent[0]
    assert sent[1]["engine_data"] == {
        "prompt_logprobs": [None, {"2": {"logprob": -1.5, "rank": 1, "decoded_token": "b"}}]
    }


def test_engine_data_holds_the_whole_completion() -> None:
    logprobs = [{5: Logprob(-1.0)}]
    sent = chunks(
        stream(engine_data=True),
        output(choice([5], logprobs=logprobs)),
        output(choice([6], "length", logprobs=[{6: Logprob(-2.0)}])),
    )
    assert sent[1]["engine_data"] == {
        "prompt_token_ids": PROMPT,
        "completion_token_ids": [5, 6],
        "completion_logprobs": [-1.0, -2.0],
        "finished": True,
    }


def test_cached_tokens_that_are_not_known_are_not_claimed_to_be_none() -> None:
    (sent,) = chunks(stream(), output(choice([5], "length"), cached=None))
    assert sent["completion_usage"] == usage(1, cached=None)


TWO = [
    output(choice([5]), choice([7], index=1)),
    output(choice([6], "stop"), cached=4),
    output(choice([8, 9], index=1)),
    output(choice([10], "length", index=1)),
]


def test_of_several_choices_each_gets_its_finish_reason() -> None:
    sent = chunks(stream(2, each=True), *TWO)
    ends = {one["index"]: one["finish_reason"] for one in sent if "finish_reason" in one}
    assert ends == {0: "stop", 1: "length"}


def test_usage_is_the_sum_over_choices() -> None:
    sent = chunks(stream(2, each=True), *TWO)
    assert sent[-1]["completion_usage"] == usage(6)


def test_cached_tokens_are_those_of_the_choice_that_found_least() -> None:
    sent = chunks(stream(2, each=True), output(choice([5]), cached=4), *TWO)
    assert sent[-1]["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_the_sdk_gets_one_finish_reason_after_everything_else() -> None:
    sent = chunks(stream(2), *TWO)
    assert [one.get("finish_reason") for one in sent] == [None] * 5 + ["length"]
    tokens = {i: [t for one in sent if one["index"] == i for t in one["token_ids"]] for i in (0, 1)}
    assert tokens == {0: [5, 6], 1: [7, 8, 9, 10]}
    assert sent[-1]["completion_usage"] == usage(6)


def test_the_one_finish_reason_goes_to_the_choice_that_ran_to_its_length() -> None:
    sent = chunks(stream(2), output(choice([5], "length")), output(choice([6], "stop", index=1)))
    assert (sent[-1]["index"], sent[-1]["finish_reason"]) == (0, "length")
