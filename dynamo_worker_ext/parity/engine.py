"""What is asked of an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.kv_events import Normalizer
from dynamo_worker_ext.wire import Placeholder


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt, as the engine computed it.

    Attributes:
        token_ids: the expanded prompt.
        media: (mm_hash, placeholder) of each item, in order.
        cached_tokens: of the prompt, that the engine had and published before.
    """

    token_ids: list[int]
    media: list[tuple[str, Placeholder]]
    cached_tokens: int = 0


class ParityEngine(Protocol):
    """A running engine. Lives in the process of the command.

    Attributes:
        version: of the engine, for the report.
        block_size: tokens of a block.
        num_blocks: of its KV cache.
        events: endpoint of its KV events, as a subscriber connects to it.
        replay: the same for replays; None without.
    """

    version: str
    block_size: int
    num_blocks: int
    events: str
    replay: str | None

    def normalizer(self, mode: HashMode) -> Normalizer:
        """What the worker has between its engine and the router."""

    def image_text(self, number: int) -> str:
        """What a prompt has for image `number`, counted from 1."""

    async def serve(
        self, token_ids: Sequence[int], images: Sequence[Any], mm_hashes: Sequence[str]
    ) -> Served:
        """Compute one prompt and one token more.

        Args:
            token_ids: not expanded, as a frontend encodes it.
            images: PIL images.
            mm_hashes: what to call them, 64 hex characters each.
        """

    def encode(self, text: str) -> list[int]:
        """The engine's own tokenizer, nothing added."""

    async def close(self) -> None:
        """Stop the engine; nothing of it is left. Idempotent."""


async def start_engine(name: str, model: str, args: Sequence[str]) -> ParityEngine:
    """Start an engine.

    Args:
        name: ``vllm`` or ``sglang``.
        model: the model's folder.
        args: more of the engine's command line.

    Raises:
        StartupError: it does not start.
        ImportError: there is no such engine here.
    """
    if name == "vllm":
        # Its log is not to stand among the report. Read when vLLM is imported.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        from dynamo_worker_ext.vllm.parity import VllmParityEngine

        return await VllmParityEngine.start(model, args)
    from dynamo_worker_ext.sglang.parity import SglangParityEngine

    return await SglangParityEngine.start(model, args)
