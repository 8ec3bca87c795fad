"""What a router is told, in the terms of Dynamo's ``KvEventPublisher``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks that a router may count on.

    Attributes:
        block_hashes: signed 64-bit; equal where all that the router sees up to there is equal.
        parent_hash: of the block before the first; None at the start of a prompt.
        token_ids: of all blocks, as the router hashes them.
        block_size: tokens of each block.
        block_mm_infos: of each block the items in it; only in `HashMode.BLOCK_MM_INFOS`.
        lora_name, cache_salt: part of every block's hash on the router's side.
    """

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_size: int
    block_mm_infos: list[dict[str, Any] | None] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None

    def to_input(self) -> dict[str, Any]:
        """Dynamo's ``KvStoredEventInput``."""
        return {
            "type": "stored",
            "token_ids": self.token_ids,
            "num_block_tokens": [self.block_size] * len(self.block_hashes),
            "block_hashes": self.block_hashes,
            "parent_hash": self.parent_hash,
            "block_mm_infos": self.block_mm_infos,
            "lora_name": self.lora_name,
            "cache_salt": self.cache_salt,
        }


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that are gone: a hash stands here as often as it was stored."""

    block_hashes: list[int]

    def to_input(self) -> dict[str, Any]:
        """Dynamo's ``KvRemovedEventInput``."""
        return {"type": "removed", "block_hashes": self.block_hashes}


RouterEvent = StoredBlocks | RemovedBlocks
