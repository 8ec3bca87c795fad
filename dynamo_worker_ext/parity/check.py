"""Compares what a frontend hashes with what a worker published, block by block."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo.llm import compute_block_hash_for_seq

from dynamo_worker_ext.hashing import HashMode, block_mm_infos, routing_tokens
from dynamo_worker_ext.parity.engine import Served
from dynamo_worker_ext.wire import Placeholder


@dataclass(frozen=True, slots=True)
class Blocks:
    """The full blocks of one prompt, as a router has them.

    Attributes:
        tokens: of each block.
        hashes: of each block by itself, by Dynamo's own bindings.
    """

    tokens: list[list[int]]
    hashes: list[int]

    @classmethod
    def of(
        cls, token_ids: Sequence[int], block_size: int, infos: list[Any] | None = None
    ) -> Blocks:
        """Cut a prompt into its full blocks."""
        count = len(token_ids) // block_size
        cut = list(token_ids[: count * block_size])
        hashes = compute_block_hash_for_seq(cut, block_size, infos[:count] if infos else None)
        return cls([cut[i : i + block_size] for i in range(0, len(cut), block_size)], list(hashes))


def request_side(served: Served, mode: HashMode, block_size: int) -> Blocks:
    """What a frontend hashes that knows the expanded prompt and its items."""
    if mode is HashMode.PAD_VALUE:
        return Blocks.of(routing_tokens(served.token_ids, served.media), block_size)
    infos = block_mm_infos(len(served.token_ids), served.media, block_size)
    return Blocks.of(served.token_ids, block_size, infos)


def placed(
    token_ids: Sequence[int], image_id: int, counts: Sequence[int]
) -> list[Placeholder] | None:
    """Where the images of an expanded prompt are, found by their token alone.

    Returns:
        One place an image; None where the prompt does not hold them one after the other.
    """
    at = [i for i, token in enumerate(token_ids) if token == image_id]
    places, begin = [], 0
    for count in counts:
        own = at[begin : begin + count]
        if not count or len(own) != count or own[-1] - own[0] != count - 1:
            return None
        places.append(Placeholder(own[0], count))
        begin += count
    return places if begin == len(at) else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt's blocks first differ.

    Attributes:
        block: counted from 0.
        token: position in the expanded prompt; None where all tokens are equal or there are none.
        frontend: the frontend's token there.
        worker: the worker's; None where it published no such block at all.
    """

    block: int
    token: int | None = None
    frontend: int | None = None
    worker: int | None = None

    def describe(self, blocks: int) -> str:
        where = f"block {self.block} of {blocks} (counted from 0)"
        if self.token is None:
            if self.worker is None and self.frontend is None:
                return f"{where}: the worker published nothing for it"
            return f"{where}: equal tokens, but different items beside them"
        return (
            f"{where}, token {self.token}: a frontend has {self.frontend}, "
            f"the worker published {self.worker}"
        )


class _Block(NamedTuple):
    own: int  # hash of it and all before it
    tokens: list[int]
    number: int  # in the order in which they were published


@dataclass
class Published:
    """All that a worker has published, as a tree. Takes the place of Dynamo's publisher.

    Lives in the command's process; the pump's thread writes, the event loop reads.

    Attributes:
        blocks: how many blocks were stored, ever.
    """

    block_size: int
    blocks: int = 0
    _children: dict[int | None, dict[int, _Block]] = field(default_factory=dict)
    _removed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish_batch(self, events: Sequence[Mapping[str, Any]], /) -> None:
        """`kv_events.EventPublisher`."""
        with self._lock:
            for event in events:
                if event["type"] == "stored":
                    self._store(event)
                else:
                    self._removed = True

    @property
    def has_removals(self) -> bool:
        """Whether the worker took something back: the cache was too small for the check."""
        return self._removed

    def _store(self, event: Mapping[str, Any]) -> None:
        blocks = Blocks.of(event["token_ids"], self.block_size, event["block_mm_infos"])
        parent = event["parent_hash"]
        for own, local, tokens in zip(
            event["block_hashes"], blocks.hashes, blocks.tokens, strict=True
        ):
            self._children.setdefault(parent, {})[local] = _Block(own, tokens, self.blocks)
            self.blocks += 1
            parent = own

    def first_difference(
        self, wanted: Blocks, *, cached: int = 0, alike: int = 0, since: int = 0
    ) -> Difference | None:
        """Where a prompt's blocks part from what was published; None where they do not.

        Args:
            wanted: the blocks.
            cached: how many of them the engine had.
            alike: `blocks` before the first prompt that shares those was computed.
            since: `blocks` before this prompt was computed. What was published earlier cannot be
                what stands for a block that is new.
        """
        with self._lock:
            parent: int | None = None
            for block, (local, tokens) in enumerate(zip(wanted.hashes, wanted.tokens, strict=True)):
                children = self._children.get(parent, {})
                if local in children:
                    parent = children[local].own
                    continue
                first = alike if block < cached else since
                there = [child.tokens for child in children.values() if child.number >= first]
                if not there:
                    return Difference(block)
                same, nearest = max((_equal(tokens, theirs), theirs) for theirs in there)
                if same == len(tokens):
                    return Difference(block, frontend=tokens[-1], worker=nearest[-1])
                return Difference(
                    block, block * self.block_size + same, tokens[same], nearest[same]
                )
        return None


def _equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))
