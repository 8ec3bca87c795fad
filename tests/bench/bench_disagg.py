"""Our encode, prefill and decode workers beside upstream's: the same requests to both.

    python -m tests.bench.bench_disagg [--engine vllm|sglang] [--flow e-pd|epd|pd] [--pairs N]
                                       [--apart] [--json FILE] [--keep DIR]

Two complete deployments on loopback, each with Dynamo's Rust frontend and a discovery folder of its
own, with the same engine arguments; upstream's NIXL settings are its defaults. A pair is one
request to each, in random order and one at a time, while the engines of the other side are stopped:
NIXL's threads spin. Where there is not memory for both sides at a time, or with --apart, all
requests go to the one and then the same to the other.

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
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.bench.bench_worker import (
    HEADER,
    SIDES,
    SIZES,
    Client,
    RecordedStack,
    Row,
    end_in_time,
    make_model,
    photo,
)
from tests.disagg.sglang_deployment import DECODE_ARGS, prefill_args
from tests.engines import BLOCK, ENGINES, ROOT, SGLANG, VLLM, Engine
from tests.stack import BASE_ENV, ROLE, FrontendSpec, Process, free_port, wait_for

#: Of each flow, its roles; encode workers work for the one after them.
FLOWS: Mapping[str, Sequence[str]] = {
    "epd": ("encode", "prefill", "decode"),
    "e-pd": ("encode", "agg"),
    "pd": ("prefill", "decode"),
}
ENGINE_PROCESSES = ("VLLM::EngineCore",)
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
    if engine is SGLANG and role in ("prefill", "decode"):
        args = list(prefill_args() if role == "prefill" else DECODE_ARGS)
    else:
        args = [] if role == "agg" else [ROLE, role]
    if engine is SGLANG and side == "upstream" and (behind_encoder or role == "encode"):
        its = [*(args or [ROLE, "pd"]), "--chat-template", "qwen2-vl"]
        return [*its, "--dedicated-mm-encoder"] if behind_encoder else its
    if engine is VLLM:
        args += connector_args(role)
        if behind_encoder and side == "upstream":
            args.append("--enable-mm-embeds")  # or it refuses what its encode worker sends
    return [*args, "--route-to-encoder"] if behind_encoder else args


class Side(RecordedStack):
    """One side's deployment of a flow.

    Args:
        side: a key of `SIDES`.
        flow: a key of `FLOWS`.
        engine, model, folder: see `RecordedStack`.
    """

    def __init__(self, side: str, flow: str, engine: Engine, model: Path, folder: Path) -> None:
        super().__init__(side, model, folder, engine)
        self.roles = FLOWS[flow]

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
            args += self.kv_events_args()
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
                "OMP_NUM_THREADS": "1",  # of SGLang's too
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
            return sum(line.get("sent_bytes", 0) for line in self.recorded())
        return self.total("dynamo_worker_ext_mm_received_bytes_total")

    def encode_seconds(self) -> list[float]:
        """Of each request that the encode worker has served."""
        return [line["seconds"] for line in self.recorded() if "seconds" in line]


class Step(NamedTuple):
    """One request: of which rows, and what it asks."""

    image: tuple[str, int]
    url: str
    question: str


#: What one request showed, by kind of row.
Measures = dict[str, float]
KINDS = {"first token": "ms", "encode": "ms", "moved": "KB"}
IMAGES = [(age, size) for age in ("new", "repeated") for size in SIZES]
WARM_UP = ("warm up", 0)


def plan(pairs: int) -> list[Step]:
    """The requests, the same for both sides; each has a question of its own."""
    order = random.Random(5)
    images = [(WARM_UP, photo(size, 1_000_000)) for _ in range(3) for size in SIZES]
    for number in range(pairs):
        for age, size in order.sample(IMAGES, len(IMAGES)):
            images.append(((age, size), photo(size, number if age == "new" else 1_000_000)))
    return [
        Step(image, url, f"{number}: what is in this picture?")
        for number, (image, url) in enumerate(images)
    ]


def ask(side: Side, client: Client, step: Step) -> Measures:
    """One request to one side, whose engines run meanwhile."""
    content = [
        {"type": "image_url", "image_url": {"url": step.url}},
        {"type": "text", "text": step.question},
    ]
    side.signal_engines(signal.SIGCONT)
    encoded, moved = len(side.encode_seconds()), side.moved_bytes()
    result = {"first token": 1e3 * client.chat(content, 4)}
    if "encode" in side.roles:
        result["encode"] = 1e3 * sum(side.encode_seconds()[encoded:])
        result["moved"] = (side.moved_bytes() - moved) / 1e3
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
            "--model", str(model), *VLLM.args(BLOCK), *connector_args(role),
        ],
        env={
            **BASE_ENV, **VLLM.env, **connector_env(), "PYTHONPATH": str(ROOT),
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


def memory(side: Side, engines: Mapping[str, float]) -> Measures:
    """Memory of each role's worker."""
    result: Measures = {}
    for role, worker in zip(side.roles, side.worker, strict=True):
        result[f"memory, {role}"] = memory_mb(worker.pid)
        if role in engines:
            own = memory_mb(worker.pid, without=ENGINE_PROCESSES)
            result[f"above the engine, {role}"] = own - engines[role]
    return result


def measure(
    sides: Sequence[Side], steps: Sequence[Step], engines: Mapping[str, float]
) -> dict[str, tuple[list[Measures], Measures]]:
    """Start these sides, ask each all of the plan, stop them: by side, of each step and memory."""
    order = random.Random(6)
    with ExitStack() as end:
        for side in sides:
            end.callback(side.stop)
        end.callback(lambda: [p.signal(signal.SIGTERM) for s in sides for p in s.worker])
        for side in sides:
            side.start()
            side.wait_answers()
        clients = {}
        for side in sides:
            end.callback(side.signal_engines, signal.SIGCONT)
            side.signal_engines(signal.SIGSTOP)
            client = clients[side.side] = Client(side)
            end.callback(client.close)
        found: dict[str, list[Measures]] = {side.side: [] for side in sides}
        for step in steps:
            for side in order.sample(sides, len(sides)):
                found[side.side].append(ask(side, clients[side.side], step))
        return {side.side: (found[side.side], memory(side, engines)) for side in sides}


def run(folder: Path, engine: Engine, flow: str, pairs: int, *, apart: bool) -> Iterator[Row]:
    """Measure both sides, at once or one after the other."""
    model = make_model(folder / "model")
    # First and alone: what it is compared with stays far from what shares its pages.
    plain = [role for role in FLOWS[flow] if role != "encode" and engine is VLLM]
    engines = {role: plain_engine_mb(role, model, folder) for role in plain}
    sides = [Side(name, flow, engine, model, folder / name) for name in SIDES]
    steps, found = plan(pairs), dict[str, tuple[list[Measures], Measures]]()
    for group in [[side] for side in sides] if apart else [sides]:
        found |= measure(group, steps, engines)
    for kind, unit in KINDS.items():
        for image in IMAGES:
            row = Row(f"{kind}, {image[0]} {image[1]} px", unit)
            for number, step in enumerate(steps):
                if step.image == image and all(kind in one[number] for one, _ in found.values()):
                    row.add({name: one[number][kind] for name, (one, _) in found.items()})
            if row.ours:
                yield row
    for label in next(iter(found.values()))[1]:
        row = Row(label, "MB")
        row.add({name: taken[label] for name, (_, taken) in found.items()})
        yield row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm", help="(vllm)")
    parser.add_argument("--flow", choices=list(FLOWS), default="e-pd", help="(e-pd)")
    parser.add_argument("--pairs", type=int, default=20, help="of each row (20)")
    parser.add_argument("--apart", action="store_true", help="one side after the other")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    parser.add_argument("--keep", type=Path, help="folder for logs, kept afterwards")
    args = parser.parse_args(argv)
    if (args.engine, args.flow) == ("sglang", "epd"):
        # "validation errors for DisaggSglangMultimodalRequest", each time.
        parser.error("upstream's SGLang prefill worker (1.6.1) answers none behind encode workers")
    have, need = psutil.virtual_memory().available >> 30, NEED_GB[args.flow]
    apart = args.apart or have < need
    if have < (need * 2 // 3 if apart else need):
        parser.error(f"flow {args.flow} takes some {need * 2 // 3} GB of memory, not {have}")
    end_in_time(TIME_LIMIT_S)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dwe-bench-") as folder:
        print(
            f"{args.engine}, flow {args.flow}{', apart' if apart else ''}, load "
            f"{os.getloadavg()[0]:.1f}\n{HEADER}",
            flush=True,
        )
        kept = args.keep or Path(folder)
        for row in run(kept, ENGINES[args.engine], args.flow, args.pairs, apart=apart):
            rows.append(asdict(row))
            print(row.text(), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
