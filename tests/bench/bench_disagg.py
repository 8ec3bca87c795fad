"""Our encode, prefill and decode workers beside upstream's: the same requests to both.

    python -m tests.bench.bench_disagg [--engine vllm|sglang] [--flow e-pd|epd|pd] [--pairs N]
                                       [--json FILE] [--keep DIR]

Two complete deployments on loopback, each with Dynamo's Rust frontend and a discovery folder of its
own, with the same engine arguments; upstream's NIXL settings are its defaults. A pair is one
request to each, in random order and one at a time, while the engines of the other side are stopped:
vLLM's spin for a second after each request.

``first token``: from the request to the first piece of the streamed answer, at the client.
``encode``: in the encode worker, from the first step of its handler's ``generate`` until the
embeddings are on offer.
``moved``: embeddings that the next worker read of the encode worker.
``memory``: of a role's worker and all its children, after the run; without what files share.
``above the engine``: the same without the processes of vLLM's engine, minus what a plain
``AsyncLLM`` of these arguments takes outside of those. For vLLM only.
Advantage is upstream / ours: above 1, ours is better.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.bench.bench_worker import HEADER, SIDES, SIZES, Client, Row, make_model, photo
from tests.disagg.sglang_deployment import DECODE_ARGS, prefill_args
from tests.engines import BLOCK, ENGINES, ROOT, SGLANG, VLLM, Engine
from tests.stack import BASE_ENV, ROLE, FrontendSpec, Process, Stack, free_port, wait_for

#: Of each flow, its roles; encode workers work for the one after them.
FLOWS: Mapping[str, Sequence[str]] = {
    "epd": ("encode", "prefill", "decode"),
    "e-pd": ("encode", "agg"),
    "pd": ("prefill", "decode"),
}
ENGINE_PROCESSES = ("VLLM::Worker", "VLLM::EngineCore")
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
#: Memory that both sides of a flow take together; upstream's receiver of embeddings has 8.6 of it.
NEED_GB: Mapping[str, int] = {"epd": 28, "e-pd": 20, "pd": 14}
START_TIMEOUT_S = 420.0
TIME_LIMIT_S = 1200


def memory_mb(pid: int, *, without: Sequence[str] = ()) -> float:
    """Memory of a process and all its children, without that of files, which others map too.

    Args:
        without: names of children that do not count.
    """
    first = psutil.Process(pid)
    kb = 0
    for one in (first, *first.children(recursive=True)):
        if one.name() in without:
            continue
        text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        found = re.findall(r"^Pss_(?:Anon|Shmem): +([0-9]+) kB$", text, re.MULTILINE)
        kb += sum(int(size) for size in found)
    return kb * 1024 / 1e6


def connector_args(role: str) -> list[str]:
    return ["--kv-transfer-config", json.dumps(CONNECTOR)] if role in ("prefill", "decode") else []


def connector_env() -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


def role_args(engine: Engine, side: str, role: str, *, behind_encoder: bool) -> Sequence[str]:
    """What makes a worker one of this role, which both sides name alike where they can."""
    if engine is SGLANG and side == "upstream" and (behind_encoder or role == "encode"):
        its = [ROLE, "pd" if role == "agg" else role, "--chat-template", "qwen2-vl"]
        return [*its, "--dedicated-mm-encoder"] if behind_encoder else its
    if engine is SGLANG and role in ("prefill", "decode"):
        args = list(prefill_args() if role == "prefill" else DECODE_ARGS)
    else:
        args = [] if role == "agg" else [ROLE, role]
    if engine is VLLM:
        args += connector_args(role)
        if behind_encoder and side == "upstream":
            args.append("--enable-mm-embeds")  # or it refuses what its encode worker sends
    return [*args, "--route-to-encoder"] if behind_encoder else args


class Side(Stack):
    """One side's deployment of a flow.

    Args:
        side: a key of `SIDES`.
        flow: a key of `FLOWS`.
        engine, model, folder: see `Stack`.
    """

    def __init__(self, side: str, flow: str, engine: Engine, model: Path, folder: Path) -> None:
        # Without blocks SGLang needs none of the kernels that are interpreted on a CPU.
        block = BLOCK if engine is VLLM else 1
        super().__init__(model, folder, workers=0, engine=engine, block=block)
        self.side = side
        self.roles = FLOWS[flow]
        self.record = folder / "record.jsonl"

    def start(self) -> None:
        for number, role in enumerate(self.roles):
            self._start_role(number, role)
        self.add_frontend("bench", FrontendSpec("rust", "off"))

    def _start_role(self, number: int, role: str) -> None:
        port = free_port()
        behind = number == 1 and self.roles[0] == "encode"
        args = [*self.engine.args(self.block)]
        args += role_args(self.engine, self.side, role, behind_encoder=behind)
        if role != "encode":
            events: dict[str, Any] = {"publisher": "zmq", "topic": "kv-events"}
            events["endpoint"] = f"tcp://*:{free_port()}"
            if self.engine is VLLM:
                events["enable_kv_cache_events"] = True
                args.append("--enable-prefix-caching")
            args += ["--kv-events-config", json.dumps(events)]
        process = Process(
            name=f"{role}-{self.side}",
            argv=[
                self.engine.python, "-m", "tests.bench.timed_role",
                SIDES[self.side] + self.engine.name, str(self.record), "--",
                self.engine.model_flag, str(self.model),
                "--served-model-name", self.served_name, "--enable-multimodal", *args,
            ],
            env={
                **self.env,
                **self.engine.env,
                **connector_env(),
                "PYTHONPATH": str(ROOT),
                "PYTHONHASHSEED": "0",  # dynamo.vllm does so by itself
                # One thread computes in each, as vLLM's engines have it on one core.
                "VLLM_CPU_OMP_THREADS_BIND": "0",
                "OMP_NUM_THREADS": "1",
                "DYN_SYSTEM_PORT": str(port),
            },
            log=self.folder / f"{role}.log",
            url=f"http://127.0.0.1:{port}",
            role=role,
        )  # fmt: skip
        process.start()
        self.worker.append(process)

    def wait_answers(self) -> None:
        """Until an image is answered, which needs every role."""
        body = self.body([{"type": "image_url", "image_url": {"url": photo(64, 0)}}, "Hello"])

        def answers() -> bool:
            for process in (*self.worker, *self.frontend.values()):
                assert process.alive, f"{process.name} ended:\n{process.tail()}"
            if self.frontend["bench"].get("/v1/models")[0] != 200:
                return False
            time.sleep(1)
            return self.post("bench", "/v1/chat/completions", body).status == 200

        wait_for(answers, f"{self.side} answers", START_TIMEOUT_S)

    def signal_engines(self, number: int) -> None:
        """Signal the processes that compute."""
        for worker in self.worker:
            if worker.alive:
                for child in psutil.Process(worker.pid).children(recursive=True):
                    if child.name() in ENGINE_PROCESSES:
                        child.send_signal(number)

    def moved_bytes(self) -> float:
        """Of embeddings, so far. Ours are offered in several ways, and read in one at most."""
        if self.side == "upstream":
            return sum(line.get("sent_bytes", 0) for line in self._recorded())
        return self.total("dynamo_worker_ext_mm_received_bytes_total")

    def encode_seconds(self) -> list[float]:
        """Of each request that the encode worker has served."""
        return [line["seconds"] for line in self._recorded() if "seconds" in line]

    def _recorded(self) -> list[dict[str, float]]:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [json.loads(line) for line in lines]


class Bench:
    """The measurements, on two deployments that answer.

    Args:
        sides: by name.
        pairs: of each row.
    """

    def __init__(self, sides: Mapping[str, Side], pairs: int) -> None:
        self._sides = sides
        self._pairs = pairs
        self._random = random.Random(5)
        self._numbers = itertools.count()
        self._clients = {name: Client(side) for name, side in sides.items()}

    def rows(self) -> Iterator[Row]:
        for number in range(3):
            for size in SIZES:
                self._ask(photo(size, 1_000_000), f"warm up {number}")
        images = [(age, size) for age in ("new", "repeated") for size in SIZES]
        kinds = {"first token": "ms", "encode": "ms", "moved": "KB"}
        rows = {
            (kind, *image): Row(f"{kind}, {image[0]} {image[1]} px", unit)
            for kind, unit in kinds.items()
            for image in images
        }
        for number in range(self._pairs):
            for age, size in self._random.sample(images, len(images)):
                seed = number if age == "new" else 1_000_000
                for kind, pair in self._ask(photo(size, seed), str(number)).items():
                    rows[kind, age, size].add(pair)
        yield from (row for row in rows.values() if row.ours)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _ask(self, url: str, text: str) -> dict[str, dict[str, float]]:
        """One image to both, with a question of its own: by kind of row, by side."""
        question = f"{next(self._numbers)} {text}: what is in this picture?"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ]
        names = list(self._sides)
        self._random.shuffle(names)
        result: dict[str, dict[str, float]] = {"first token": {}}
        for name in names:
            side = self._sides[name]
            side.signal_engines(signal.SIGCONT)
            encoded, moved = len(side.encode_seconds()), side.moved_bytes()
            result["first token"][name] = 1e3 * self._clients[name].chat(content, 4)
            if "encode" in side.roles:
                new = side.encode_seconds()[encoded:]
                result.setdefault("encode", {})[name] = 1e3 * sum(new)
                result.setdefault("moved", {})[name] = (side.moved_bytes() - moved) / 1e3
            side.signal_engines(signal.SIGSTOP)
        return result


def plain_engine_mb(role: str, model: Path, folder: Path) -> float:
    """Memory of a plain ``AsyncLLM`` with a role's arguments, without its engine's processes."""
    ready = folder / f"engine-{role}.ready"
    ready.unlink(missing_ok=True)
    process = Process(
        name=f"engine-{role}",
        argv=[
            VLLM.python, "-m", "tests.bench.timed_role", "engine", str(ready), "--",
            "--model", str(model), *VLLM.args(32), *connector_args(role),
        ],
        env={
            **BASE_ENV, **connector_env(),
            "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "0",
        },
        log=folder / f"engine-{role}.log",
        url="",
    )  # fmt: skip
    process.start()
    try:
        wait_for(lambda: ready.exists() or not process.alive, "an answer", START_TIMEOUT_S)
        assert process.alive, process.tail()
        return memory_mb(process.pid, without=ENGINE_PROCESSES)
    finally:
        process.signal(signal.SIGTERM)
        process.end(time.monotonic() + 30)


def memory_rows(sides: Mapping[str, Side], engines: Mapping[str, float]) -> Iterator[Row]:
    roles = next(iter(sides.values())).roles
    for number, role in enumerate(roles):
        row = Row(f"memory, {role}", "MB")
        row.add({name: memory_mb(side.worker[number].pid) for name, side in sides.items()})
        yield row
        if role in engines:
            above, taken = Row(f"above the engine, {role}", "MB"), dict[str, float]()
            for name, side in sides.items():
                own = memory_mb(side.worker[number].pid, without=ENGINE_PROCESSES)
                taken[name] = own - engines[role]
            above.add(taken)
            yield above


def run(folder: Path, engine: Engine, flow: str, pairs: int) -> Iterator[Row]:
    """Start both sides, measure, stop them."""
    model = make_model(folder / "model")
    # First and alone: what it is compared with stays far from what shares its pages.
    plain = [role for role in FLOWS[flow] if role != "encode" and engine is VLLM]
    engines = {role: plain_engine_mb(role, model, folder) for role in plain}
    sides = {name: Side(name, flow, engine, model, folder / name) for name in SIDES}
    with ExitStack() as end:
        for side in sides.values():
            end.callback(_stop, side)
        end.callback(lambda: [p.signal(signal.SIGTERM) for s in sides.values() for p in s.worker])
        for side in sides.values():
            side.start()
            side.wait_answers()
        for side in sides.values():
            end.callback(side.signal_engines, signal.SIGCONT)
            side.signal_engines(signal.SIGSTOP)
        bench = Bench(sides, pairs)
        end.callback(bench.close)
        yield from bench.rows()
        yield from memory_rows(sides, engines)


def _stop(side: Side) -> None:
    try:
        side.stop()
    except AssertionError as error:
        # By now all processes have ended; the measurements are good either way.
        print(error, file=sys.stderr)


def _give_up(number: int, _frame: object) -> NoReturn:
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm", help="(vllm)")
    parser.add_argument("--flow", choices=list(FLOWS), default="e-pd", help="(e-pd)")
    parser.add_argument("--pairs", type=int, default=20, help="of each row (20)")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    parser.add_argument("--keep", type=Path, help="folder for logs, kept afterwards")
    args = parser.parse_args(argv)
    if (args.engine, args.flow) == ("sglang", "epd"):
        parser.error("SGLang's flow epd is not measured: take e-pd and pd")
    have = psutil.virtual_memory().available >> 30
    if have < NEED_GB[args.flow]:
        parser.error(f"flow {args.flow} takes some {NEED_GB[args.flow]} GB of memory, not {have}")
    # Also when told to end, and when it takes too long, everything is stopped.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _give_up)
    signal.alarm(TIME_LIMIT_S)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dwe-bench-") as folder:
        print(
            f"{args.engine}, flow {args.flow}, load {os.getloadavg()[0]:.1f}\n{HEADER}", flush=True
        )
        for row in run(args.keep or Path(folder), ENGINES[args.engine], args.flow, args.pairs):
            rows.append(asdict(row))
            print(row.text(), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
