"""The workers' cards, read through Dynamo's own bindings."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from dynamo_worker_ext.card import WorkerCard
from dynamo_worker_ext.errors import StartupError

#: Seconds from the first card that was seen to the last.
_SETTLE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """One worker, as discovery has it.

    Attributes:
        worker: its id, in hex as on its metrics.
        model: what clients call its model.
        block_size: of its KV cache.
        checksums: of the model's files; frontends refuse workers that differ.
        system_url: where it serves /metrics; empty where it does not.
        card: what it says about itself; None where that cannot be read.
        error: why not.
    """

    worker: str
    model: str
    block_size: int | None = None
    checksums: tuple[str, ...] = ()
    system_url: str = ""
    card: WorkerCard | None = None
    error: str = ""

    @classmethod
    def of(cls, worker_id: str, raw: str) -> SeenWorker:
        """Read what Dynamo hands out: a worker's id in decimal, and its card as JSON."""
        worker = f"{int(worker_id):x}" if worker_id.isdecimal() else worker_id
        try:
            content = json.loads(raw)
        except ValueError as error:
            return cls(worker, "?", error=f"the card of worker {worker} is no JSON: {error}")
        if not isinstance(content, dict):
            return cls(worker, "?", error=f"the card of worker {worker} is no JSON object")
        runtime = content.get("runtime_config")
        data = runtime.get("runtime_data") if isinstance(runtime, dict) else None
        card, why = None, ""
        try:
            card = WorkerCard.from_runtime_data(data if isinstance(data, dict) else {}, worker)
        except StartupError as error:
            why = str(error)
        files = _files(content)
        block_size = content.get("kv_cache_block_size")
        return cls(
            worker,
            str(content.get("display_name", "?")),
            block_size if isinstance(block_size, int) else None,
            tuple(sorted(checksum for _, checksum in files)),
            next((url for path, _ in files if (url := _base(path))), ""),
            card,
            why,
        )


def _files(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(path, checksum) of the files that a card names."""
    found: list[tuple[str, str]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            path, checksum = value.get("path"), value.get("checksum")
            if isinstance(path, str) and isinstance(checksum, str):
                found.append((path, checksum))
            for one in value.values():
                look(one)

    for part in ("model_info", "tokenizer", "prompt_formatter", "chat_template_file"):
        look(content.get(part))
    return found


def _base(path: str) -> str:
    parts = urlsplit(path)
    is_http = parts.scheme in ("http", "https") and parts.netloc
    return f"{parts.scheme}://{parts.netloc}" if is_http else ""


async def read_cards(backend: str, endpoint: str, timeout: float) -> list[SeenWorker]:
    """Ask discovery for the workers of one endpoint.

    Args:
        backend: Dynamo's name for it: ``file``, ``etcd``, ``kubernetes``, ``mem``.
        endpoint: ``namespace.component.endpoint``.
        timeout: seconds to wait for the first one.

    Raises:
        StartupError: there is no Dynamo here, or its discovery cannot be reached.
    """
    # Its log is not to stand among the report. Read when the bindings are imported.
    os.environ.setdefault("DYN_LOG", "error")
    try:
        from dynamo.llm import FpmEventSubscriber
        from dynamo.runtime import DistributedRuntime
    except ImportError as error:
        raise StartupError(f"discovery needs Dynamo's bindings: {error}") from error
    try:
        runtime = DistributedRuntime(
            asyncio.get_running_loop(), backend, os.environ.get("DYN_REQUEST_PLANE", "tcp")
        )
        watch = FpmEventSubscriber(runtime.endpoint(endpoint))
        watch.start_tracking()
    except Exception as error:  # the bindings raise whatever the runtime says
        raise StartupError(f"discovery by {backend!r} cannot be used: {error}") from error
    try:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        cards: Mapping[str, str] = {}
        while loop.time() < deadline:
            found = watch.get_model_cards()
            if len(found) > len(cards):
                deadline = loop.time() + _SETTLE_S
            cards = dict(found)
            await asyncio.sleep(0.05)
    finally:
        runtime.shutdown()
    return [SeenWorker.of(worker, raw) for worker, raw in sorted(cards.items())]
