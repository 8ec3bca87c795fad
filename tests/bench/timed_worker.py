"""Start a worker that also writes down how long each request takes to reach the engine.

    python tests/bench/timed_worker.py MODULE RECORD_FILE -- [arguments of the worker]

MODULE is ``dynamo_worker_ext.vllm`` or ``dynamo.vllm``. The clock starts where Dynamo's runtime,
in a thread of its own, asks the handler's ``generate`` for its first step, and is read three times,
at points that every request passes, also one whose media a worker leaves to vLLM unprocessed: where
the event loop has woken up and takes that step, where vLLM has the rendered engine input before it,
and where it hands an ``EngineCoreRequest`` to its engine core. One line of JSON a request:
``{"request_id", "wake_seconds", "input_seconds", "seconds"}``. Runs in the worker process; the
engine core, a process of its own, is left as it is.
"""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
import threading
import time
from contextvars import ContextVar
from typing import Any, Final, TextIO

#: Module and class whose ``generate`` Dynamo calls.
HANDLERS: Final = {
    "dynamo_worker_ext.vllm": ("dynamo_worker_ext.worker.base", "Worker"),
    "dynamo.vllm": ("dynamo.vllm.handlers", "DecodeWorkerHandler"),
    "dynamo_worker_ext.sglang": ("dynamo_worker_ext.worker.base", "Worker"),
    "dynamo.sglang": ("dynamo.sglang.request_handlers.llm.decode_handler", "DecodeWorkerHandler"),
}


class Stream:
    """A handler's stream, to be noticed when it is asked for its first step and when it takes it.

    No generator around it: throughput is measured here as well.

    Args:
        stream: the handler's.
        request_id: of its request.
        asked, awake: are told when, by request id.
    """

    def __init__(
        self, stream: Any, request_id: str, asked: dict[str, float], awake: dict[str, float]
    ) -> None:
        self._stream = stream
        self._request_id: str | None = request_id
        self._asked, self._awake = asked, awake

    def __aiter__(self) -> Stream:
        return self

    def __anext__(self) -> Any:
        step = self._stream.__anext__()
        if (request_id := self._request_id) is not None:
            self._asked[request_id] = time.perf_counter()
            self._request_id = None
            return _FirstStep(step, request_id, self._awake)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _FirstStep:
    """An awaitable that writes down when it is begun."""

    def __init__(self, step: Any, request_id: str, awake: dict[str, float]) -> None:
        self._step, self._request_id, self._awake = step, request_id, awake

    def __await__(self) -> Any:
        self._awake[self._request_id] = time.perf_counter()
        return self._step.__await__()


def time_requests(module: str, record: TextIO) -> None:
    """Wrap the handler of `module`, and the points in its engine."""
    (_time_sglang if module.endswith("sglang") else _time_vllm)(module, record)


def _time_sglang(module: str, record: TextIO) -> None:
    """One point: the request goes to SGLang's scheduler, processed and tokenized."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    where, name = HANDLERS[module]
    handler = getattr(importlib.import_module(where), name)
    generate, send = handler.generate, TokenizerManager._send_one_request
    # The engine has ids of its own; all of a request happens in one context.
    begun: ContextVar[float | None] = ContextVar("begun", default=None)

    class Marked(Stream):
        def __anext__(self) -> Any:
            if self._request_id is not None:
                begun.set(time.perf_counter())
                self._request_id = None
            return self._stream.__anext__()

    @functools.wraps(generate)
    def timed_generate(self: Any, request: Any, context: Any) -> Stream:
        return Marked(generate(self, request, context), context.id(), {}, {})

    @functools.wraps(send)
    async def timed_send(self: Any, tokenized: Any) -> None:
        now, start = time.perf_counter(), begun.get()
        await send(self, tokenized)
        if start is not None:
            line = {"request_id": tokenized.rid, "seconds": now - start}
            record.write(json.dumps(line) + "\n")
            record.flush()

    handler.generate = timed_generate
    TokenizerManager._send_one_request = timed_send


def _time_vllm(module: str, record: TextIO) -> None:
    """The rendered engine input, and the request as it goes to the core."""
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.input_processor import InputProcessor

    where, name = HANDLERS[module]
    handler = getattr(importlib.import_module(where), name)
    generate, process = handler.generate, InputProcessor.process_inputs
    validate, submit = InputProcessor._validate_model_inputs, AsyncMPClient.add_request_async
    asked: dict[str, float] = {}
    awake: dict[str, float] = {}
    rendered: dict[str, float] = {}
    thread = threading.local()

    @functools.wraps(generate)
    def timed_generate(self: Any, request: Any, context: Any) -> Stream:
        return Stream(generate(self, request, context), context.id(), asked, awake)

    @functools.wraps(process)
    def timed_process(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        thread.request_id = request_id
        return process(self, request_id, *args, **kwargs)

    # vLLM 0.31.0 renders raw prompts inside of `process_inputs`; this is what comes next.
    @functools.wraps(validate)
    def timed_validate(self: Any, *args: Any, **kwargs: Any) -> None:
        rendered[thread.request_id] = time.perf_counter()
        validate(self, *args, **kwargs)

    @functools.wraps(submit)
    async def timed_submit(self: Any, request: Any) -> None:
        now = time.perf_counter()
        await submit(self, request)
        # vLLM adds a suffix to the id that it was given.
        request_id = request.external_req_id
        times = [of.pop(request_id, None) for of in (asked, awake, rendered)]
        start, at_wake, at_input = times
        if start is None or at_wake is None or at_input is None:
            return  # the worker's own, at start-up
        line = {
            "request_id": request_id,
            "wake_seconds": at_wake - start,
            "input_seconds": at_input - start,
            "seconds": now - start,
        }
        record.write(json.dumps(line) + "\n")
        record.flush()

    handler.generate = timed_generate
    InputProcessor.process_inputs = timed_process
    InputProcessor._validate_model_inputs = timed_validate
    AsyncMPClient.add_request_async = timed_submit


def main() -> None:
    module, path, separator, *arguments = sys.argv[1:]
    if separator != "--" or module not in HANDLERS:
        sys.exit(f"usage: timed_worker.py {{{','.join(HANDLERS)}}} RECORD_FILE -- [arguments]")
    record = open(path, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process
    time_requests(module, record)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
