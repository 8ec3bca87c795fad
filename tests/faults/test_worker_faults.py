"""Faults made for real around running workers: no answer without its picture, nothing hangs.

One stack for all: worker 0 lives in a mount namespace with a ``/dev/shm`` of its own, as a worker
in another container does, so that it cannot read what frontends put there. The tests that end a
worker come last and start the next one.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.apart import prefix_held_by, private_shm
from tests.counted_worker import RUNNING as SGLANG_RUNNING
from tests.direct import DirectClient, FrontendDouble, Rendered, Segments, request
from tests.engines import BLOCK, ENGINES, ROOT, SGLANG, VLLM, Engine
from tests.pictures import data_uri, part, picture
from tests.stack import (
    BASE_ENV,
    FrontendSpec,
    Process,
    Seen,
    Stack,
    Stream,
    free_port,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MIGRATE = ("--migration-limit", "2")
#: Tokens: a quarter of a minute at least.
LONG = 7500
#: What a random model says greedily may have no text for thousands of tokens, and frontends see
#: that a client has left when they have something to say.
TALKING: dict[str, Any] = {"temperature": 1.0}


@dataclass(frozen=True)
class Traits:
    """What differs between the engines here.

    Attributes:
        running: the series of requests that the engine works on.
        generated: the series of tokens that it has generated.
        process: what the name of its main process begins with.
        loading: what it logs before it loads anything.
        busy: tokens that take it seconds, but not as long as a drain may.
        args: more of its arguments.
    """

    running: str
    generated: str
    process: str
    loading: str
    busy: int
    args: tuple[str, ...] = ()


TRAITS = {
    VLLM: Traits(
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "VLLM::EngineCor",
        "Initializing a V1 LLM engine",
        2000,
    ),
    SGLANG: Traits(
        SGLANG_RUNNING,
        "sglang:generation_tokens_total",
        "sglang::schedul",
        "server_args=",
        400,
        ("--enable-metrics",),
    ),
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen2_5_vl")


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[Stack]:
    frontends = {
        "migrating": FrontendSpec("vllm", "shm", MIGRATE),
        "plain": FrontendSpec("vllm", "shm"),
        "rust": FrontendSpec("rust", "off", MIGRATE),
    }
    folder, args = tmp_path_factory.mktemp("faults"), TRAITS[engine].args
    stack = Stack(model, folder, frontends, workers=0, engine=engine, worker_args=args, grace_s=5)
    stack.add_worker(wrap=private_shm("256m"))
    stack.add_worker()
    with stack:
        yield stack


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[FrontendDouble]:
    double = FrontendDouble(model)
    yield double
    double.close()


@pytest.fixture
def segments() -> Iterator[Segments]:
    with Segments() as segments:
        yield segments


# Segments that cannot be read.


def test_an_unreadable_segment_is_answered_by_another_worker(stack: Stack) -> None:
    uri = part(data_uri(picture()))
    text = prefix_held_by(stack, 0)
    before = [worker.metrics() for worker in stack.worker]
    answer = stack.chat("migrating", [text, uri])
    assert answer.status == 200, answer.body
    lost, served = (
        worker.metrics() - old for worker, old in zip(stack.worker, before, strict=True)
    )
    outcomes = "dynamo_worker_ext_requests_total"
    assert set(lost.by("outcome", outcomes)) == {"lost"}
    assert served.by("outcome", outcomes) == {"received": 1}
    failures = "dynamo_worker_ext_mm_transfer_failures_total"
    assert set(lost.by("reason", failures)) == {"segment_missing"}
    # The answer is that of the picture: the same as from its URL. After so much text the tiny model
    # says the same of two pictures now and then.
    assert answer.text == stack.chat("rust", [text, uri]).text
    others = [part(data_uri(picture())) for _ in range(5)]
    assert any(answer.text != stack.chat("rust", [text, other]).text for other in others)


def test_an_unreadable_segment_is_an_error_where_nobody_else_may_try(stack: Stack) -> None:
    text = prefix_held_by(stack, 0)
    before = stack.worker[0].metrics()
    answer = stack.chat("plain", [text, part(data_uri(picture()))])
    # The HTTP service of Dynamo 1.6.1 keeps the text of 5xx errors to itself.
    assert answer.status == 503, answer.body
    assert "pre-processed media did not arrive (segment_missing)" in stack.worker[0].tail(400)
    change = stack.worker[0].metrics() - before
    assert change.by("outcome", "dynamo_worker_ext_requests_total") == {"lost": 1}
    # Requests whose pictures it can get are served as before.
    assert stack.chat("plain", [text, "and more text"]).status == 200
    assert stack.chat("rust", [text, part(data_uri(picture()))]).status == 200


@pytest.mark.parametrize("module", ["dynamo.frontend", "dynamo_worker_ext.frontend"])
def test_a_sender_without_room_harms_nobody_else(stack: Stack, module: str) -> None:
    """/dev/shm of the frontend is full. Upstream's (1.6.1) dies of SIGBUS then, ours lives on."""
    name = f"cramped-{module}"
    cramped = FrontendSpec("vllm", "shm", wrap=private_shm("64k"), module=module)
    process = stack.add_frontend(name, cramped)
    stack.wait_ready()
    uri = part(data_uri(picture()))
    try:
        answer = stack.chat(name, ["Describe", uri])
    except ConnectionError:
        assert module == "dynamo.frontend", process.tail()
        assert process.wait(90) == -signal.SIGBUS, process.tail()
    else:
        assert answer.status in (200, 503), answer.body
        if answer.status == 200:
            assert answer.text == stack.chat("rust", ["Describe", uri]).text
        assert stack.chat(name, "Are you there?").status == 200
        assert process.alive
    process.signal(signal.SIGKILL)
    process.wait(90)
    stack.ended(process)
    assert stack.chat("rust", ["Describe", uri]).status == 200
    idle(stack)


# Malformed transfers, straight to the worker's endpoint.


@dataclass(frozen=True)
class Spoiled:
    """One malformed transfer: what is done to a good request, and the reason that is counted."""

    name: str
    reason: str
    spoil: Callable[[dict[str, Any]], None]

    def __str__(self) -> str:
        return self.name


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts `value` where `path` says, below ``extra_args``."""

    def spoil(body: dict[str, Any]) -> None:
        *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        at: Any = body["extra_args"]
        for step in way:
            at = at[step]
        at[last] = value

    return spoil


def _hash(value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(body: dict[str, Any]) -> None:
        extra = body["extra_args"]
        extra["mm_hashes"] = extra["mm_hashes_by_modality"]["image"] = [value]
        extra["mm_kwargs_shm"]["mm_hashes"] = [value]

    return spoil


def _placeholders(value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(body: dict[str, Any]) -> None:
        extra = body["extra_args"]
        extra["mm_placeholders"] = extra["mm_placeholders_by_modality"]["image"] = value

    return spoil


SHM = "mm_kwargs_shm.items.0."
SPOILED = [
    Spoiled("hash in capitals", "invalid_hash", _hash("A" * 64)),
    Spoiled("hash too short", "invalid_hash", _hash("a" * 15)),
    Spoiled("hash that int() takes", "invalid_hash", _hash("-0x1_0")),
    Spoiled("size 0", "invalid_size", _set(SHM + "size", 0)),
    Spoiled("size -1", "invalid_size", _set(SHM + "size", -1)),
    Spoiled("size 2**40", "invalid_size", _set(SHM + "size", 2**40)),
    Spoiled("size beyond the segment", "segment_short", _set(SHM + "size", 2**24)),
    Spoiled("name that climbs", "invalid_name", _set(SHM + "name", "../etc/passwd")),
    Spoiled("name with a slash", "invalid_name", _set(SHM + "name", "a/../b")),
    Spoiled("name of nothing", "segment_missing", _set(SHM + "name", "mm_kwargs_1_gone_0")),
    Spoiled("no placeholder", "invalid_count", _placeholders([])),
    Spoiled("two placeholders", "invalid_count", _placeholders([[4, 1], [6, 1]])),
    Spoiled("placeholder outside", "invalid_placeholder", _placeholders([[4, 10**6]])),
    Spoiled("placeholder before", "invalid_placeholder", _placeholders([[-4, 8]])),
    Spoiled("placeholder of nothing", "invalid_placeholder", _placeholders([[4, 0]])),
    Spoiled("negative token", "invalid_tokens", _set("expanded_token_ids.0", -1)),
    Spoiled("no tokens", "invalid_tokens", _set("expanded_token_ids", [])),
]


class Marker:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def framed(*buffers: bytes) -> bytes:
    """A payload's frame: how many buffers, and each with its length."""
    parts = [struct.pack("<Q", len(buffer)) + buffer for buffer in buffers]
    return struct.pack("<I", len(buffers)) + b"".join(parts)


@dataclass
class Endpoint:
    """Worker 1's endpoint."""

    stack: Stack
    client: DirectClient
    instance: str

    @property
    def worker(self) -> Process:
        return self.stack.worker[1]

    def check(
        self, rendered: Rendered, body: Mapping[str, Any], reason: str, expected: Sequence[int]
    ) -> None:
        """Without raw media an error that says why, with it the right answer; both counted."""
        for raw in (False, True):
            before = self.worker.metrics()
            full = dict(body)
            if raw:
                full |= request(rendered, raw=True) | {"extra_args": body["extra_args"]}
            reply = self.client.send(full, self.instance)
            change = self.worker.metrics() - before
            outcome = change.by("outcome", "dynamo_worker_ext_requests_total")
            reasons = change.by("reason", "dynamo_worker_ext_mm_transfer_failures_total")
            assert reasons == {reason: 1}
            if raw:
                assert (reply.tokens, reply.error) == (list(expected), None)
                assert outcome == {"reprocessed": 1}
            else:
                assert reply.tokens == []
                assert f"pre-processed media did not arrive ({reason})" in str(reply.error)
                assert outcome == {"lost": 1}


@pytest.fixture(scope="module")
def endpoint(stack: Stack) -> Iterator[Endpoint]:
    with DirectClient(stack.env, stack.folder / "direct.log") as client:
        yield Endpoint(stack, client, stack.instance_id(stack.worker[1]))


@pytest.fixture(scope="module")
def good(endpoint: Endpoint, front: FrontendDouble) -> tuple[Rendered, list[int]]:
    """A prompt with one picture, and the answer to it."""
    rendered = front.render([picture(1)])
    reply = endpoint.client.send(request(rendered, raw=True), endpoint.instance)
    assert reply.error is None
    return rendered.renamed(), reply.tokens


def test_a_good_transfer_over_the_request_plane(
    endpoint: Endpoint, good: tuple[Rendered, list[int]], segments: Segments
) -> None:
    rendered, expected = good[0].renamed(), good[1]
    refs = [segments.put(item.payload) for item in rendered.items]
    before = endpoint.worker.metrics()
    reply = endpoint.client.send(request(rendered, shm=refs), endpoint.instance)
    assert (reply.tokens, reply.error) == (expected, None)
    change = endpoint.worker.metrics() - before
    assert change.by("outcome", "dynamo_worker_ext_requests_total") == {"received": 1}


@pytest.mark.parametrize("spoiled", SPOILED, ids=str)
def test_malformed_metadata(
    spoiled: Spoiled,
    endpoint: Endpoint,
    good: tuple[Rendered, list[int]],
    segments: Segments,
) -> None:
    rendered, expected = good[0].renamed(), good[1]
    body = request(rendered, shm=[segments.put(item.payload) for item in rendered.items])
    spoiled.spoil(body)
    endpoint.check(rendered, body, spoiled.reason, expected)


def test_overlapping_placeholders(
    endpoint: Endpoint, front: FrontendDouble, segments: Segments
) -> None:
    rendered = front.render([picture(1), picture(2)]).renamed()
    expected = endpoint.client.send(request(rendered, raw=True), endpoint.instance).tokens
    rendered = rendered.renamed()
    body = request(rendered, shm=[segments.put(item.payload) for item in rendered.items])
    (first, length), _ = body["extra_args"]["mm_placeholders"]
    _placeholders([[first, length], [first + length - 1, length]])(body)
    endpoint.check(rendered, body, "invalid_placeholder", expected)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("truncated", "invalid_frame"),
        ("over-long", "invalid_frame"),
        ("noise", "invalid_frame"),
        ("pickle", "invalid_frame"),
        ("pickle in its frame", "invalid_pickle"),
        ("a video", "invalid_type"),
        ("another model's", "invalid_type"),
        ("another size's", "invalid_type"),
    ],
)
def test_malformed_payload(
    damage: str,
    reason: str,
    endpoint: Endpoint,
    front: FrontendDouble,
    good: tuple[Rendered, list[int]],
    segments: Segments,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    rendered, expected = good[0].renamed(), good[1]
    payload = rendered.items[0].payload
    trap = pickle.dumps(Marker(tmp_path / "unpickled"))
    match damage:
        case "truncated":
            payload = payload[:-100]
        case "over-long":
            payload += bytes(100)
        case "noise":
            payload = secrets.token_bytes(len(payload))
        case "pickle":
            payload = trap
        case "pickle in its frame":
            from vllm.v1.serial_utils import CUSTOM_TYPE_PICKLE

            field = msgspec.msgpack.Ext(CUSTOM_TYPE_PICKLE, trap)
            payload = framed(msgspec.msgpack.encode({"pixel_values": field}))
        case "a video":
            frames = np.zeros((4, 224, 224, 3), np.uint8)
            payload = front.render_video(frames).items[0].payload
        case "another model's":
            other = FrontendDouble(tiny_model("qwen3_vl"))
            payload = other.render([picture(1)]).items[0].payload
            other.close()
        case "another size's":
            payload = front.render([picture(1, size=448)]).items[0].payload
    body = request(rendered, shm=[segments.put(payload)])
    endpoint.check(rendered, body, reason, expected)
    assert not (tmp_path / "unpickled").exists()


# Clients and frontends that go away.


def running(stack: Stack) -> float:
    return stack.total(TRAITS[stack.engine].running)


def idle(stack: Stack, timeout: float = 60.0) -> None:
    """Wait until no engine works and no worker serves."""
    wait_for(
        lambda: running(stack) == 0 == stack.total("dynamo_worker_ext_requests_in_flight"),
        "all engines idle",
        timeout,
    )


def generated(stack: Stack) -> float:
    return stack.total(TRAITS[stack.engine].generated)


@pytest.mark.parametrize("frontend", ["migrating", "rust"])
def test_a_client_that_disconnects_stops_the_engine(stack: Stack, frontend: str) -> None:
    idle(stack)
    before = generated(stack)
    stream = stack.stream(
        frontend, [part(data_uri(picture())), "Go on"], max_tokens=LONG, **TALKING
    )
    wait_for(lambda: running(stack) == 1, "it runs")
    stream.disconnect()
    idle(stack)
    assert generated(stack) - before < LONG


def test_a_killed_frontend_stops_the_engine(stack: Stack) -> None:
    idle(stack)
    before = generated(stack)
    process = stack.add_frontend("doomed", FrontendSpec("vllm", "shm", MIGRATE))
    stack.wait_ready()
    for _ in range(4):
        stack.stream("doomed", [part(data_uri(picture())), "Go on"], max_tokens=LONG, **TALKING)
    wait_for(lambda: running(stack) == 4, "all run")
    process.signal(signal.SIGKILL)
    # Its sockets close when it is gone, which takes a busy machine seconds.
    process.wait(90)
    stack.ended(process)
    idle(stack)
    assert generated(stack) - before < 4 * LONG
    assert stack.chat("plain", "Are you there?").status == 200


# Start-up.


def test_a_taken_system_port_ends_the_worker_before_it_loads_anything(
    model: Path, engine: Engine
) -> None:
    port = free_port()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        start = time.monotonic()
        ended = subprocess.run(
            [
                engine.python,
                "-m",
                engine.module,
                engine.model_flag,
                model,
                *engine.args(BLOCK),
            ],
            env={**os.environ, **BASE_ENV, **engine.env, "DYN_SYSTEM_PORT": str(port)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 2
    assert str(port) in ended.stderr
    assert TRAITS[engine].loading not in ended.stdout + ended.stderr
    assert time.monotonic() - start < 60


# Workers that end. From here on each test ends one.


def load(stack: Stack, victim: Process, frontends: Sequence[str], **options: Any) -> list[Stream]:
    """Requests that run for seconds, some of them on `victim`."""
    streams: list[Stream] = []
    for _ in range(6):
        for frontend in frontends:
            content = [f"{secrets.token_hex(4)} says", part(data_uri(picture()))]
            # Without migration a picture would be lost on a worker that cannot read it.
            content = content[:1] if frontend == "plain" else content
            streams.append(stack.stream(frontend, content, **options))
    working = TRAITS[stack.engine].running
    wait_for(lambda: victim.metrics().total(working) >= 2, "the victim works")
    return streams


def test_sigterm_under_load(stack: Stack) -> None:
    idle(stack)
    victim = stack.worker[0]
    instance = stack.instance_id(victim)
    streams = load(stack, victim, ["rust"], max_tokens=TRAITS[stack.engine].busy)
    victim.signal(signal.SIGTERM)
    wait_for(lambda: not stack.is_discovered(instance), "out of discovery", 2)
    assert any(stream.error for stream in streams), "nothing was in flight any more"
    # New ones go to the other worker, while the first still finishes what it has.
    for _ in range(4):
        assert stack.chat("rust", secrets.token_hex(8)).status == 200
    for stream in streams:
        assert (stream.wait_ended().status, stream.error) == (200, None)
    assert victim.wait(60) == 0
    wait_for(lambda: not victim.members(), "no process left behind", 10)
    stack.ended(victim)


def engine_process(stack: Stack, worker: Process) -> int:
    name = TRAITS[stack.engine].process
    (pid,) = [pid for pid, its in worker.members().items() if its.startswith(name)]
    return pid


def test_a_killed_engine(stack: Stack) -> None:
    """Idle, then under load, with another worker beside it."""
    idler, victim = stack.add_worker(), stack.add_worker()
    stack.wait_ready()
    survivor = stack.worker[1]
    idle(stack)

    instance = stack.instance_id(idler)
    os.kill(engine_process(stack, idler), signal.SIGKILL)
    wait_for(lambda: not stack.is_discovered(instance), "out of discovery when idle", 2)
    assert idler.wait(30) == 1
    wait_for(lambda: not idler.members(), "no process left behind", 10)
    stack.ended(idler)
    assert stack.chat("plain", "Who is there?").status == 200

    instance = stack.instance_id(victim)
    streams = load(stack, victim, ["plain", "rust"], max_tokens=TRAITS[stack.engine].busy)
    os.kill(engine_process(stack, victim), signal.SIGKILL)
    wait_for(lambda: not stack.is_discovered(instance), "out of discovery under load", 2)
    assert victim.wait(30) == 1
    for plain, rust in zip(streams[::2], streams[1::2], strict=True):
        # An error or an end; the other frontend has them taken up by the survivor.
        plain.wait_ended()
        assert (rust.wait_ended().status, rust.error) == (200, None)
    wait_for(lambda: not victim.members(), "no process left behind", 10)
    stack.ended(victim)

    assert survivor.alive
    seen: Seen = stack.ask("plain", [part(data_uri(picture())), "And you?"])
    assert seen.answer.status == 200
