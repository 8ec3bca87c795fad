"""The demo's client: what its table must show, and what it says and returns where it does not."""

from __future__ import annotations

import base64
import io
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from launch import demo_client
from launch.demo_client import Deployment, Report, Row, Sample

CLIENT = Path(__file__).parents[2] / "launch/demo_client.py"
BLOCK = 32
URL = "http://127.0.0.1:18000"
MOVED = 1000
READY = {
    "url": URL,
    "model": "tiny",
    "mm_transfer": "shm",
    "workers": [{"name": "worker0", "url": "http://a"}, {"name": "worker1", "url": "http://b"}],
}

Demo = Callable[..., int]


def row(request: str, outcome: str, prompt: int, text: str, **traces: Any) -> Row:
    traces = {"worker": "worker0", **traces}
    return Row(request, 200, prompt, 12, outcome, blocks=prompt // BLOCK, text=text, **traces)


def pair(request: str, outcome: str, prompt: int, text: str, **traces: Any) -> list[Row]:
    """A request and its repeat, of which all full blocks are cached."""
    full = prompt // BLOCK
    again = "text" if outcome == "text" else "hit"
    cached = {"blocks_overlapping": full, "cached_tokens": (prompt - 1) // BLOCK * BLOCK}
    return [
        row(request, outcome, prompt, text, **traces),
        row(f"{request} again", again, prompt, text, **cached),
    ]


#: As a deployment with a frontend that sends pictures shows it.
SENT = [
    *pair("text", "text", 70, "a story"),
    *pair("image A", "received", 290, "a", bytes_received=MOVED),
    *pair(
        "images A, B", "received", 550, "a and b",
        bytes_received=MOVED, blocks_overlapping=8, cached_tokens=256,
    ),
    # The last token of a prompt of full blocks alone is computed all the same.
    *pair("images B, A", "hit", 544, "b and a"),
]  # fmt: skip
#: As one whose workers are sent the pictures as they are.
RAW = [
    replace(one, outcome="raw" if one.outcome == "received" else one.outcome, bytes_received=0)
    for one in SENT
]


def changed(rows: Sequence[Row], request: str, **cells: Any) -> list[Row]:
    assert request in {one.request for one in rows}
    return [replace(one, **cells) if one.request == request else one for one in rows]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """Runs the client on a deployment that gives these rows; the exit status."""

    def demo(rows: Sequence[Row], *argv: str, transfer: str = "shm") -> int:
        ready = tmp_path / "ready.json"
        ready.write_text(json.dumps({**READY, "mm_transfer": transfer}))
        by_name = {one.request: one for one in rows}
        monkeypatch.setattr(demo_client, "ask", lambda _, request, __: by_name[request])
        flags = ["--ready", str(ready), "--block-size", str(BLOCK), *argv]
        monkeypatch.setattr(sys, "argv", ["demo_client.py", *flags])
        return demo_client.main()

    return demo


@pytest.mark.parametrize(("rows", "transfer"), [(SENT, "shm"), (RAW, "off")], ids=["shm", "off"])
def test_a_right_table_passes(
    demo: Demo, rows: list[Row], transfer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(rows, transfer=transfer) == 0
    assert "not as it must be" not in capsys.readouterr().err


def test_two_pictures_may_go_to_the_other_worker(demo: Demo) -> None:
    """Which has neither of them."""
    rows = changed(
        SENT, "images A, B",
        worker="worker1", bytes_received=2 * MOVED, blocks_overlapping=0, cached_tokens=0,
    )  # fmt: skip
    assert demo(changed(rows, "images A, B again", worker="worker1")) == 0


@pytest.mark.parametrize(
    ("request_", "cells", "said"),
    [
        ("text", {"http_status": 503, "error": "no room"}, "text: 503 no room"),
        ("images B, A again", {"http_status": 500}, "images B, A again: 500"),
        ("text", {"outcome": "raw"}, "the outcome is raw, not text"),
        ("text", {"bytes_received": 5}, "5 bytes were moved"),
        ("text", {"worker": "worker1"}, "worker1 had it, worker0 got it"),
        ("text again", {"outcome": "hit"}, "the outcome is hit, not text"),
        ("text again", {"outcome": "?", "worker": "?"}, "the outcome is ?, not text"),
        ("text again", {"worker": "worker1"}, "worker0 had it, worker1 got it"),
        ("text again", {"bytes_received": 5}, "5 bytes were moved"),
        ("text again", {"blocks_overlapping": 1}, "the router saw 1 of 2 full blocks"),
        ("text again", {"blocks_overlapping": 0}, "the router saw 0 of 2 full blocks"),
        ("text again", {"cached_tokens": 0}, "the engine had 0 tokens cached, not 64"),
        ("text again", {"text": "another"}, "'a story' became 'another'"),
        ("image A", {"outcome": "raw"}, "the outcome is raw, not received"),
        ("image A", {"outcome": "reprocessed"}, "the outcome is reprocessed, not received"),
        ("image A", {"outcome": "text"}, "the outcome is text, not received"),
        ("image A", {"bytes_received": 0}, "0 bytes were moved"),
        ("image A", {"cached_tokens": 32}, "32 tokens were cached already"),
        ("image A again", {"outcome": "received"}, "the outcome is received, not hit"),
        ("image A again", {"worker": "worker1"}, "worker0 had it, worker1 got it"),
        ("image A again", {"bytes_received": MOVED}, "1000 bytes were moved"),
        ("image A again", {"blocks_overlapping": 8}, "the router saw 8 of 9 full blocks"),
        ("image A again", {"blocks_overlapping": 10}, "the router saw 10 of 9 full blocks"),
        ("image A again", {"cached_tokens": 256}, "the engine had 256 tokens cached, not 288"),
        ("image A again", {"text": "b"}, "'a' became 'b'"),
        ("images A, B", {"bytes_received": 2 * MOVED}, "2000 bytes were moved, one picture has"),
        ("images A, B", {"bytes_received": 0}, "0 bytes were moved, one picture has 1000"),
        ("images A, B", {"outcome": "reprocessed"}, "the outcome is reprocessed, not received"),
        ("images B, A", {"outcome": "lost"}, "the outcome is lost, not hit"),
        ("images B, A", {"bytes_received": 7}, "7 bytes were moved"),
        ("text", {"completion_tokens": 0}, "text: none"),
        ("images A, B again", {"outcome": "reprocessed"}, "the outcome is reprocessed, not hit"),
        ("images A, B again", {"worker": "worker1"}, "worker0 had it, worker1 got it"),
        ("images A, B again", {"bytes_received": MOVED}, "1000 bytes were moved"),
        ("images A, B again", {"blocks_overlapping": 9}, "the router saw 9 of 17 full blocks"),
        ("images A, B again", {"cached_tokens": 288}, "the engine had 288 tokens cached, not 544"),
        ("images A, B again", {"text": "a"}, "'a and b' became 'a'"),
        ("images B, A", {"text": "a and b"}, "both answers are 'a and b'"),
        ("images B, A", {"blocks_overlapping": 17}, "the router saw 17 of 17 blocks"),
        ("images B, A again", {"outcome": "received"}, "the outcome is received, not hit"),
        ("images B, A again", {"worker": "worker1"}, "worker0 had it, worker1 got it"),
        ("images B, A again", {"blocks_overlapping": 16}, "the router saw 16 of 17 full blocks"),
        ("images B, A again", {"cached_tokens": 544}, "the engine had 544 tokens cached, not 512"),
        ("images B, A again", {"text": "b"}, "'b and a' became 'b'"),
    ],
)
def test_a_wrong_cell_is_said_and_ends_with_1(
    demo: Demo, request_: str, cells: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(changed(SENT, request_, **cells)) == 1
    wrong = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert wrong
    assert all(line.startswith("demo: not as it must be: ") for line in wrong)


@pytest.mark.parametrize(
    ("request_", "cells", "said"),
    [
        ("image A", {"outcome": "received"}, "the outcome is received, not raw"),
        ("image A", {"bytes_received": 5}, "5 bytes were moved"),
        ("image A again", {"outcome": "raw"}, "the outcome is raw, not hit"),
    ],
)
def test_where_nothing_is_sent_nothing_may_have_been(
    demo: Demo, request_: str, cells: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(changed(RAW, request_, **cells), transfer="off") == 1
    assert said in capsys.readouterr().err


def test_the_table_marks_what_is_wrong() -> None:
    report = Report(changed(SENT, "image A again", outcome="received"))
    demo_client.judge(report, Deployment(URL, "tiny", "shm", {}, BLOCK))
    out = io.StringIO()
    demo_client.show(report, out)
    lines = out.getvalue().splitlines()
    for one in SENT:
        assert any(line.startswith(f"{one.request}  ") for line in lines)
    [wrong] = [line for line in lines if line.startswith("WRONG")]
    assert wrong.startswith("WRONG image A again: ")
    assert len([line for line in lines if line.startswith("ok ")]) == len(report.checks) - 1


@pytest.mark.parametrize("good", [True, False])
def test_the_json_says_whether_all_is_well(
    demo: Demo, good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = SENT if good else changed(SENT, "image A again", outcome="received")
    assert demo(rows, "--json") == (0 if good else 1)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is good
    assert [one["request"] for one in report["requests"]] == [one.request for one in SENT]
    wrong = [check["what"] for check in report["checks"] if check["wrong"]]
    assert [what.partition(":")[0] for what in wrong] == ([] if good else ["image A again"])


@pytest.mark.parametrize("good", [True, False])
def test_the_curl_command_can_be_given_to_a_shell(
    demo: Demo, good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = SENT if good else changed(SENT, "text again", text="another")
    assert demo(rows, "--curl") == (0 if good else 1)
    [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("curl ")]
    assert len(line) < 4096, "what a terminal takes as one line"
    words = shlex.split(line)
    assert words[:-1] == [
        "curl", "-s", f"{URL}/v1/chat/completions", "-H", "Content-Type: application/json", "-d",
    ]  # fmt: skip
    body = json.loads(words[-1])
    assert body["model"] == "tiny"
    [message] = body["messages"]
    image, text = message["content"]
    assert (message["role"], text["type"]) == ("user", "text")
    kind, _, data = image["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    Image.open(io.BytesIO(base64.b64decode(data, validate=True))).verify()


def test_without_curl_there_is_no_command(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    demo(SENT)
    assert "curl" not in capsys.readouterr().err


def test_a_deployment_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ready = tmp_path / "ready.json"
        ready.write_text(json.dumps({**READY, "url": url, "workers": [{"name": "w", "url": url}]}))
        done = subprocess.run(
            [sys.executable, CLIENT, "--ready", ready, "--block-size", "32"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "demo: the deployment does not answer" in done.stderr
    assert "Traceback" not in done.stderr


# A row, from the counters before and after its request


def samples(moved: float = 0, /, **outcomes: float) -> list[Sample]:
    counted = [
        Sample(demo_client.REQUESTS, {"outcome": outcome, "transport": "shm"}, count)
        for outcome, count in outcomes.items()
    ]
    return [*counted, Sample(demo_client.RECEIVED, {}, moved)]


def row_of(
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, list[Sample]],
    after: dict[str, list[Sample]],
    answer: tuple[int, Any],
) -> Row:
    counters = iter([(before, 32.0), (after, 96.0)])
    monkeypatch.setattr(Deployment, "snapshot", lambda _: next(counters))
    monkeypatch.setattr(Deployment, "settle", lambda _: None)
    monkeypatch.setattr(Deployment, "chat", lambda *_: answer)
    return demo_client.ask(Deployment(URL, "tiny", "shm", {}, BLOCK), "image A", "...")


ANSWER = {
    "usage": {
        "prompt_tokens": 100,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 64},
    },
    "choices": [{"message": {"content": "hello"}}],
}


def test_a_row_is_what_the_request_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"worker0": samples(7, hit=3), "worker1": samples(5, received=1, text=4)}
    after = {"worker0": samples(7, hit=3), "worker1": samples(1005, received=2, text=4)}
    found = row_of(monkeypatch, before, after, (200, ANSWER))
    assert found == Row(
        "image A", 200, 100, 12, "received", "worker1", blocks=3, blocks_overlapping=2,
        cached_tokens=64, bytes_received=1000, milliseconds=found.milliseconds, text="hello",
    )  # fmt: skip


@pytest.mark.parametrize(
    "after",
    [
        {"worker0": samples(), "worker1": samples()},
        {"worker0": samples(hit=1), "worker1": samples(hit=1)},
        {"worker0": samples(hit=1, lost=1), "worker1": samples()},
        {"worker0": samples(hit=2), "worker1": samples()},
    ],
    ids=["nobody", "both", "two outcomes", "twice"],
)
def test_a_request_that_is_not_counted_once_has_no_worker(
    monkeypatch: pytest.MonkeyPatch, after: dict[str, list[Sample]]
) -> None:
    before = {"worker0": samples(), "worker1": samples()}
    found = row_of(monkeypatch, before, after, (200, ANSWER))
    assert (found.worker, found.outcome) == ("?", "?")


def test_an_error_is_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"worker0": samples()}
    found = row_of(monkeypatch, counters, counters, (503, "no room"))
    assert (found.http_status, found.error, found.prompt_tokens) == (503, "no room", 0)
