"""What a decode worker takes from a prefill worker, and what it does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dynamo_worker_ext.errors import HandoffError
from dynamo_worker_ext.sglang.handoff import HandedItem, HandedMedia, Handoff, parse_handoff

VOCABULARY = 1000

MEDIA = HandedMedia(
    token_ids=[1, 9, 9, 9, 2, 9, 9, 3],
    items=(
        HandedItem("0123456789abcdef", "image", ((1, 3),)),
        HandedItem("fedcba9876543210", "video", ((5, 5), (6, 6))),
    ),
    mrope_position_delta=-4,
)


def result(params: object) -> dict[str, Any]:
    # As it comes: by way of JSON.
    return {"prefill_result": {"disaggregated_params": json.loads(json.dumps(params))}}


def parse(request: Mapping[str, Any]) -> Handoff:
    return parse_handoff(request, vocabulary=VOCABULARY)


@pytest.mark.parametrize("media", [None, MEDIA])
def test_it_comes_as_it_went(media: HandedMedia | None) -> None:
    handoff = Handoff("10.0.0.7", 8998, 2**63 - 1, media)
    assert parse(result(handoff.to_params())) == handoff
    assert handoff.bootstrap == ("10.0.0.7", 8998, 2**63 - 1)


def test_the_names_that_dynamo_takes_for_its_own_are_not_used() -> None:
    assert not {name for name in Handoff("h", 1, 1).to_params() if name.startswith("bootstrap")}


def test_nothing_is_said_to_be_missing() -> None:
    with pytest.raises(HandoffError, match="start a prefill worker") as raised:
        parse({"token_ids": [1]})
    assert raised.value.reason == "missing"


GOOD: dict[str, Any] = Handoff("::1", 1, 0, MEDIA).to_params()


def with_media(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "media": {**GOOD["media"], **changes}}


def item(**changes: Any) -> dict[str, Any]:
    return with_media(items=[{**GOOD["media"]["items"][0], **changes}])


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        {},
        "text",
        {**GOOD, "host": "a b"},
        {**GOOD, "host": ""},
        {**GOOD, "host": "h" * 300},
        {**GOOD, "port": 0},
        {**GOOD, "port": 2**16},
        {**GOOD, "port": "8998"},
        {**GOOD, "room": -1},
        {**GOOD, "room": 2**63},
        {**GOOD, "room": 2**80},
        {**GOOD, "media": {}},
        with_media(items=[]),
        with_media(token_ids=[1, -1]),
        with_media(token_ids=["1"]),
        with_media(token_ids=[1, 9, 9, 9, 2, 9, 9, VOCABULARY]),
        with_media(token_ids=[1, 9]),
        with_media(mrope_position_delta=2**31),
        with_media(mrope_position_delta=0.5),
        item(mm_hash="0123456789ABCDEF"),
        item(mm_hash="0123456789abcdef0"),
        item(modality="smell"),
        item(spans=[[3, 1]]),
        item(spans=[[1, 3], [3, 4]]),
        item(spans=[[6, 8]]),
        item(spans=[[-1, 2]]),
        item(spans=[[1]]),
    ],
)
def test_what_is_malformed_is_refused(params: object) -> None:
    with pytest.raises(HandoffError) as raised:
        parse(result(params))
    assert raised.value.reason == "invalid"
