"""One end of a transport under measurement, in a process of its own.

Started by `dynamo_worker_ext.bench.transfer`; reads commands and writes answers, a JSON object a
line. Each end takes its own times, so that what passes the commands is in none of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from dynamo_worker_ext import transfer, wire
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem

Answer = dict[str, Any]

_UPSTREAM: Final = "upstream-"
_now = time.perf_counter

#: How often the event loop is looked at; what epoll can tell apart.
_TICK_S: Final = 0.001


class Sender:
    """Offers items of one tensor, from the item as a processor makes it: encoding is part of it.

    Args:
        way: a transport's name, perhaps of upstream.
    """

    def __init__(self, way: str) -> None:
        self._way = way
        self._tensor: Any = None
        self._tag = 0
        self._refs: Any = []
        if way.startswith(_UPSTREAM):
            from dynamo.common.multimodal import mm_kwargs_transfer as upstream

            kind = "Shm" if way == "upstream-shm" else "Nixl"
            self._sender: Any = getattr(upstream, f"MmKwargs{kind}Sender")()
        else:
            self._sender = transfer.open_sender(way)

    async def offer(self, size: int, items: int) -> Answer:
        """Offer so many items; seconds, the metadata for the other end, and of what bytes."""
        import torch

        if self._tensor is None or self._tensor.nbytes != size:
            self._tensor = torch.empty(size, dtype=torch.uint8)
        self._tag = (self._tag + 1) % 256
        self._tensor.fill_(self._tag)  # a processor has just made it
        hashes = [f"{at:064x}" for at in range(items)]
        if self._way.startswith(_UPSTREAM):
            features = [_feature(self._tensor, mm_hash) for mm_hash in hashes]
            start = _now()
            extra, self._refs = await self._sender.prepare(features, "image")
        else:
            item = KwargsItem({"pixel_values": KwargsField(self._tensor, "batched", {})})
            start = _now()
            self._refs = await self._sender.offer([codec.encode(item) for _ in hashes])
            refs = dict(enumerate(self._refs))
            extra = wire.write_offer(self._way, ["image"] * items, hashes, refs)
        return {"seconds": _now() - start, "extra": extra, "tag": self._tag}

    async def withdraw(self) -> Answer:
        refs, self._refs = self._refs, []
        start = _now()
        if self._way.startswith(_UPSTREAM):
            await self._sender.cleanup(refs)
        else:
            await self._sender.withdraw(refs)
        return {"seconds": _now() - start}

    async def copy(self, size: int) -> Answer:
        """Seconds for one copy of so many bytes in warm memory."""
        # Not zeros: what was never written is one page, however large.
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        best = []
        for _ in range(5):
            start = _now()
            np.copyto(target, source)
            best.append(_now() - start)
        return {"seconds": sorted(best)[2]}

    async def aclose(self) -> None:
        if not self._way.startswith(_UPSTREAM):
            await self._sender.close()


class Receiver:
    """Receives items and decodes them, copies each out once as whoever uses it would, and lets go.

    Args:
        way: a transport's name, perhaps of upstream.
    """

    def __init__(self, way: str) -> None:
        self._way = way
        self._target = np.zeros(1, np.uint8)
        self._longest = 0.0
        if way.startswith(_UPSTREAM):
            from dynamo.common.multimodal import mm_kwargs_transfer as upstream

            self._upstream: Any = upstream
            kind = "Shm" if way == "upstream-shm" else "Nixl"
            self._receiver: Any = getattr(upstream, f"MmKwargs{kind}Receiver")()
        else:
            self._receiver = transfer.open_receiver(
                way, transfer.Limits(1 << 31, timeout_s=60), Metrics()
            )

    async def receive(self, extra: Mapping[str, Any], tag: int, watch: bool = False) -> Answer:
        """Seconds of each step; with `watch`, by how much the event loop was late meanwhile.

        Raises:
            RuntimeError: what came are not bytes of `tag`.
        """
        fetch = self._fetcher(extra)
        self._longest = 0.0
        watching = asyncio.create_task(self._watch()) if watch else None
        await asyncio.sleep(0)
        start = _now()
        tensors = await fetch()
        received = _now()
        if watching is not None:
            await asyncio.sleep(2 * _TICK_S)
            watching.cancel()
        copying = _now()
        for tensor in tensors:
            if len(self._target) < tensor.nbytes:
                self._target = np.zeros(tensor.nbytes, np.uint8)
            np.copyto(self._target[: tensor.nbytes], tensor.numpy())
        copied = _now()
        size = tensor.nbytes
        del tensor
        tensors.clear()
        freed = _now()
        if not (self._target[0] == self._target[size - 1] == tag):
            raise RuntimeError("what was received is not what was offered")
        return {
            "receive": received - start,
            "copy": copied - copying,
            "free": freed - copied,
            "stall": self._longest,
        }

    def _fetcher(self, extra: Mapping[str, Any]) -> Callable[[], Awaitable[list[Any]]]:
        if self._way.startswith(_UPSTREAM):
            if self._way == "upstream-shm":
                model, raw = self._upstream.MmKwargsShmTransferMetadata, extra["mm_kwargs_shm"]
            else:
                model, raw = self._upstream.MmKwargsTransferMetadata, extra["mm_kwargs_nixl"]
            metadata = model.model_validate(raw)

            async def fetch() -> list[Any]:
                [blobs] = (await self._receiver.receive(metadata)).values()
                decode = self._upstream.decode_mm_kwargs_item
                return [decode(blob)["pixel_values"].data for blob in blobs]

            return fetch
        refs = _refs(self._way, extra)

        async def ours() -> list[Any]:
            received = await self._receiver.receive(refs)
            return [codec.decode(one.payload).fields["pixel_values"].data for one in received]

        return ours

    async def _watch(self) -> None:
        # Asleep in between, as a worker's loop is: one that never rests would take turns with
        # whatever copies, at the kernel's pace.
        while True:
            due = _now() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._longest = max(self._longest, _now() - due)

    async def aclose(self) -> None:
        if not self._way.startswith(_UPSTREAM):
            await self._receiver.close()


def _refs(way: str, extra: Mapping[str, Any]) -> Sequence[Any]:
    """The references in what a request would carry, read as a worker reads it."""
    [hashes] = [field["mm_hashes"] for field in extra.values()]
    hashes = hashes["image"] if isinstance(hashes, Mapping) else hashes
    places = [[at, 1] for at in range(len(hashes))]
    known = {"expanded_token_ids": list(range(len(hashes))), "mm_placeholders": places}
    request = wire.parse({"extra_args": {**extra, **known}}, max_item_bytes=1 << 31)
    if request.transfer is None:
        raise RuntimeError(f"the offer cannot be read back: {request.transfer_error}")
    offers = request.transfer.offers[way]
    return [offers[at] for at in sorted(offers)]


def _feature(tensor: Any, mm_hash: str) -> Any:
    """What upstream's senders are given, as vLLM makes it."""
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    field = MultiModalFieldConfig.batched("image").field
    item = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=tensor, field=field)})
    return SimpleNamespace(data=item, mm_hash=mm_hash)


def usage() -> Answer:
    """What this process has used so far and holds now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path("/proc/self/status").read_text().split()
    return {
        "faults": used.ru_minflt,
        "cpu": used.ru_utime + used.ru_stime,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "private_kb": int(fields[fields.index("RssAnon:") + 1]),
        "shared_kb": int(fields[fields.index("RssShmem:") + 1]),
    }


async def serve(role: str, way: str) -> None:
    """Answer commands until there are no more."""
    loop = asyncio.get_running_loop()
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end = Sender(way) if role == "sender" else Receiver(way)
    async with aclosing(end):
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            name = command.pop("do")
            answer = usage() if name == "usage" else await getattr(end, name)(**command)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
    if sys.argv[2].startswith(_UPSTREAM):
        os._exit(0)  # its finalizers fail, loudly, in an interpreter that ends
