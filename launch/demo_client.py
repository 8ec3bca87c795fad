"""Shows what a running deployment does with images, and checks it: the second half of demo.sh.

Sends each request twice. What the table says was not asked of the answers but of the counters of
workers and frontend, before and after each request.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

OVERLAP = "dynamo_component_router_kv_selected_cached_prefix_tokens_total"
ROUTER_INGRESS = "dynamo_component_router_kv_zmq_ingress_batches_total"
REQUESTS = "dynamo_worker_ext_requests_total"
RECEIVED = "dynamo_worker_ext_mm_received_bytes_total"
KV_EVENTS = "dynamo_worker_ext_kv_events_total"

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ([^ ]+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- talking to the deployment -------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One line of a ``/metrics`` page."""

    name: str
    labels: dict[str, str]
    value: float


def metrics(url: str) -> list[Sample]:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = (_SAMPLE.match(line) for line in lines if not line.startswith("#"))
    return [Sample(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m]


def total(samples: list[Sample], name: str) -> float:
    return sum(sample.value for sample in samples if sample.name == name)


@dataclass
class Deployment:
    """What agg_multimodal_router.sh wrote into its ready file."""

    url: str
    model: str
    transfer: str
    workers: dict[str, str]
    """Name -> URL of its metrics."""
    block_size: int

    @classmethod
    def read(cls, path: Path, block_size: int) -> Deployment:
        ready = json.loads(path.read_text())
        workers = {worker["name"]: worker["url"] for worker in ready["workers"]}
        return cls(ready["url"], ready["model"], ready["mm_transfer"], workers, block_size)

    def snapshot(self) -> tuple[dict[str, list[Sample]], float]:
        """The workers' counters, and tokens that the router found cached where it sent requests."""
        workers = {name: metrics(url) for name, url in self.workers.items()}
        return workers, total(metrics(self.url), OVERLAP)

    def settle(self, timeout: float = 10.0) -> None:
        """Wait until the router has heard of everything that was cached by the last request."""
        deadline = time.monotonic() + timeout
        last: tuple[float, ...] = ()
        quiet_since = time.monotonic()
        while time.monotonic() < deadline:
            workers = tuple(total(metrics(url), KV_EVENTS) for url in self.workers.values())
            now = (*workers, total(metrics(self.url), ROUTER_INGRESS))
            if now != last:
                last, quiet_since = now, time.monotonic()
            elif time.monotonic() - quiet_since > 0.5:
                return
            time.sleep(0.1)

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")


# --- what is sent --------------------------------------------------------------------------------


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def picture(seed: int, squares: int = 8, size: int = 448) -> str:
    """A data URI of a square picture made of coloured squares, the same each time."""
    colours = random.Random(seed).randbytes(3 * squares * squares)
    image = Image.frombytes("RGB", (squares, squares), colours)
    return data_uri(image.resize((size, size), Image.Resampling.NEAREST))


def part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat_body(model: str, content: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}


def curl_line(deployment: Deployment) -> str:
    """A command for a shell that sends a small picture."""
    image = Image.new("P", (56, 56), 0)
    image.putpalette([200, 30, 30, 30, 30, 200])
    image.paste(1, (14, 14, 42, 42))
    content = [part(data_uri(image)), text_part("What is in this picture?")]
    body = json.dumps(chat_body(deployment.model, content), separators=(",", ":"))
    return (
        f"curl -s {deployment.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'"
    )


# --- what came of it -----------------------------------------------------------------------------


@dataclass
class Row:
    """One request and its traces."""

    request: str
    http_status: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = "?"
    worker: str = "?"
    blocks: int = 0
    """Full blocks of the prompt."""
    blocks_overlapping: float = 0
    """Blocks of the prompt that the router believed the chosen worker to have."""
    cached_tokens: int = 0
    bytes_received: int = 0
    milliseconds: float = 0
    text: str = ""
    error: str | None = None


@dataclass
class Report:
    """The table, and what it must show."""

    rows: list[Row] = field(default_factory=list)
    checks: list[tuple[str, str | None]] = field(default_factory=list)
    """What must be so, and what is not."""

    def check(self, what: str, *conditions: tuple[bool, str]) -> None:
        wrong = [why for good, why in conditions if not good]
        self.checks.append((what, "; ".join(wrong) or None))

    @property
    def good(self) -> bool:
        return all(wrong is None for _, wrong in self.checks)


def ask(deployment: Deployment, request: str, content: Any) -> Row:
    """Send one request while nobody else does, and see what it moved."""
    before, overlap_before = deployment.snapshot()
    start = time.perf_counter()
    status, answer = deployment.chat(chat_body(deployment.model, content))
    row = Row(request, status, milliseconds=round((time.perf_counter() - start) * 1000, 1))
    deployment.settle()
    after, overlap_after = deployment.snapshot()
    if status != 200:
        row.error = str(answer)[:500]
    else:
        usage = answer["usage"]
        row.prompt_tokens = usage["prompt_tokens"]
        row.completion_tokens = usage["completion_tokens"]
        row.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        row.text = answer["choices"][0]["message"]["content"] or ""
    row.blocks = row.prompt_tokens // deployment.block_size
    row.blocks_overlapping = (overlap_after - overlap_before) / deployment.block_size
    row.bytes_received = int(
        sum(total(after[name], RECEIVED) - total(before[name], RECEIVED) for name in after)
    )
    moved = list(_moved(before, after))
    if len(moved) == 1:
        row.worker, row.outcome = moved[0]
    return row


def _moved(
    before: dict[str, list[Sample]], after: dict[str, list[Sample]]
) -> Iterator[tuple[str, str]]:
    """Worker and outcome of each request counted in between."""
    for name, samples in after.items():
        old = {tuple(sorted(s.labels.items())): s.value for s in before[name] if s.name == REQUESTS}
        for sample in samples:
            if sample.name == REQUESTS:
                more = sample.value - old.get(tuple(sorted(sample.labels.items())), 0)
                yield from [(name, sample.labels["outcome"])] * int(more)


def run(deployment: Deployment) -> Report:
    a, b = part(picture(1)), part(picture(2))
    question = text_part("Describe what you see.")
    story = "Once upon a time there was a picture that nobody had described yet. "
    contents: list[tuple[str, Any]] = [
        ("text", story * 3),
        ("image A", [a, question]),
        ("images A, B", [a, b, question]),
        ("images B, A", [b, a, question]),
    ]
    report = Report()
    for name, content in contents:
        for request in (name, f"{name} again"):
            report.rows.append(ask(deployment, request, content))
            log(f"  sent   {request}")
    judge(report, deployment)
    return report


def judge(report: Report, deployment: Deployment) -> None:
    """Add the checks."""
    rows = report.rows
    failed = [row for row in rows if row.http_status != 200]
    report.check(
        "every request is answered",
        *((False, f"{row.request}: {row.http_status} {row.error}") for row in failed),
    )
    if failed:
        return
    report.check(
        "every answer has tokens",
        *((row.completion_tokens > 0, f"{row.request}: none") for row in rows),
    )
    text, image, two, swapped = zip(rows[::2], rows[1::2], strict=True)
    transfers = deployment.transfer != "off"
    came = "received" if transfers else "raw"
    report.check("text: no media is counted", _outcome(text[0], "text"), _moves(text[0], False))
    _judge_repeat(report, deployment, *text)
    report.check(
        "image A: " + ("received from the frontend" if transfers else "processed by the worker"),
        _outcome(image[0], came),
        _moves(image[0], transfers),
        (image[0].cached_tokens == 0, f"{image[0].cached_tokens} tokens were cached already"),
    )
    _judge_repeat(report, deployment, *image)
    if transfers and two[0].worker == image[0].worker:
        moved, of_one = two[0].bytes_received, image[0].bytes_received
        report.check(
            "images A, B: only B is moved, A is known",
            (moved == of_one, f"{moved} bytes were moved, one picture has {of_one}"),
        )
    report.check("images A, B: both are seen", _outcome(two[0], came))
    _judge_repeat(report, deployment, *two)
    elsewhere = swapped[0].worker != two[0].worker
    report.check(
        "images B, A: not taken for A, B",
        _outcome(swapped[0], came if elsewhere and swapped[0].outcome == came else "hit"),
        _moves(swapped[0], transfers and swapped[0].outcome == came),
        (swapped[0].text != two[0].text, f"both answers are {two[0].text!r}"),
        (
            swapped[0].blocks_overlapping < swapped[0].blocks,
            f"the router saw {swapped[0].blocks_overlapping:g} of {swapped[0].blocks} blocks",
        ),
    )
    _judge_repeat(report, deployment, *swapped)


def _judge_repeat(report: Report, deployment: Deployment, first: Row, again: Row) -> None:
    size = deployment.block_size
    want, nothing_moved = ("text", "") if first.outcome == "text" else ("hit", "nothing is moved, ")
    full = again.prompt_tokens // size
    # The engine always computes the last token itself.
    cached = (again.prompt_tokens - 1) // size * size
    report.check(
        f"{again.request}: {nothing_moved}the router finds all full blocks, the answer stays",
        _outcome(again, want),
        (again.worker == first.worker, f"{first.worker} had it, {again.worker} got it"),
        _moves(again, False),
        (
            again.blocks_overlapping == full,
            f"the router saw {again.blocks_overlapping:g} of {full} full blocks",
        ),
        (
            again.cached_tokens == cached,
            f"the engine had {again.cached_tokens} tokens cached, not {cached}",
        ),
        (again.text == first.text, f"{first.text!r} became {again.text!r}"),
    )


def _outcome(row: Row, want: str) -> tuple[bool, str]:
    return row.outcome == want, f"the outcome is {row.outcome}, not {want}"


def _moves(row: Row, want: bool) -> tuple[bool, str]:
    return (row.bytes_received > 0) == want, f"{row.bytes_received} bytes were moved"


# --- showing it ----------------------------------------------------------------------------------


class Style:
    """Colours where they are wanted."""

    def __init__(self, out: Any) -> None:
        on = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.bold, self.dim, self.red, self.green, self.plain = (
            ("\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m") if on else ("",) * 5
        )


def show(report: Report, out: Any = sys.stdout) -> None:
    style = Style(out)
    head = (
        ("request", "http", "prompt", "new", "outcome", "worker",
         "blocks", "cached", "received", "ms"),
        ("", "status", "tokens", "tokens", "", "",
         "overlapping", "tokens", "bytes", ""),
    )  # fmt: skip
    body = [
        (
            row.request,
            str(row.http_status),
            str(row.prompt_tokens),
            str(row.completion_tokens),
            row.outcome,
            row.worker,
            f"{row.blocks_overlapping:g} of {row.blocks}",
            str(row.cached_tokens),
            f"{row.bytes_received:,}",
            f"{row.milliseconds:.0f}",
        )
        for row in report.rows
    ]
    left = {0, 4, 5}
    widths = [max(len(line[i]) for line in [*head, *body]) for i in range(len(head[0]))]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    print(file=out)
    for cells in head:
        print(f"{style.bold}{line(cells)}{style.plain}", file=out)
    print(style.dim + "-" * (sum(widths) + 2 * len(widths) - 2) + style.plain, file=out)
    for row_number, cells in enumerate(body):
        if row_number and row_number % 2 == 0:
            print(file=out)
        print(line(cells), file=out)
    print(file=out)
    for what, wrong in report.checks:
        colour, mark = (style.green, "ok   ") if wrong is None else (style.red, "WRONG")
        print(f"{colour}{mark}{style.plain} {what}" + (f": {wrong}" if wrong else ""), file=out)
    print(file=out, flush=True)


def as_json(report: Report, deployment: Deployment) -> dict[str, Any]:
    return {
        "mm_transfer": deployment.transfer,
        "block_size": deployment.block_size,
        "requests": [asdict(row) for row in report.rows],
        "checks": [{"what": what, "wrong": wrong} for what, wrong in report.checks],
        "ok": report.good,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--ready", type=Path, required=True, help="the ready file of agg_multimodal_router.sh"
    )
    parser.add_argument("--block-size", type=int, required=True, help="tokens of a KV block")
    parser.add_argument("--json", action="store_true", help="print the table as JSON on stdout")
    parser.add_argument("--curl", action="store_true", help="print a curl command at the end")
    args = parser.parse_args()
    deployment = Deployment.read(args.ready, args.block_size)
    report = run(deployment)
    if args.json:
        print(json.dumps(as_json(report, deployment), indent=2), flush=True)
    else:
        show(report)
    for what, wrong in report.checks:
        if wrong:
            log(f"demo: not as it must be: {what}: {wrong}")
    if args.curl:
        log(f"Try it yourself:\n\n{curl_line(deployment)}\n")
    return 0 if report.good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"demo: the deployment does not answer: {error}")
