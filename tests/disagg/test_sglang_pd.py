"""Prefill and decode on SGLang, through the real frontends: the answers of one aggregated worker,
from media that was processed once and never seen by decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.direct import IMAGE, DirectClient
from tests.disagg.sglang_deployment import DECODE_ARGS, DOORS, prefill_args
from tests.engines import SGLANG
from tests.pictures import data_uri, part, picture
from tests.stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    sglang_expected: Mapping[str, Any],  # its worker is gone before these are started
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("roles")
    with Stack(model, folder, {}, workers=0, engine=SGLANG) as stack:
        stack.add_worker(*prefill_args())
        stack.add_worker(*DECODE_ARGS)
        for name, spec in DOORS.items():
            stack.add_frontend(name, spec)
        stack.wait_ready()
        yield stack


@pytest.fixture(params=list(DOORS))
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_answers_are_those_of_an_aggregated_worker(
    stack: Stack,
    door: str,
    asked: Mapping[str, Mapping[str, Any]],
    sglang_expected: Mapping[str, Mapping[str, str]],
) -> None:
    """And media is processed once in the whole deployment, at most: new or repeated."""
    transfers = DOORS[door].transfer != "off"
    came = "received" if transfers else "raw"
    # What becomes of it at prefill, and how many images are processed there. SGLang takes no raw
    # images beside such as it was given before, so that both of two are.
    new = {
        "text": ("text", 0),
        "one image": (came, 0 if transfers else 1),
        "two images": (came, 0 if transfers else 2),
        "two images swapped": ("hit", 0),
        "a video": ("raw", 1),
    }
    for name, content in asked[door].items():
        first, again = stack.ask(door, content), stack.ask(door, content)
        assert (first.text, again.text) == (sglang_expected[door][name],) * 2, name
        began, repeated = first.of("prefill"), again.of("prefill")
        assert (began.outcome, began.processed_images) == new[name], name
        # No frontend (1.6.1) names videos, so that those come anew each time.
        repeat = {"text": ("text", 0), "a video": ("raw", 1)}.get(name, ("hit", 0))
        assert (repeated.outcome, repeated.processed_images) == repeat, name
        for seen in (first.of("decode"), again.of("decode")):
            assert seen.outcome == ("text" if name == "text" else "continued"), name
            assert seen.processed_images == seen.received_bytes == 0, name
        assert again.answer.cached_tokens == again.answer.reusable_tokens > 0, name
        assert name == "a video" or again.predicted_tokens == again.answer.cached_tokens, name


def test_decode_workers_get_no_media_to_look_at(stack: Stack) -> None:
    worker = stack.worker[1]
    before = worker.metrics()
    answer = stack.chat("rust", [part(data_uri(picture())), "Describe the image"])
    assert answer.status == 200, answer.body
    change = worker.metrics() - before
    assert change.total("dynamo_worker_ext_mm_items_total") == 0
    assert change.by("outcome", "dynamo_worker_ext_requests_total") == {"continued": 1}


def test_options_reach_decode(stack: Stack, door: str) -> None:
    content = [part(data_uri(picture())), "Describe the image"]
    short = stack.chat(door, content, max_tokens=3)
    long = stack.chat(door, content, max_tokens=40)
    assert (short.usage["completion_tokens"], long.usage["completion_tokens"]) == (3, 40)
    assert long.text.startswith(short.text)
    told = stack.chat(door, content, max_tokens=4, logprobs=True, top_logprobs=2)
    entries = told.body["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4


def test_several_choices_are_refused(stack: Stack) -> None:
    answer = stack.chat("rust", "hello", n=2, temperature=1)
    assert answer.status == 400, answer.body
    assert "n above 1" in str(answer.body)


@pytest.mark.parametrize(("role", "component"), [("prefill", "prefill"), ("decode", "backend")])
def test_the_health_check_waits_for_no_other_worker(
    stack: Stack, tmp_path: Path, role: str, component: str
) -> None:
    from transformers import AutoTokenizer

    (worker,) = [worker for worker in stack.worker if worker.role == role]
    check: dict[str, Any] = {
        "_HEALTH_CHECK": True,
        "token_ids": [1],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    if role == "prefill":
        check["token_ids"] = AutoTokenizer.from_pretrained(stack.model).encode(IMAGE)
        check["multi_modal_data"] = {"image_url": [{"Url": data_uri(picture())}]}
    with DirectClient(stack.env, tmp_path / "client.log", component) as client:
        reply = client.send(check, stack.instance_id(worker))
    assert reply.error is None, reply.error
    assert len(reply.tokens) == 1
