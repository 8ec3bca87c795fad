"""A router's picture of one worker, kept with Dynamo's own radix tree and block hashes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.llm import RadixTree, compute_block_hash_for_seq

_WORKER = 1


class RouterView:
    """Stands where Dynamo's ``KvEventPublisher`` stands.

    Like it, counts the copies of a block and removes it with the last one.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.batches: list[list[dict[str, Any]]] = []
        self.copies: Counter[int] = Counter()
        self._tree = RadixTree()
        self._event_id = 0

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.batches.append([dict(event) for event in events])
        for event in events:
            if event["type"] == "stored":
                self._store(event)
            else:
                self._remove(event["block_hashes"])

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch]

    def overlap(self, tokens: Sequence[int], **hash_options: Any) -> int:
        """Leading blocks of `tokens` that the router believes the worker to have."""
        hashes = compute_block_hash_for_seq(list(tokens), self.block_size, **hash_options)
        return max(self._tree.find_matches(hashes).scores.values(), default=0)

    def _store(self, event: Mapping[str, Any]) -> None:
        assert event["num_block_tokens"] == [self.block_size] * len(event["block_hashes"])
        hashes = compute_block_hash_for_seq(
            event["token_ids"],
            self.block_size,
            event["block_mm_infos"],
            lora_name=event["lora_name"],
            cache_namespace=event["cache_salt"],
        )
        assert len(hashes) == len(event["block_hashes"])
        parent = event["parent_hash"]
        assert parent is None or parent in self.copies, "stored after a block that is not there"
        self.copies.update(event["block_hashes"])
        blocks = [
            {"block_hash": key % 2**64, "tokens_hash": tokens}
            for key, tokens in zip(event["block_hashes"], hashes, strict=True)
        ]
        parent = None if parent is None else parent % 2**64
        self._apply({"stored": {"parent_hash": parent, "blocks": blocks}})

    def _remove(self, hashes: Sequence[int]) -> None:
        gone = []
        for key in hashes:
            assert self.copies[key] > 0, "removed more often than stored"
            self.copies[key] -= 1
            if not self.copies[key]:
                del self.copies[key]
                gone.append(key % 2**64)
        if gone:
            self._apply({"removed": {"block_hashes": gone}})

    def _apply(self, data: Mapping[str, Any]) -> None:
        self._event_id += 1
        event = {"event_id": self._event_id, "data": data, "dp_rank": 0}
        self._tree.apply_event(_WORKER, json.dumps(event).encode())
