"""The engines that a test's stack can run, each in its own environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Tokens of a block, unless a test says otherwise.
BLOCK = 32


@dataclass(frozen=True, eq=False)
class Engine:
    """How a worker of ours is started.

    Attributes:
        name: of the framework.
        python: of the environment that has it.
        args: engine arguments of the tiny models, for a block size.
        env: what it needs on a machine without a GPU.
        model_flag: what it calls the model.
        module: our worker.
    """

    name: str
    python: str
    args: Callable[[int], Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    model_flag: str = "--model"

    @property
    def module(self) -> str:
        return f"dynamo_worker_ext.{self.name}"


def _vllm_args(block: int) -> Sequence[str]:
    return (
        "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "8192",
        "--max-num-batched-tokens", "8192", "--max-num-seqs", "16", "--block-size", str(block),
        "--limit-mm-per-prompt", '{"image":3,"video":1}', "--skip-mm-profiling", "--seed", "0",
    )  # fmt: skip


def _sglang_args(block: int) -> Sequence[str]:
    return (
        "--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native",
        "--mm-attention-backend", "sdpa", "--disable-cuda-graph", "--disable-overlap-schedule",
        "--skip-server-warmup", "--grammar-backend", "none", "--context-length", "8192",
        "--max-total-tokens", "65536", "--max-running-requests", "16", "--page-size", str(block),
        "--limit-mm-data-per-request", '{"image":3,"video":1}', "--random-seed", "0",
        # Two cores: a scheduler that spins keeps everyone else from running.
        "--sleep-on-idle",
    )  # fmt: skip


#: Arguments of SGLang workers that share requests, on a machine without a GPU.
SGLANG_ROLES: Mapping[str, Sequence[str]] = {
    "prefill": ("--disaggregation-transfer-backend", "nixl"),
    "decode": (
        "--disaggregation-transfer-backend", "nixl",
        # SGLang 0.5.21 finds no kind of backup for a KV cache in main memory.
        "--disaggregation-decode-retraction-backup", "cpu_tensor",
    ),
}  # fmt: skip

VLLM = Engine(
    "vllm",
    sys.executable,
    _vllm_args,
    {
        # The model runs in the engine core's process, as on one GPU. What vLLM does by itself on a
        # CPU is a process more, which takes ten seconds to import all again and then spins. The
        # launch scripts' test of both engines side by side starts it that way.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        # Else the first request for logprobs waits half a minute for a compiler.
        "TORCHDYNAMO_DISABLE": "1",
    },
)

SGLANG = Engine(
    "sglang",
    os.environ.get("DWE_SGLANG_PYTHON", str(ROOT / ".venv/sglang/bin/python")),
    _sglang_args,
    {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        # Where it is not installed, `tests.counted_worker` takes it from here.
        "PYTHONPATH": str(ROOT / "launch/cpu/nixl_dram"),
    },
    model_flag="--model-path",
)

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG)}
