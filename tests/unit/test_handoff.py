"""What prefill hands to decode: the same on both sides, and nothing malformed gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.errors import HandoffError
from dynamo_worker_ext.wire import Fact, HandedItem, Handoff, Placeholder
from dynamo_worker_ext.wire import parse_handoff as parse
from dynamo_worker_ext.wire import write_handoff as write

KV: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "engine",
    "remote_request_id": "request-1",
    "remote_host": "127.0.0.1",
    "remote_port": 20000,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 75,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}
GRID = Fact("int64", (3,), (1, 16, 16))
IMAGE = HandedItem("image", "ab" * 32, Placeholder(4, 64), {"image_grid_thw": GRID})
TOKENS = [1, 2, 3, 4, *[9] * 64, 5, 5, 6, 7, 8, 8, 8]
HANDOFF = Handoff(TOKENS, (IMAGE,), KV, 32)


def read(params: object, *, max_tokens: int = 1024, uses_nixl: bool = True) -> Handoff:
    # Through JSON, as frontends carry it.
    result = json.loads(json.dumps({"disaggregated_params": params}))
    return parse(result, max_tokens=max_tokens, uses_nixl=uses_nixl)


def test_what_is_written_is_read() -> None:
    assert read(write(HANDOFF)) == HANDOFF
    text = Handoff([1, 2, 3], (), None, 16)
    assert read(write(text), uses_nixl=False) == text


def test_runs_are_short() -> None:
    prompt = Handoff([7, *[9] * 4000, 8], (), None, 32)
    assert len(json.dumps(write(prompt))) < 200
    assert read(write(prompt), max_tokens=4002, uses_nixl=False) == prompt


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_any_prompt(tokens: list[int]) -> None:
    prompt = Handoff(tokens, (), None, 32)
    assert read(write(prompt), uses_nixl=False) == prompt


@given(st.data())
def test_any_mask_and_facts(data: st.DataObject) -> None:
    mask = tuple(data.draw(st.lists(st.booleans(), min_size=1, max_size=40)))
    values = tuple(data.draw(st.lists(st.integers(-9, 9), max_size=8)))
    item = HandedItem(
        "video",
        "any identity of a client's",
        Placeholder(2, len(mask), mask),
        {"grid": Fact("int32", (len(values),), values), "seconds": Fact("float64", (), (0.5,))},
    )
    prompt = Handoff([1, 2, *[3] * len(mask), 4], (item,), None, 16)
    assert read(write(prompt), uses_nixl=False) == prompt


def test_a_request_without_prefill_is_told_what_to_do() -> None:
    with pytest.raises(HandoffError, match="prefill worker") as caught:
        parse(None, max_tokens=10, uses_nixl=True)
    assert caught.value.reason == "missing"


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in KV.items() if key != name}


@pytest.mark.parametrize(
    "kv",
    [
        None,
        [],
        {},
        *(
            without(name)
            for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        ),
        *(without(name) for name in ("remote_block_ids", "tp_size", "remote_num_tokens")),
        {**KV, "do_remote_prefill": False},
        {**KV, "do_remote_decode": True},
        {**KV, "remote_block_ids": []},
        {**KV, "remote_block_ids": [[]]},
        {**KV, "remote_block_ids": [[-1, 2, 3]]},
        {**KV, "remote_block_ids": [["4", "5", "6"]]},
        {**KV, "remote_block_ids": [[4, 5]]},
        {**KV, "remote_block_ids": [4, 5, 6]},
        {**KV, "remote_port": 0},
        {**KV, "remote_port": 2**16},
        {**KV, "remote_port": "20000"},
        {**KV, "remote_host": ""},
        {**KV, "remote_host": "a" * 254},
        {**KV, "remote_engine_id": 7},
        {**KV, "tp_size": 0},
        {**KV, "transfer_mode": "push"},
    ],
    ids=str,
)
def test_nixl_parameters_that_vllm_would_not_check(kv: object) -> None:
    with pytest.raises(HandoffError, match="malformed") as caught:
        read({**write(HANDOFF), "kv_transfer_params": kv})
    assert caught.value.reason == "invalid"


def test_other_connectors_parameters_are_theirs() -> None:
    params = {**write(HANDOFF), "kv_transfer_params": {"transfer_id": "x"}}
    assert read(params, uses_nixl=False).kv == {"transfer_id": "x"}


def item(**changes: Any) -> list[dict[str, Any]]:
    (one,) = write(HANDOFF)["media"]
    return [{**one, **changes}]


def fact(**changes: Any) -> list[dict[str, Any]]:
    return item(facts={"grid": {"dtype": "int64", "shape": [3], "values": [1, 2, 3], **changes}})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": "1"},
        {"more": 1},
        {"prompt": []},
        {"prompt": "text"},
        {"prompt": [[1, 2**31 - 1]]},
        {"prompt": [[1, 0]]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [1.5]},
        {"prompt": [[1, 2, 3]]},
        {"block_size": 0},
        {"media": {}},
        {"media": item() * 2},
        {"media": item() * 5000},
        {"media": item(modality="smell")},
        {"media": item(mm_hash="")},
        {"media": item(mm_hash="a" * 5000)},
        {"media": item(offset=-1)},
        {"media": item(offset=60)},
        {"media": item(offset=2**62, length=2**62)},
        {"media": item(length=0)},
        {"media": item(is_embed=[[True, 63]])},
        {"media": item(is_embed=[[True, 2**31 - 1]])},
        {"media": item(pixels="")},
        {"media": fact(dtype="object")},
        {"media": fact(shape=[4])},
        {"media": fact(shape=[-3])},
        {"media": fact(shape=[1] * 9)},
        {"media": fact(shape=[65], values=[0] * 65)},
        {"media": fact(values=[1, 2, 2**60])},
        {"media": fact(values=[1, 2, "3"])},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(HandoffError, match="malformed") as caught:
        read({**write(HANDOFF), **changes})
    assert caught.value.reason == "invalid"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("params", [None, [], "x", {}, 5])
def test_no_object(params: object) -> None:
    with pytest.raises(HandoffError, match="malformed"):
        read(params)


@pytest.mark.parametrize("result", [5, "x", [1], {}])
def test_no_result(result: object) -> None:
    with pytest.raises(HandoffError, match="malformed"):
        parse(result, max_tokens=10, uses_nixl=True)


def test_numbers_that_are_none() -> None:
    params = {**write(HANDOFF), "media": fact(dtype="float32", values=[1, 2, float("nan")])}
    with pytest.raises(HandoffError, match="out of range"):
        parse({"disaggregated_params": params}, max_tokens=1024, uses_nixl=True)
