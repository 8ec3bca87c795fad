"""Which blocks of a hybrid model a router may count on.

Layers that carry a state along (Mamba, gated delta nets) can only go on behind a block at whose end
the engine kept theirs: that is where the whole blocks of a prompt end, and few other places. A
prefix is reused up to the last such block, and what full attention has behind it is computed again
(vLLM 0.31.0). So a block is the router's business only if it has a state or leads to one that has.

One thing no router can be told, as it knows prefixes without gaps: a prompt that parts from a known
one between two states is expected to reuse what they share, and reuses what lies before the first
of the two.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamo_worker_ext.kv_events.frames import BlockHash, BlockRemoved, BlockStored
from dynamo_worker_ext.kv_events.router import RouterEvent, StoredBlocks


@dataclass(slots=True)
class _Block:
    """One block of full attention.

    Attributes:
        parent: the engine's hash of the block before it.
        told: what the router is told of it, but for its tokens.
        tokens: in an eighth of the memory that a list takes.
        leads: whether it has a state or leads to one; the router then has it.
    """

    parent: BlockHash | None
    told: StoredBlocks
    tokens: array[int]
    leads: bool = False


class States:
    """The blocks of one engine, and the states that it keeps. Does no I/O. Not thread-safe.

    Args:
        groups: numbers of the engine's cache groups with states. A prefix needs one of each.
    """

    def __init__(self, groups: Collection[int]) -> None:
        self.groups = groups
        self._blocks: dict[BlockHash, _Block] = {}
        # Copies of a state, as of a block.
        self._kept: Counter[tuple[int, BlockHash]] = Counter()
        # How many blocks right behind a block lead to a state, whether it is there itself or not.
        self._leading: Counter[BlockHash] = Counter()

    def stored(
        self, keys: Sequence[BlockHash], parent: BlockHash | None, told: StoredBlocks
    ) -> list[RouterEvent]:
        """Full attention stored blocks; what the router is to be told now.

        Args:
            keys: the engine's hash of each.
            parent: the same of the block before the first.
            told: what a router would be told if there were no states.
        """
        events: list[RouterEvent] = []
        size, parent_hash = told.block_size, told.parent_hash
        for i, key in enumerate(keys):
            if key not in self._blocks:
                one = replace(
                    told,
                    block_hashes=[told.block_hashes[i]],
                    parent_hash=parent_hash,
                    token_ids=[],
                    block_mm_infos=told.block_mm_infos and [told.block_mm_infos[i]],
                )
                tokens = array("I", told.token_ids[i * size : (i + 1) * size])
                self._blocks[key] = _Block(parent, one, tokens)
            events += self._begin(key)
            parent, parent_hash = key, told.block_hashes[i]
        return events

    def removed(self, key: BlockHash) -> list[int]:
        """The last copy of a block is gone; what the router is to forget, later blocks first."""
        block = self._blocks.pop(key)
        return self._end(block) if block.leads else []

    def state_stored(self, event: BlockStored) -> list[RouterEvent]:
        """States were stored by one of `groups`; what the router is to be told now."""
        events: list[RouterEvent] = []
        for key in event.block_hashes:
            self._kept[event.group_idx or 0, key] += 1
            events += self._begin(key)
        return events

    def state_removed(self, event: BlockRemoved) -> list[int]:
        """States of one of `groups` are gone; what the router is to forget, later blocks first."""
        gone = []
        for key in event.block_hashes:
            _take(self._kept, (event.group_idx or 0, key))
            block = self._blocks.get(key)
            if block is not None and block.leads and not self._goes_on(key):
                gone += self._end(block)
        return gone

    def forget(self) -> list[int]:
        """Everything is gone; what the router is to forget, later blocks first."""
        gone = [b.told.block_hashes[0] for b in reversed(self._blocks.values()) if b.leads]
        self._blocks.clear()
        self._kept.clear()
        self._leading.clear()
        return gone

    def _goes_on(self, key: BlockHash) -> bool:
        """Whether there are states at a block's end, or behind it."""
        return self._leading[key] > 0 or all(self._kept[group, key] > 0 for group in self.groups)

    def _begin(self, key: BlockHash) -> list[RouterEvent]:
        """Tell of a block if it leads to a state, and of those before it that were not told of."""
        if not self._goes_on(key):
            return []
        chain: list[_Block] = []
        at: BlockHash | None = key
        while at is not None:
            if (block := self._blocks.get(at)) is None:
                return []  # without what was before it nobody can use it
            if block.leads:
                break
            chain.append(block)
            at = block.parent
        for block in chain:
            block.leads = True
            if block.parent is not None:
                self._leading[block.parent] += 1
        return [_join(chain[::-1])] if chain else []

    def _end(self, block: _Block) -> list[int]:
        """Take back a block that was told of, and those before it that led to nothing else."""
        gone = []
        while True:
            block.leads = False
            gone += block.told.block_hashes
            if block.parent is None:
                return gone
            _take(self._leading, block.parent)
            before = self._blocks.get(block.parent)
            if before is None or not before.leads or self._goes_on(block.parent):
                return gone
            block = before


def _join(chain: Sequence[_Block]) -> StoredBlocks:
    """What the router is told of blocks that follow on each other."""
    infos: list[dict[str, Any] | None] = [
        info for block in chain for info in block.told.block_mm_infos or [None]
    ]
    return replace(
        chain[0].told,
        block_hashes=[block.told.block_hashes[0] for block in chain],
        token_ids=[token for block in chain for token in block.tokens],
        block_mm_infos=infos if any(infos) else None,
    )


def _take(counter: Counter[Any], key: object) -> None:
    """One less, but not below none."""
    if counter[key] > 1:
        counter[key] -= 1
    else:
        counter.pop(key, None)
