"""Start a worker of one role that writes down what encoding costs; see `bench_disagg`.

    python -m tests.bench.timed_role MODULE RECORD_FILE -- [arguments of the worker]

MODULE is a worker's, ours or upstream's. Of each request that an encode worker serves, one line of
JSON: ``{"seconds"}``, from the first step of its handler's ``generate`` until the embeddings are on
offer; there our handler ends. Upstream's, which counts no bytes, also writes ``{"sent_bytes"}`` of
each tensor that it hands to its sender.

With ``engine`` as MODULE there is no worker at all, but what both stand on: a plain ``AsyncLLM``
of these arguments, kept until it is told to end. It makes the file once it has answered.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import runpy
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

#: Modules and classes of upstream's encode workers.
HANDLERS: Final = {
    "dynamo.vllm": ("dynamo.vllm.multimodal_handlers", "EncodeWorkerHandler"),
    "dynamo.sglang": (
        "dynamo.sglang.request_handlers.multimodal.encode_worker_handler",
        "MultimodalEncodeWorkerHandler",
    ),
}


def note(record: Path, **line: float) -> None:
    with record.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def time_ours(record: Path) -> None:
    from dynamo_worker_ext.worker.encode import EncodeWorker

    generate = EncodeWorker.generate

    @functools.wraps(generate)
    async def timed(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        start = time.perf_counter()
        async for chunk in generate(self, request, context):
            yield chunk
        note(record, seconds=time.perf_counter() - start)

    EncodeWorker.generate = timed  # type: ignore[method-assign]


def time_upstreams(module: str, record: Path) -> None:
    from dynamo.common.multimodal.embedding_transfer import NixlWriteEmbeddingSender

    handler = getattr(importlib.import_module(HANDLERS[module][0]), HANDLERS[module][1])
    generate, send = handler.generate, NixlWriteEmbeddingSender.send_embeddings
    # All of a request happens in one context.
    begun: ContextVar[float] = ContextVar("begun")

    @functools.wraps(generate)
    async def timed(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        begun.set(time.perf_counter())
        async for chunk in generate(self, request, context):
            yield chunk

    @functools.wraps(send)
    async def counted(self: Any, embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        result = await send(self, embeddings, *args, **kwargs)
        note(record, sent_bytes=embeddings.nbytes, seconds=time.perf_counter() - begun.get())
        return result

    handler.generate = timed
    NixlWriteEmbeddingSender.send_embeddings = counted


async def keep_engine(arguments: list[str], ready: Path) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parser.parse_args(arguments)))
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    try:
        async for _ in engine.generate("one two three", SamplingParams(max_tokens=4), "1"):
            pass
        note(ready)
        await end.wait()
    finally:
        engine.shutdown()


def main() -> None:
    module, path, separator, *arguments = sys.argv[1:]
    record = Path(path)
    if separator != "--":
        sys.exit(__doc__)
    if module == "engine":
        asyncio.run(keep_engine(arguments, record))
        return
    if module in HANDLERS:
        time_upstreams(module, record)
    else:
        time_ours(record)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
