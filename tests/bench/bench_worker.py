"""Our worker beside upstream's of the same engine: the same requests to both, interleaved.

    python tests/bench/bench_worker.py [--engine vllm|sglang] [--pairs N] [--quick] [--json FILE]
                                       [--frontend vllm|rust] [--transfer shm|off]

Two complete stacks on loopback, each with its own frontend, worker and discovery folder; the
engines have the same arguments, and vLLM's run the model in the engine core's process, as on one
GPU. A pair is one request to each, in random order; for latencies one request is in flight in all.
Each pair gives one ratio, so that what else the machine does hits both alike: the ratios are what
to read, in a quiet hour.

``first token``: from the request to the first piece of the streamed answer, at the client.
``engine input``: in the worker, from where Dynamo's runtime calls the handler to the rendered
engine input. ``in the handler``: without the time until the loop has woken up, which both need.
``submitted``: up to what goes to the engine's own process; see `timed_worker`. SGLang has this one
only, and upstream's SGLang worker, which cannot receive media, gets URLs either way.
``repeated`` images come with a new question each time. Memory is the proportional set size (PSS) of
the worker and all its children. Advantage is upstream / ours, for throughput ours / upstream: above
1, ours is better.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engines import BLOCK, ENGINES, VLLM, Engine  # noqa: E402
from tests.stack import FrontendSpec, Process, Stack, free_port  # noqa: E402

SIDES = {"ours": "dynamo_worker_ext.", "upstream": "dynamo."}
SIZES = (448, 1024)
KINDS = {
    "vllm": ("first token", "engine input", "in the handler", "submitted"),
    "sglang": ("first token", "submitted"),
}
TEXT_TOKENS = 32
TEXT_BLOCK = 16
#: The whole run, start and stop of the stacks included, ends by then.
TIME_LIMIT_S = 420


@dataclass
class Row:
    """One line of the table: pairs of measurements, aligned.

    Attributes:
        name: what was measured.
        unit: of the values.
        more_is_better: for throughput.
        ours, upstream: in the order of the pairs.
    """

    name: str
    unit: str
    more_is_better: bool = False
    ours: list[float] = field(default_factory=list)
    upstream: list[float] = field(default_factory=list)

    def add(self, pair: Mapping[str, float]) -> None:
        self.ours.append(pair["ours"])
        self.upstream.append(pair["upstream"])

    def advantages(self) -> list[float]:
        """Of each pair; above 1, ours is better."""
        pairs = zip(self.ours, self.upstream, strict=True)
        return [a / b if self.more_is_better else b / a for a, b in pairs]

    def text(self) -> str:
        advantage = spread = "-"
        if all(self.ours):
            ratios = self.advantages()
            advantage = f"{median(ratios):.2f}"
            if len(ratios) > 1:
                low, _, high = quantiles(ratios, n=4)
                spread = f"{low:.2f} .. {high:.2f}"
        return (
            f"{self.name:<30} {median(self.ours):>10.2f} {median(self.upstream):>10.2f} "
            f"{self.unit:<6} {advantage:>9}  {spread:<16} {len(self.ours):>3}"
        )


HEADER = (
    f"{'':<30} {'ours':>10} {'upstream':>10} {'':<6} {'advantage':>9}  {'quartiles':<16} {'n':>3}"
)


class RecordedStack(Stack):
    """One side's stack, whose workers write down what they measure.

    Args:
        side: a key of `SIDES`.
        model, folder, engine: see `Stack`.
    """

    def __init__(self, side: str, model: Path, folder: Path, engine: Engine) -> None:
        self.side = side
        self.record = folder / "record.jsonl"
        # Without blocks SGLang needs none of the kernels that are interpreted on a CPU.
        block = BLOCK if engine is VLLM else 1
        super().__init__(model, folder, workers=0, engine=engine, block=block)

    def kv_events_args(self) -> list[str]:
        """For KV events over TCP, as upstream's workers take them."""
        events: dict[str, Any] = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",
            "topic": "kv-events",
        }
        more: list[str] = []
        if self.engine is VLLM:
            events["enable_kv_cache_events"] = True
            more = ["--enable-prefix-caching"]
        return [*more, "--kv-events-config", json.dumps(events)]

    def recorded(self) -> list[dict[str, float]]:
        """What the workers recorded so far."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        try:
            super().stop()
        except AssertionError as error:
            # By now all processes have ended; the measurements are good either way.
            print(error, file=sys.stderr)


class TimedStack(RecordedStack):
    """A stack of one worker that writes down its preparation times; see `timed_worker`.

    Args:
        frontend: see `Stack`.
        side, model, folder, engine: see `RecordedStack`.
    """

    def __init__(
        self, side: str, model: Path, folder: Path, frontend: FrontendSpec, engine: Engine
    ) -> None:
        if side == "upstream" and engine is not VLLM:
            frontend = replace(frontend, transfer="off")
        self._spec = frontend
        super().__init__(side, model, folder, engine)

    def start(self) -> None:
        """Start both processes; `wait_ready` waits for them."""
        self._start_worker()
        self.add_frontend("bench", self._spec)

    def _start_worker(self) -> None:
        port, module = free_port(), SIDES[self.side] + self.engine.name
        process = Process(
            name=f"worker-{self.side}",
            argv=[
                self.engine.python, str(ROOT / "tests/bench/timed_worker.py"), module,
                str(self.record), "--", self.engine.model_flag, str(self.model),
                "--served-model-name", self.served_name, "--enable-multimodal",
                *self.kv_events_args(), *self.engine.args(self.block),
            ],
            env={
                **self.env,
                **self.engine.env,
                "PYTHONPATH": str(ROOT),
                # dynamo.vllm does so by itself.
                "PYTHONHASHSEED": "0",
                "DYN_SYSTEM_PORT": str(port),
            },
            log=self.folder / "worker.log",
            url=f"http://127.0.0.1:{port}",
        )  # fmt: skip
        process.start()
        self.worker.append(process)

    def memory_mb(self) -> float:
        """PSS of the worker and all its children."""
        worker = psutil.Process(self.worker[0].pid)
        everyone = [worker, *worker.children(recursive=True)]
        return sum(float(one.memory_full_info().pss) for one in everyone) / 1e6


class Client:
    """One connection to one frontend; it is kept open, as HTTP clients do."""

    def __init__(self, stack: Stack) -> None:
        host, port = stack.frontend["bench"].url.removeprefix("http://").split(":")
        self._http = http.client.HTTPConnection(host, int(port), timeout=60)
        self._model = stack.served_name

    def chat(self, content: Any, max_tokens: int) -> float:
        """Stream an answer of exactly `max_tokens`; seconds until its first piece.

        Raises:
            RuntimeError: any other answer.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        raw = json.dumps(body).encode()
        start = time.perf_counter()
        self._http.request(
            "POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"}
        )
        answer = self._http.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the frontend answered {answer.status}: {answer.read()[:2000]!r}")
        first, last = None, b""
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            if first is None and b'"delta"' in line:
                first = time.perf_counter() - start
            if not line.startswith(b"data: [DONE]"):
                last = line
        tokens = f'"completion_tokens":{max_tokens}'.encode()
        if first is None or tokens not in last.replace(b" ", b""):
            raise RuntimeError(f"an answer of {max_tokens} tokens ends with {last[:2000]!r}")
        return first

    def close(self) -> None:
        self._http.close()


def photo(size: int, seed: int) -> str:
    """A data URI of a picture with soft shapes, as large as a photo of its size."""
    noise = np.random.default_rng([11, size, seed]).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


class Bench:
    """The measurements, on two stacks that are ready.

    Args:
        stacks: by side.
        pairs: of each latency row.
        blocks: of each throughput row.
    """

    def __init__(self, stacks: Mapping[str, TimedStack], pairs: int, blocks: int) -> None:
        self.stacks = stacks
        self.pairs = pairs
        self.blocks = blocks
        self._kinds = KINDS[stacks["ours"].engine.name]
        self._random = random.Random(3)
        self._numbers = itertools.count()
        self._clients = {side: Client(stack) for side, stack in stacks.items()}

    def rows(self) -> Iterator[Row]:
        started = Row("memory after the start", "MB")
        self._text_block(8, 2)
        self._warm_up()
        started.add({side: stack.memory_mb() for side, stack in self.stacks.items()})
        yield from self._images()
        for clients in (1, 8):
            yield self._throughput(clients)
        yield started
        after = Row("memory after the run", "MB")
        after.add({side: stack.memory_mb() for side, stack in self.stacks.items()})
        yield after

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _pair(self, measure: Callable[[str], float]) -> dict[str, float]:
        sides = list(self.stacks)
        self._random.shuffle(sides)
        return {side: measure(side) for side in sides}

    def _ask(self, url: str) -> dict[str, dict[str, float]]:
        """One image to both: of each kind of row, ms by side."""
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": f"{next(self._numbers)}: what is in this picture?"},
        ]
        seen = {side: len(stack.recorded()) for side, stack in self.stacks.items()}
        result = {kind: dict[str, float]() for kind in self._kinds}
        result["first token"] = self._pair(lambda side: 1e3 * self._clients[side].chat(content, 4))
        for side, stack in self.stacks.items():
            new = stack.recorded()[seen[side] :]
            if len(new) != 1:
                raise RuntimeError(f"{side} recorded {len(new)} requests where 1 was sent")
            if "engine input" in result:
                at_input, wake = new[0]["input_seconds"], new[0]["wake_seconds"]
                result["engine input"][side] = 1e3 * at_input
                result["in the handler"][side] = 1e3 * (at_input - wake)
            result["submitted"][side] = 1e3 * new[0]["seconds"]
        return result

    def _warm_up(self) -> None:
        for size in SIZES:
            for seed in range(3):
                for _ in range(3):
                    self._ask(photo(size, 1_000_000 + seed))

    def _images(self) -> Iterator[Row]:
        images = [(age, size) for age in ("new", "repeated") for size in SIZES]
        rows = {
            (kind, age, size): Row(f"{kind}, {age} {size} px", "ms")
            for kind in self._kinds
            for age, size in images
        }
        for number in range(self.pairs):
            for age, size in self._random.sample(images, len(images)):
                # The repeated one was new in the warm-up.
                seed = number if age == "new" else 1_000_000
                for kind, pair in self._ask(photo(size, seed)).items():
                    rows[kind, age, size].add(pair)
        yield from rows.values()

    def _throughput(self, clients: int) -> Row:
        row = Row(f"text, {clients} client(s)", "tok/s", more_is_better=True)
        for _ in range(self.blocks):
            row.add(self._text_block(clients, TEXT_BLOCK))
        return row

    def _text_block(self, clients: int, requests: int) -> dict[str, float]:
        texts = [f"{next(self._numbers)}: tell me a story" for _ in range(requests)]

        def measure(side: str) -> float:
            connections = [Client(self.stacks[side]) for _ in range(clients)]

            def work(index: int) -> None:
                for text in texts[index::clients]:
                    connections[index].chat(text, TEXT_TOKENS)

            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(work, range(clients)))
            seconds = time.perf_counter() - start
            for connection in connections:
                connection.close()
            return requests * TEXT_TOKENS / seconds

        return self._pair(measure)


def make_model(folder: Path) -> Path:
    """A tiny Qwen2.5-VL, made anew."""
    subprocess.run(
        [sys.executable, "-m", "dynamo_worker_ext.tinyvlm",
         "--family", "qwen2_5_vl", "--out", str(folder)],
        check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder


def run(
    folder: Path,
    *,
    engine: Engine = VLLM,
    frontend: FrontendSpec,
    pairs: int,
    blocks: int,
    show: Callable[[str], None] = print,
) -> list[Row]:
    """Start both stacks, measure, stop them.

    Args:
        folder: for the model, logs and discovery.
        engine: of both.
        frontend: which, for both.
        pairs, blocks: see `Bench`.
        show: is given one line after another.
    """
    model = make_model(folder / "model")
    stacks = {side: TimedStack(side, model, folder / side, frontend, engine) for side in SIDES}
    result: list[Row] = []
    with ExitStack() as end:
        for stack in stacks.values():
            end.callback(stack.stop)
        # All at once, so that one side's orderly end does not wait for the other's.
        end.callback(lambda: [p.signal(signal.SIGTERM) for s in stacks.values() for p in s.worker])
        for stack in stacks.values():
            stack.start()
        for stack in stacks.values():
            stack.wait_ready()
        bench = Bench(stacks, pairs, blocks)
        end.callback(bench.close)
        show(HEADER)
        for row in bench.rows():
            result.append(row)
            show(row.text())
    return result


def end_in_time(seconds: int) -> None:
    """Stop everything also when told to end, and after so many seconds."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _give_up)
    signal.alarm(seconds)


def _give_up(number: int, _frame: object) -> NoReturn:
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--pairs", type=int, default=60, help="of each latency row (60)")
    parser.add_argument("--quick", action="store_true", help="6 pairs, 3 blocks of text")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    parser.add_argument("--frontend", choices=["vllm", "rust"], default="vllm")
    parser.add_argument("--transfer", choices=["shm", "off"], default="shm")
    parser.add_argument("--keep", type=Path, help="folder for logs, kept afterwards")
    args = parser.parse_args(argv)
    pairs, blocks = (min(args.pairs, 6), 3) if args.quick else (args.pairs, 20)

    end_in_time(TIME_LIMIT_S)
    spec = FrontendSpec(processor=args.frontend, transfer=args.transfer)
    print(
        f"{args.engine}, frontend {args.frontend}, transfer {args.transfer}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory(prefix="dwe-bench-") as folder:
        rows = run(
            args.keep or Path(folder),
            engine=ENGINES[args.engine],
            frontend=spec,
            pairs=pairs,
            blocks=blocks,
            show=lambda line: print(line, flush=True),
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


@pytest.mark.bench
@pytest.mark.engine
@pytest.mark.timeout(TIME_LIMIT_S)
def test_the_bench_completes_and_shows_every_row(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "bench" not in (request.config.getoption("-m") or ""):
        pytest.skip("a smoke run of a minute; select it with -m bench")
    lines: list[str] = []
    rows = run(tmp_path, frontend=FrontendSpec(), pairs=2, blocks=1, show=lines.append)
    assert len(rows) == 16
    assert lines == [HEADER, *(row.text() for row in rows)]
    assert all(value > 0 for row in rows for value in (*row.ours, *row.upstream))


if __name__ == "__main__":
    main()
