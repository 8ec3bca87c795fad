"""A real deployment on loopback: Dynamo's frontends and real workers, in subprocesses.

Everything a stack makes (processes, ports, discovery files, segments) is gone when its context
ends, also after a failure. Discovery is a folder, so nothing else has to run.

    with Stack(model, folder, {"vllm": FrontendSpec()}, workers=2) as stack:
        seen = stack.ask("vllm", [part(uri), "Describe it"])
        assert seen.outcome == "received"
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

from tests.counted_worker import PROCESSED
from tests.engines import BLOCK, ENGINES, ROOT, VLLM, Engine
from tests.snapshot import Snapshot

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0

#: What makes Dynamo and vLLM keep to loopback, this CPU and the files at hand.
BASE_ENV: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
    "DYN_MM_ALLOW_INTERNAL": "1",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "NO_COLOR": "1",
}

#: What says a worker's role, and the roles that Dynamo's router (1.6.1) chooses workers of: by
#: their load, and also by what their KV events say that they hold. Encode workers take turns.
ROLE = "--disaggregation-mode"
ROUTED_BY_LOAD = ("agg", "pd", "prefill", "decode")
ROUTED_BY_CACHE = ("agg", "pd", "prefill")

#: Engine arguments of the tiny models.
WORKER_ARGS = VLLM.args(BLOCK)

#: What frontends log of every request, also of those that only ask how they are.
SERVED = " http response sent status=200 "

#: Nothing here goes through a proxy that the environment may name.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_taken: set[int] = set()


def free_port() -> int:
    """A free TCP port that Dynamo can use: its system port is a signed 16-bit number."""
    while True:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 12_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _taken:
            _taken.add(port)
            return port


def _dying_with_parent() -> list[str]:
    """Runs a command that is killed when the test process is, which then cleans up nothing."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
    """Poll until `condition` is true, and return what it gave.

    Time in which the whole machine stood still is not counted: virtual ones do so for seconds.

    Raises:
        AssertionError: it is still false after `timeout` seconds.
    """
    spent, last = 0.0, time.monotonic()
    while not (value := condition()):
        assert spent < timeout, f"after {timeout:g} s still not: {what}"
        time.sleep(0.05)
        now = time.monotonic()
        spent += min(now - last, 0.5)
        last = now
    return value


@dataclass
class Process:
    """One process of a stack, in a process group of its own.

    Not in a session: where the kernel schedules by session (``sched_autogroup_enabled``), an engine
    that spins keeps all others from running for seconds (Linux 6.18, two cores).

    Attributes:
        name: for messages and the log's name.
        url: where its HTTP server listens.
        role: of a worker, as ``--disaggregation-mode`` says it.
        output: what takes its standard output, in place of its log.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    url: str
    role: str = "agg"
    output: Path | None = None
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # What this shell has set for Dynamo is not what is tested here.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "VLLM_"))}
        with self.log.open("ab") as log, (self.output or self.log).open("ab") as out:
            self.popen = subprocess.Popen(
                [*_dying_with_parent(), *self.argv], cwd=ROOT, env={**inherited, **self.env},
                stdin=subprocess.DEVNULL, stdout=out, stderr=log, process_group=0,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Signal this process alone, as an orchestrator does."""
        if self.alive:
            os.kill(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Signal every living process of its group."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, timeout: float) -> int:
        """Its exit status.

        Raises:
            AssertionError: it still runs.
        """
        assert self.popen is not None
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} still runs after {timeout:g} s:\n{self.tail()}"
            ) from None

    def members(self) -> dict[int, str]:
        """Living processes of its group by pid, with their names."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            state, _, group = rest.split()[:3]
            if int(group) == self.pid and state != "Z":
                found[int(entry.name)] = name
        return found

    def end(self, deadline: float) -> None:
        """Wait until `deadline` for an orderly end, then kill what is left of its group."""
        if self.popen is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(max(0.1, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill it and all of its group, and remove the shared memory of engines among them."""
        assert self.popen is not None
        # What would have removed it is killed as well.
        mapped = [name for pid in self.members() for name in _mapped(pid)]
        segments = {name for name in mapped if name.startswith("psm_")}
        self.signal_all(signal.SIGKILL)
        self.popen.wait()
        for name in segments:
            Path("/dev/shm", name).unlink(missing_ok=True)

    def get(self, path: str, timeout: float = 30.0) -> tuple[int, str]:
        """HTTP GET: status and body; (0, reason) where nobody answers."""
        try:
            with _OPENER.open(self.url + path, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metrics(self) -> Snapshot:
        status, text = self.get("/metrics")
        assert status == 200, f"{self.name}: /metrics answered {status}: {text}\n{self.tail()}"
        return Snapshot.parse(text)

    def tail(self, lines: int = 40) -> str:
        """The end of its log, without the requests of whoever waits for it."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        told = [line for line in text.splitlines() if SERVED not in line]
        return "\n".join(told[-lines:])


@dataclass
class Answer:
    """A chat answer.

    Attributes:
        status: HTTP status.
        body: decoded JSON, or the text where it is none.
        seconds: from request to the last byte.
        block: tokens of a block.
    """

    status: int
    body: Any
    seconds: float
    block: int = BLOCK

    @property
    def text(self) -> str:
        assert self.status == 200, f"{self.status}: {self.body}"
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def usage(self) -> Mapping[str, Any]:
        assert self.status == 200, f"{self.status}: {self.body}"
        usage: Mapping[str, Any] = self.body["usage"]
        return usage

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def reusable_tokens(self) -> int:
        """All full blocks of the prompt; the last token is always computed."""
        return (self.prompt_tokens - 1) // self.block * self.block


@dataclass
class Seen:
    """An answer, with what it made the deployment count.

    Attributes:
        answer: what the client got.
        frontend: what the frontend's ``/metrics`` rose by.
        workers: what each worker's rose by.
        roles: of these workers.
    """

    answer: Answer
    frontend: Snapshot = field(repr=False)
    workers: Sequence[Snapshot] = field(repr=False)
    roles: Sequence[str] = ()

    def of(self, role: str) -> Seen:
        """The same of the workers of one role."""
        of_role = [w for w, its in zip(self.workers, self.roles, strict=True) if its == role]
        return Seen(self.answer, self.frontend, of_role, [role] * len(of_role))

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def outcomes(self) -> dict[str, float]:
        """Requests by outcome, over all workers."""
        result: dict[str, float] = {}
        for worker in self.workers:
            for outcome, count in worker.by("outcome", "dynamo_worker_ext_requests_total").items():
                result[outcome] = result.get(outcome, 0) + count
        return result

    @property
    def outcome(self) -> str:
        """The outcome of the one request."""
        outcomes = self.outcomes
        assert list(outcomes.values()) == [1], outcomes
        return next(iter(outcomes))

    @property
    def worker(self) -> int:
        """Who served it."""
        served = [
            number
            for number, worker in enumerate(self.workers)
            if worker.total("dynamo_worker_ext_requests_total")
        ]
        assert len(served) == 1, f"served by {served}"
        return served[0]

    def total(self, name: str, **labels: str) -> float:
        """A series over all workers."""
        return sum(worker.total(name, **labels) for worker in self.workers)

    @property
    def items(self) -> dict[str, float]:
        """Media items by where the engine had them from."""
        served = self.workers[self.worker]
        return served.by("source", "dynamo_worker_ext_mm_items_total")

    @property
    def received_bytes(self) -> float:
        return self.total("dynamo_worker_ext_mm_received_bytes_total")

    @property
    def processed_images(self) -> float:
        """Images and videos that went through the HF processor in a worker."""
        return sum(self.total(name + PROCESSED) for name in ENGINES)

    @property
    def predicted_tokens(self) -> float:
        """Cached tokens that the router expected the chosen worker to have."""
        return self.frontend.total("dynamo_component_router_kv_selected_cached_prefix_tokens_total")


class Stream:
    """A streamed chat request, read by a thread of its own.

    Attributes:
        status: HTTP status; 0 before there is one, and where the connection broke.
        text: what has come so far.
        error: what came instead of an answer or in the middle of it; None for a whole answer.
    """

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        self.status = 0
        self.text = ""
        self.error: str | None = "the stream has not ended"
        self._begun = threading.Event()
        host, _, port = url.removeprefix("http://").partition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=180)
        self._connection.connect()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def wait_begun(self, timeout: float = 60.0) -> Self:
        """Until the first text is there.

        Raises:
            AssertionError: nothing came, or an error.
        """
        assert self._begun.wait(timeout), f"nothing came within {timeout:g} s"
        assert self.text, f"{self.status}: {self.error}"
        return self

    def wait_ended(self, timeout: float = 90.0) -> Self:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the stream still runs after {timeout:g} s"
        return self

    def disconnect(self) -> None:
        """Go away, as a client does whose user has closed the window."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.wait_ended()

    def _run(self, body: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = self._connection.getresponse()
            self.status = answer.status
            self.error = self._read(answer)
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            self._connection.close()
            self._begun.set()

    def _read(self, answer: http.client.HTTPResponse) -> str | None:
        """Take the events; what was wrong, if anything was."""
        if answer.status != 200:
            return answer.read().decode(errors="replace")
        failed = False
        for raw in answer:
            line = raw.decode(errors="replace").strip()
            failed |= line == "event: error"
            kind, _, data = line.partition(":")
            if failed and data and kind in ("", "data"):
                return data.strip()
            if kind != "data":
                continue
            if data.strip() == "[DONE]":
                return None
            event = json.loads(data)
            if "error" in event:
                return str(event["error"])
            for choice in event.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
            if self.text:
                self._begun.set()
        return "the stream ended before its end"


@dataclass
class FrontendSpec:
    """One of Dynamo's frontends.

    Attributes:
        processor: ``vllm`` for the Python chat processor, ``rust`` for the built-in one.
        transfer: ``shm``, ``nixl`` or ``off``, and for ours also ``auto`` and ``arena``; only the
            chat processor transfers.
        args: more of its command line.
        wrap: what its command line is an argument of, such as ``unshare -m``.
        mode: how it routes.
        module: Dynamo's own, or ours.
        log: what it logs, as ``DYN_LOG`` says it.
    """

    processor: str = "vllm"
    transfer: str = "shm"
    args: Sequence[str] = ()
    wrap: Sequence[str] = ()
    mode: str = "kv"
    module: str = "dynamo.frontend"
    log: str = "info"

    def env(self) -> dict[str, str]:
        if self.transfer == "off":
            return {"DYN_LOG": self.log, "DYNAMO_DISABLE_NIXL_MM": "1"}
        return {"DYN_LOG": self.log, "DYNAMO_MM_TRANSFER": self.transfer}


@dataclass
class Stack:
    """Frontends and workers over one discovery folder; use it as a context manager.

    Attributes:
        model: the model's folder.
        folder: for logs and discovery; must be this stack's own.
        frontends: by name.
        workers: how many to start.
        engine: of the workers; frontends run in this environment.
        block: tokens of a block.
        ranks: data-parallel ones of each worker.
        worker_args: appended to the engine's arguments.
        worker_env: added to what every worker gets.
        module: what a worker is; see `tests.counted_worker`.
        served_name: what clients call the model.
        grace_s: seconds that a worker which stops answers after it has left discovery. Dynamo's 5
            where requests are under way then; elsewhere they would be waited for in vain.
    """

    model: Path
    folder: Path
    frontends: Mapping[str, FrontendSpec] = field(default_factory=lambda: {"vllm": FrontendSpec()})
    workers: int = 2
    engine: Engine = VLLM
    block: int = BLOCK
    ranks: int = 1
    worker_args: Sequence[str] = ()
    worker_env: Mapping[str, str] = field(default_factory=dict)
    module: str = "tests.counted_worker"
    served_name: str = "tiny"
    grace_s: float = 1.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.worker: list[Process] = []
        self.frontend: dict[str, Process] = {}
        self._ended: list[Process] = []
        self._segments = _segments()
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._keep_registered, daemon=True).start()
        try:
            for _ in range(self.workers):
                self.add_worker()
            for name, spec in self.frontends.items():
                self.add_frontend(name, spec)
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def env(self) -> dict[str, str]:
        return {**BASE_ENV, "DYN_FILE_KV": str(self.folder / "store")}

    def add_worker(
        self,
        *args: str,
        wrap: Sequence[str] = (),
        module: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start one more worker; `wait_ready` waits for it."""
        number, port = len(self.worker), free_port()
        options = [*self.engine.args(self.block), *self.worker_args, *args]
        process = Process(
            name=f"worker{number}",
            argv=[
                *wrap, self.engine.python, "-m", *self._module(module or self.module),
                self.engine.model_flag, str(self.model), "--served-model-name", self.served_name,
                *options,
            ],
            env={
                **self.env,
                "DYN_SYSTEM_PORT": str(port),
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(self.grace_s),
                **self.engine.env,
                **self.worker_env,
                **(env or {}),
            },
            log=self.folder / f"worker{number}.log",
            url=f"http://127.0.0.1:{port}",
            role=dict(pairwise(options)).get(ROLE, "agg"),
        )  # fmt: skip
        process.start()
        self.worker.append(process)
        return process

    def _module(self, module: str) -> list[str]:
        """What follows ``-m``: workers of the tests' own are told which engine they are."""
        return [module, self.engine.name] if module.startswith("tests.") else [module]

    def add_frontend(self, name: str, spec: FrontendSpec) -> Process:
        """Start one more frontend; `wait_ready` waits for it."""
        port = free_port()
        argv = [
            *spec.wrap, sys.executable, "-m", spec.module, "--http-host", "127.0.0.1",
            "--http-port", str(port), "--router-mode", spec.mode, *spec.args,
        ]  # fmt: skip
        if spec.processor == "vllm":
            argv += ["--dyn-chat-processor", "vllm"]
        process = Process(
            name=f"frontend-{name}",
            argv=argv,
            env={**self.env, **spec.env()},
            log=self.folder / f"frontend-{name}.log",
            url=f"http://127.0.0.1:{port}",
        )
        process.start()
        self.frontend[name] = process
        return process

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until every worker serves and every frontend routes to all of them.

        Raises:
            AssertionError: with the end of the log of whoever is not ready.
        """
        deadline = time.monotonic() + timeout
        for process in [*self.worker, *self.frontend.values()]:
            if process in self._ended:
                continue
            lack = self._serving_lacks if process in self.worker else self._routing_lacks
            while missing := lack(process):
                assert process.alive, f"{process.name} ended:\n{process.tail()}"
                late = time.monotonic() > deadline
                assert not late, f"{process.name} is not ready: {missing}\n{process.tail()}"
                time.sleep(0.2)

    def _keep_registered(self) -> None:
        """Spare everyone the end of a registration that nobody asked for.

        Dynamo's file discovery (1.6.1) deletes what was not touched for 10 s, for good. A virtual
        machine that is paused for that long, or whose clock is set, loses live workers by it.
        """
        while not self._stopping.wait(0.2):
            later = time.time() + 60
            for entry in (self.folder / "store").glob("v1/*/*"):
                with suppress(FileNotFoundError):
                    os.utime(entry, (later, later))

    def _serving_lacks(self, worker: Process) -> str:
        """What a worker still lacks to serve; empty where it does."""
        if not self._discovered():
            return "nothing is registered"
        status, body = worker.get("/health")
        return "" if status == 200 else f"/health says {status}: {body}"

    def _routing_lacks(self, frontend: Process) -> str:
        """What a frontend still lacks to route to every worker; empty where it does."""
        status, models = frontend.get("/v1/models")
        if status != 200 or f'"{self.served_name}"' not in models:
            return f"/v1/models says {status}: {models}"
        now, prefix = frontend.metrics(), "dynamo_component_router_"
        alive = [worker.role for worker in self.worker if worker.alive]
        discovered = self._discovered()
        # A router that went with its last worker may go on counting that one (Dynamo 1.6.1).
        registered = [
            f"{int(dict(one.labels)['router_worker_id']):x}"
            for one in now.named(prefix + "worker_registered")
            if one.value
        ]
        expected = {
            "registered": self.ranks * sum(role in ROUTED_BY_LOAD for role in alive),
            "event sources": self.ranks * sum(role in ROUTED_BY_CACHE for role in alive),
            "discovered": len(alive),
        }
        found = {
            "registered": sum(instance in discovered for instance in registered),
            "event sources": now.total(prefix + "kv_zmq_ingress_sources", state="active"),
            "discovered": len(discovered),
        }
        return "" if found == expected else f"{found}, not {expected}; registered: {registered}"

    def kill(self, worker: Process) -> Callable[[], None]:
        """End a worker and all its processes as a loss of power does.

        Returns:
            What has discovery forget it, as Dynamo's does by itself after 10 s.
        """
        instance = self.instance_id(worker)
        worker.kill()

        def forget() -> None:
            for entry in (self.folder / "store").glob(f"v1/*/*{instance}"):
                entry.unlink(missing_ok=True)

        return forget

    def ended(self, process: Process) -> None:
        """From now on do without a process that a test has ended."""
        self._ended.append(process)

    def _discovered(self) -> set[str]:
        """Hex ids of the workers that can be found, whatever component their role makes them."""
        folder = self.folder / "store/v1/instances"
        names = [unquote(f.name) for f in folder.iterdir()] if folder.exists() else []
        found = [re.fullmatch("dynamo/[a-z]+/generate/([0-9a-f]+)", name) for name in names]
        return {match[1] for match in found if match}

    def instance_id(self, worker: Process) -> str:
        """The hex id that a live worker is registered under."""
        (ids,) = {
            dict(sample.labels)["worker_id"]
            for sample in worker.metrics().named("dynamo_worker_ext_requests_in_flight")
        }
        return ids

    def is_discovered(self, instance_id: str) -> bool:
        return instance_id in self._discovered()

    def ask(self, frontend: str, content: Any, **options: Any) -> Seen:
        """One chat request to an idle deployment, and what came of it.

        Returns when the frontend's router knows of the blocks that the request left cached.
        """
        workers = [worker for worker in self.worker if worker.alive]
        front = self.frontend[frontend]
        self._settle(front)
        before = [worker.metrics() for worker in workers]
        front_before = front.metrics()
        answer = self.chat(frontend, content, **options)
        new_blocks = 0
        if answer.status == 200:
            # Whose blocks a router asks for: prefill writes the prompt, others also the answer.
            answered = 0 if self._has_prefill else int(answer.usage["completion_tokens"]) - 1
            written = answer.prompt_tokens + answered
            new_blocks = written // self.block - answer.cached_tokens // self.block
            if self.engine is not VLLM and answer.cached_tokens == answer.reusable_tokens:
                new_blocks = 0  # SGLang keeps answers too: a repeat may store nothing

        def look() -> Seen | None:
            after = [worker.metrics() for worker in workers]
            seen = Seen(
                answer,
                front.metrics() - front_before,
                [new - old for new, old in zip(after, before, strict=True)],
                [worker.role for worker in workers],
            )
            told = sum(
                change.total("dynamo_worker_ext_kv_events_total", kind="stored")
                for change, role in zip(seen.workers, seen.roles, strict=True)
                if role in ROUTED_BY_CACHE
            )
            known = seen.frontend.total(
                "dynamo_component_kv_cache_events_applied_total", event_type="stored"
            )
            return seen if told == known and (told or not new_blocks) else None

        seen: Seen = wait_for(look, "the router knows what the request left cached")
        return seen

    @property
    def _has_prefill(self) -> bool:
        return any(worker.alive and worker.role == "prefill" for worker in self.worker)

    def _settle(self, front: Process) -> None:
        """Wait until the router hears of nothing more from requests that came before."""

        def counts() -> tuple[float, float]:
            told = self.total("dynamo_worker_ext_kv_events_total")
            return told, front.metrics().total("dynamo_component_kv_cache_events_applied_total")

        last = counts()
        while time.sleep(0.1) or (now := counts()) != last:
            last = now

    def chat(
        self, frontend: str, content: Any, *, timeout: float = 120.0, **options: Any
    ) -> Answer:
        """One chat request that is not streamed, greedy unless `options` say otherwise.

        Args:
            content: a string, or content parts; a string among these is a text part.
        """
        return self.post(frontend, "/v1/chat/completions", self.body(content, **options), timeout)

    def stream(self, frontend: str, content: Any, **options: Any) -> Stream:
        """Begin a streamed chat request."""
        body = {**self.body(content, **options), "stream": True}
        return Stream(self.frontend[frontend].url, body)

    def body(self, content: Any, **options: Any) -> dict[str, Any]:
        if not isinstance(content, str):
            content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
        return {
            "model": self.served_name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
            # An end of text that comes by chance would make two answers equal.
            "ignore_eos": True,
            **options,
        }

    def post(self, frontend: str, path: str, body: Any, timeout: float = 120.0) -> Answer:
        request = urllib.request.Request(
            self.frontend[frontend].url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.monotonic()
        try:
            with _OPENER.open(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            decoded = json.loads(raw)
        except ValueError:
            decoded = raw.decode(errors="replace")
        return Answer(status, decoded, time.monotonic() - start, self.block)

    def total(self, name: str, **labels: str) -> float:
        """A series summed over all live workers."""
        return sum(w.metrics().total(name, **labels) for w in self.worker if w.alive)

    def stop(self) -> None:
        """Stop everything, then say what was left behind.

        Raises:
            AssertionError: a segment of ours is still there.
        """
        deadline = time.monotonic() + STOP_TIMEOUT_S
        everyone = [*self.frontend.values(), *self.worker]
        for process in everyone:
            process.signal(signal.SIGTERM)
        for process in everyone:
            process.end(deadline)
        self._stopping.set()
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        new = _segments() - self._segments
        # A frontend that was killed leaves its own behind; nobody else may clean them up.
        for process in everyone:
            for name in [n for n in new if n.startswith(f"mm_kwargs_{process.pid}_")]:
                new.remove(name)
                Path("/dev/shm", name).unlink(missing_ok=True)
        # Others may be at work here as well; what ours wrote carries their pid.
        ours = (f"dwe_test_{os.getpid()}_", *(f"dwe_{process.pid}_" for process in everyone))
        left = sorted(name for name in new if name.startswith(ours))
        assert not left, f"segments left behind: {left}"


def _mapped(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(r"/dev/shm/(\S+)", maps))


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm"))
