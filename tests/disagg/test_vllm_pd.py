"""Prefill and decode on vLLM workers of their own, behind Dynamo's real frontends.

What an aggregated worker of the same arguments answers is the measure. Media is processed on the
prefill worker alone; decode continues with the KV and a few numbers. The tests that end a worker
come last and start the next one.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.direct import DirectClient, FrontendDouble, Reply
from tests.direct import request as direct_request
from tests.disagg.deployment import PROMPTS, ROLE, RUST, Deployment, the
from tests.disagg.relay import Relay
from tests.pictures import data_uri, part, picture
from tests.stack import FrontendSpec, Process, Seen, Stack, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FRONTENDS = {"rust": RUST, "vllm": FrontendSpec("vllm", "shm")}

REQUESTS = "dynamo_worker_ext_requests_total"
LOST_KV = "dynamo_worker_ext_handoff_failures_total"


@pytest.fixture(scope="module")
def stack(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: Mapping[str, str]
) -> Iterator[Stack]:
    # After `expected`: no more engines at a time than are needed.
    stack = Deployment(model, tmp_path_factory.mktemp("pd"), FRONTENDS, workers=0, grace_s=5)
    stack.add_worker(ROLE, "prefill")
    stack.add_worker(ROLE, "decode")
    with stack:
        yield stack


@pytest.fixture(params=list(FRONTENDS))
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(stack: Stack, door: str, *content: Any, **options: Any) -> Seen:
    seen = stack.ask(door, list(content), **options)
    assert seen.answer.status == 200, seen.answer.body
    return seen


def idle(stack: Stack, timeout: float = 90.0) -> None:
    """Until nothing runs and no KV is kept."""

    def is_idle() -> bool:
        names = ("dynamo_worker_ext_requests_in_flight", "vllm:num_requests_running")
        return not any(stack.total(name) for name in (*names, "vllm:kv_cache_usage_perc"))

    wait_for(is_idle, "all is idle and all KV given up", timeout)


# Answers.


@pytest.mark.parametrize("name", list(PROMPTS))
def test_answers_are_the_aggregated_workers(
    stack: Stack, expected: Mapping[str, str], door: str, name: str
) -> None:
    for _ in range(2):
        assert ask(stack, door, *PROMPTS[name]).text == expected[name]


def test_an_image_is_processed_once_and_by_prefill(stack: Stack, door: str) -> None:
    new = part(data_uri(picture()))
    first = ask(stack, door, new, "Describe the image")
    prefill, decode = first.of("prefill"), first.of("decode")
    came = "received" if door == "vllm" else "raw"
    assert (prefill.outcome, prefill.items) == (came, {came: 1})
    assert prefill.processed_images == (0 if door == "vllm" else 1)
    assert (decode.outcome, decode.items, decode.processed_images) == ("continued", {}, 0)
    assert first.answer.cached_tokens == first.predicted_tokens == 0

    again = ask(stack, door, new, "Describe the image")
    prefill, decode = again.of("prefill"), again.of("decode")
    assert again.text == first.text
    assert (prefill.outcome, prefill.items) == ("hit", {"hit": 1})
    assert (decode.outcome, again.processed_images, again.received_bytes) == ("continued", 0, 0)
    # Prefill had all that can be had, and the router knew.
    assert again.predicted_tokens == again.answer.reusable_tokens > 0
    assert again.answer.cached_tokens == again.answer.reusable_tokens


def test_swapped_images_share_nothing(stack: Stack, door: str) -> None:
    one, other = part(data_uri(picture())), part(data_uri(picture()))
    first = ask(stack, door, one, other, "Compare")
    swapped = ask(stack, door, other, one, "Compare")
    assert swapped.text != first.text
    assert swapped.predicted_tokens == swapped.answer.cached_tokens == 0
    assert swapped.of("prefill").outcome == "hit"


def test_text_only(stack: Stack, door: str) -> None:
    prompt = f"{secrets.token_hex(8)} says " + "one two three four five six seven " * 8
    first, again = ask(stack, door, prompt), ask(stack, door, prompt)
    assert again.text == first.text
    for seen in (first, again):
        assert (seen.of("prefill").outcome, seen.of("decode").outcome) == ("text", "text")
    assert again.predicted_tokens == again.answer.reusable_tokens > 0


def test_a_stream_has_every_token_once(stack: Stack, door: str) -> None:
    content = [part(data_uri(picture())), "Tell a story"]
    whole = ask(stack, door, *content, max_tokens=40).text
    stream = stack.stream(door, content, max_tokens=40).wait_ended()
    assert (stream.status, stream.error) == (200, None)
    assert stream.text == whole


def test_min_tokens_and_logprobs_are_decodes_affair(stack: Stack) -> None:
    content = [part(data_uri(picture())), "Go on"]
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "min_tokens": 5}
    seen = ask(stack, "rust", *content, max_tokens=6, **options)
    (choice,) = seen.answer.body["choices"]
    assert len(choice["logprobs"]["content"]) == 6 == seen.answer.usage["completion_tokens"]
    assert seen.of("prefill").total("vllm:generation_tokens_total") == 1
    assert seen.of("decode").total("vllm:generation_tokens_total") == 6


# Refusals.


def test_limits_hold(stack: Stack) -> None:
    images = [part(data_uri(picture())) for _ in range(4)]
    answer = stack.chat("rust", [*images, "Describe"])
    assert answer.status == 400, answer.body
    assert "at most 3" in str(answer.body)


def test_several_choices_are_refused(stack: Stack) -> None:
    answer = stack.chat("rust", "Hello", n=2, temperature=1.0)
    assert answer.status == 400, answer.body
    assert "prefill and decode" in str(answer.body)


@pytest.fixture(scope="module")
def prefill(stack: Stack) -> Iterator[DirectClient]:
    with DirectClient(stack.env, stack.folder / "to_prefill.log", "prefill") as client:
        yield client


@pytest.fixture(scope="module")
def decode(stack: Stack) -> Iterator[DirectClient]:
    with DirectClient(stack.env, stack.folder / "to_decode.log") as client:
        yield client


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[FrontendDouble]:
    double = FrontendDouble(model)
    yield double
    double.close()


def prefilled(stack: Stack, prefill: DirectClient, front: FrontendDouble) -> dict[str, Any]:
    """A request with a new picture, and what prefill left for it."""
    body = direct_request(front.render([picture()]), raw=True, max_tokens=50)
    reply = prefill.send(body, stack.instance_id(the(stack, "prefill")))
    assert (len(reply.tokens), reply.error) == (1, None)
    return {**body, "prefill_result": {"disaggregated_params": reply.handoff}}


def go_on(stack: Stack, decode: DirectClient, body: Mapping[str, Any]) -> Reply:
    return decode.send(body, stack.instance_id(the(stack, "decode")), timeout=120)


def test_a_handoff_is_small_and_needs_nothing_else(
    stack: Stack, prefill: DirectClient, decode: DirectClient, front: FrontendDouble
) -> None:
    body = prefilled(stack, prefill, front)
    assert len(json.dumps(body["prefill_result"])) < 1500
    before = the(stack, "decode").metrics()
    bare = {**body, "extra_args": {}}
    del bare["multi_modal_data"]
    reply = go_on(stack, decode, bare)
    assert (len(reply.tokens), reply.error) == (50, None)
    assert (the(stack, "decode").metrics() - before).by("outcome", REQUESTS) == {"continued": 1}


def test_decode_without_prefill_says_what_is_missing(
    stack: Stack, decode: DirectClient, front: FrontendDouble
) -> None:
    body = direct_request(front.render([picture()]), raw=True)
    reply = go_on(stack, decode, body)
    assert reply.tokens == []
    assert "without the work of a prefill worker" in str(reply.error)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("media", 0, "facts"), {}),
        (("media", 0, "facts", "image_grid_thw", "values"), [1, 2, 2]),
        (("media", 0, "offset"), 10**6),
        (("kv_transfer_params", "remote_block_ids"), [[]]),
        (("kv_transfer_params",), None),
        (("prompt",), [[1, 2**31 - 1]]),
    ],
    ids=str,
)
def test_a_malformed_handoff_harms_nobody(
    stack: Stack, prefill: DirectClient, decode: DirectClient, front: FrontendDouble,
    way: tuple[Any, ...], value: Any,
) -> None:  # fmt: skip
    body = prefilled(stack, prefill, front)
    good = json.loads(json.dumps(body))
    at = body["prefill_result"]["disaggregated_params"]
    for step in way[:-1]:
        at = at[step]
    at[way[-1]] = value
    reply = go_on(stack, decode, body)
    assert reply.tokens == []
    assert "prefill handed over" in str(reply.error)
    assert go_on(stack, decode, good).error is None


def test_all_kv_is_given_up_in_the_end(stack: Stack) -> None:
    idle(stack)


# Workers that end. From here on each test ends one.


def replace(stack: Stack, ended: Process, *args: str) -> Process:
    """Another worker instead of one that is gone."""
    stack.ended(ended)
    new = stack.add_worker(ROLE, ended.role, *args)
    stack.wait_ready()
    return new


def streams_of(stack: Stack, count: int, tokens: int) -> list[Any]:
    streams = [
        stack.stream(
            "rust",
            [part(data_uri(picture())), f"{secrets.token_hex(4)} says"],
            max_tokens=tokens,
            temperature=1.0,
        )
        for _ in range(count)
    ]
    for stream in streams:
        stream.wait_begun()
    return streams


def test_sigterm_of_prefill_keeps_the_kv_until_it_was_taken(
    stack: Stack, prefill: DirectClient, decode: DirectClient, front: FrontendDouble
) -> None:
    idle(stack)
    body = prefilled(stack, prefill, front)
    victim = the(stack, "prefill")
    instance = stack.instance_id(victim)
    streams = streams_of(stack, 2, 400)
    victim.signal(signal.SIGTERM)
    wait_for(lambda: not stack.is_discovered(instance), "out of discovery", 5)
    time.sleep(7)  # longer than the grace period
    assert victim.alive, "it left with KV that nobody had taken"
    assert go_on(stack, decode, body).error is None
    assert victim.wait(60) == 0
    for stream in streams:  # which decode had taken up before
        assert (stream.wait_ended().status, stream.error) == (200, None)
    wait_for(lambda: not victim.members(), "no process left behind", 10)
    replace(stack, victim)
    assert ask(stack, "rust", *PROMPTS["one image"]).answer.status == 200


def test_prefill_killed_after_its_part_is_an_error_and_no_answer_without_the_image(
    stack: Stack, prefill: DirectClient, decode: DirectClient, front: FrontendDouble
) -> None:
    body = prefilled(stack, prefill, front)
    victim, survivor = the(stack, "prefill"), the(stack, "decode")
    forget = stack.kill(victim)
    before = survivor.metrics()
    reply = go_on(stack, decode, body)
    assert reply.tokens == []
    # It is not read from, which UCX, in vLLM's connector (0.31.0, NIXL 1.4.1), may not survive.
    assert "the prefill worker that has the KV of the prompt is gone" in str(reply.error)
    change = survivor.metrics() - before
    assert change.by("reason", LOST_KV) == {"kv": 1}
    assert change.by("outcome", REQUESTS) == {"lost": 1}
    # Nobody does its part now: an error at once, that a client may act on.
    answer = stack.chat("rust", list(PROMPTS["one image"]), timeout=60)
    assert answer.status == 503, answer.body
    forget()
    replace(stack, victim)
    assert ask(stack, "rust", *PROMPTS["one image"]).answer.status == 200


def test_decode_killed_under_load(stack: Stack, expected: Mapping[str, str]) -> None:
    victim = the(stack, "decode")
    streams = streams_of(stack, 2, 4000)
    forget = stack.kill(victim)
    for stream in streams:
        assert stream.wait_ended().error
    forget()
    # So little KV that two long answers do not fit: the next test has some of it given up.
    replace(stack, victim, "--max-model-len", "512", "--num-gpu-blocks-override", "24")
    assert ask(stack, "rust", *PROMPTS["one image"]).text == expected["one image"]
    idle(stack)


def test_a_prompt_that_decode_had_to_give_up_is_not_computed_without_its_image(
    stack: Stack, expected: Mapping[str, str]
) -> None:
    worker = the(stack, "decode")
    before = worker.metrics()
    streams = streams_of(stack, 3, 380)
    ended = [stream.wait_ended() for stream in streams]
    change = worker.metrics() - before
    assert change.total("vllm:num_preemptions_total") > 0
    given_up = [stream for stream in ended if stream.error]
    assert 0 < len(given_up) < len(ended)
    assert change.by("reason", LOST_KV) == {"kv": len(given_up)}
    assert ask(stack, "rust", *PROMPTS["one image"]).text == expected["one image"]


def test_sigterm_of_decode_under_load(stack: Stack) -> None:
    idle(stack)
    victim = the(stack, "decode")
    streams = streams_of(stack, 1, 400)
    victim.signal(signal.SIGTERM)
    for stream in streams:
        assert (stream.wait_ended().status, stream.error) == (200, None)
    assert victim.wait(60) == 0
    wait_for(lambda: not victim.members(), "no process left behind", 10)
    stack.ended(victim)


def test_a_decode_worker_whose_kv_never_comes_leaves_and_says_so(
    model: Path, tmp_path: Path, front: FrontendDouble
) -> None:
    """Over TCP, where a read needs the other end's help, which is stopped just before."""
    pair = Deployment(
        model,
        tmp_path,
        {},
        workers=0,
        worker_args=("--drain-timeout", "1"),
        worker_env={"UCX_TLS": "tcp"},
        grace_s=1,
    )
    stopped = pair.add_worker(ROLE, "prefill")
    victim = pair.add_worker(ROLE, "decode", "--kv-timeout", "3")

    with (
        pair,
        DirectClient(pair.env, tmp_path / "to_prefill.log", "prefill") as prefill,
        DirectClient(pair.env, tmp_path / "to_decode.log") as decode,
    ):
        body = prefilled(pair, prefill, front)
        kv = body["prefill_result"]["disaggregated_params"]["kv_transfer_params"]
        port, then = kv["remote_port"], lambda: stopped.signal_all(signal.SIGSTOP)
        try:
            # The addresses of the KV are the first long thing that the side channel says.
            with closing(Relay(port, after_bytes=500, then=then)) as relay:
                kv["remote_port"] = relay.port
                reply = go_on(pair, decode, body)
                assert relay.done
            assert (reply.tokens, bool(reply.error)) == ([], True)
            assert victim.wait(60) == 1
            assert "no KV has come from any prefill worker for 3 s" in victim.tail(400)
            wait_for(lambda: not victim.members(), "no process left behind", 10)
            pair.ended(victim)
        finally:
            stopped.signal_all(signal.SIGCONT)
