"""Our shm receiver and codec beside upstream's, on segments that upstream's sender made.

    python tests/bench/bench_shm_receive.py [--rounds 60]

Each segment is new and received once, as in a request. Pairs are interleaved, and take turns at
going first, so that what else the machine does hits both alike. ``reused``: each item is dropped
before the next, as when an engine has taken it over. ``held``: the last 8 are kept, so that memory
is not at once free again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import torch
from dynamo.common.multimodal import mm_kwargs_transfer as upstream
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import Limits, codec
from dynamo_worker_ext.transfer.shm import ShmReceiver
from dynamo_worker_ext.wire import ShmRef

MEGABYTES = (1.2, 4.0, 8.0, 25.0, 50.0)


def item(megabytes: float, dtype: torch.dtype) -> MultiModalKwargsItem:
    """One image as Qwen-VL's processors make it."""
    rows = int(megabytes * 1e6) // (1176 * dtype.itemsize)
    data = {
        "pixel_values": torch.ones(rows, 1176, dtype=dtype),
        "image_grid_thw": torch.tensor([[1, 1, rows]]),
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat("image", [slice(0, rows)]),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return MultiModalKwargsItem({k: fields[k].build_elems(k, data[k])[0] for k in data})


class Feature:
    """What upstream's sender reads of a ``MultiModalFeatureSpec``."""

    def __init__(self, data: Any) -> None:
        self.data, self.mm_hash = data, "0" * 64


async def compare(megabytes: float, dtype: torch.dtype, rounds: int, keep: int) -> list[float]:
    """Median seconds of upstream and of ours."""
    made, sender = [Feature(item(megabytes, dtype))], upstream.MmKwargsShmSender()
    theirs = upstream.MmKwargsShmReceiver()

    async with ShmReceiver(Limits(1 << 30), Metrics()) as ours:

        async def run_theirs(metadata: Any) -> Any:
            result = await theirs.receive(metadata)
            return upstream.decode_mm_kwargs_item(result["__pickled_kwargs_item__"][0])

        async def run_ours(metadata: Any) -> Any:
            [segment] = metadata.items
            [received] = await ours.receive([ShmRef(segment.name, segment.size)])
            return codec.decode(received.payload)

        sides: list[Callable[[Any], Awaitable[Any]]] = [run_theirs, run_ours]
        seconds: list[list[float]] = [[], []]
        held: list[deque[Any]] = [deque(maxlen=keep), deque(maxlen=keep)]
        for turn in range(rounds + 3):
            for side in (0, 1) if turn % 2 else (1, 0):
                extra, handles = await sender.prepare(made)
                metadata = upstream.MmKwargsShmTransferMetadata.model_validate(
                    extra["mm_kwargs_shm"]
                )
                start = time.perf_counter()
                result = await sides[side](metadata)
                held[side].append(result)
                del result  # what dropping costs belongs to it
                if turn >= 3:
                    seconds[side].append(time.perf_counter() - start)
                await sender.cleanup(handles)
    return [median(side) for side in seconds]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    print(f"{'MB':>5} {'dtype':>9} {'memory':>7} {'upstream ms':>12} {'ours ms':>8} {'ratio':>6}")
    for megabytes in MEGABYTES:
        for dtype in (torch.uint8, torch.bfloat16):
            for name, keep in (("reused", 0), ("held", 8)):
                theirs, ours = await compare(megabytes, dtype, rounds, keep)
                print(
                    f"{megabytes:5} {str(dtype)[6:]:>9} {name:>7} {theirs * 1e3:12.2f} "
                    f"{ours * 1e3:8.2f} {theirs / ours:6.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main())
