"""An engine's prefix cache and its KV events as vLLM 0.31 sends them, without the engine.

What vLLM really sends is in unit/data/kv_events and in vllm/test_kv_events_real.py.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_worker_ext.hashing import HashMode, routing_tokens
from dynamo_worker_ext.kv_events import BlockRemoved, BlockStored, Normalizer
from dynamo_worker_ext.wire import Placeholder
from tests.router_view import RouterView

IMAGE = 510
VIDEO = 511
MEDIA = frozenset((IMAGE, VIDEO))
A, B, C = (hashlib.sha256(name).hexdigest() for name in (b"a", b"b", b"c"))


@dataclass
class Prompt:
    """An expanded prompt, put together from text and media."""

    tokens: list[int] = field(default_factory=list)
    media: list[tuple[str, Placeholder]] = field(default_factory=list)

    def text(self, count: int, start: int = 0) -> Prompt:
        self.tokens += [(start + i) % 500 for i in range(count)]
        return self

    def image(self, mm_hash: str, length: int) -> Prompt:
        self.media.append((mm_hash, Placeholder(len(self.tokens), length)))
        self.tokens += [IMAGE] * length
        return self

    def masked(self, mm_hash: str, mask: Sequence[bool], other: int = 7) -> Prompt:
        """A placeholder in which other tokens stand between the embedded ones."""
        self.media.append((mm_hash, Placeholder(len(self.tokens), len(mask), tuple(mask))))
        self.tokens += [VIDEO if embed else other for embed in mask]
        return self

    def routing(self) -> list[int]:
        return routing_tokens(self.tokens, self.media)


def stored_events(
    prompt: Prompt,
    block_size: int,
    *,
    steps: Sequence[int] = (),
    salt: str | None = None,
    lora: str | None = None,
    **fields: Any,
) -> Iterator[BlockStored]:
    """What vLLM 0.31 publishes for a prompt that is computed up to each of `steps` blocks."""
    hashes: list[int] = []
    keys: list[list[Any] | None] = []
    for start in range(0, len(prompt.tokens) - block_size + 1, block_size):
        own: list[Any] = [lora] if lora else []
        own += [
            [mm_hash, where.offset - start]
            for mm_hash, where in prompt.media
            if where.offset < start + block_size and where.end > start
        ]
        own += [salt] if salt and start == 0 else []
        keys.append(own or None)
        seen = repr((hashes[-1:], prompt.tokens[start : start + block_size], own, lora))
        hashes.append(int.from_bytes(hashlib.sha256(seen.encode()).digest()[:8], "big"))
    first = 0
    for last in (*(s for s in steps if s < len(hashes)), len(hashes)):
        if last > first:
            yield BlockStored(
                block_hashes=list(hashes[first:last]),
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=prompt.tokens[first * block_size : last * block_size],
                block_size=block_size,
                lora_name=lora,
                medium="GPU",
                extra_keys=keys[first:last],
                **{"group_idx": 0, "kv_cache_spec_kind": "full_attention", **fields},
            )
            first = last


class Router:
    """A normaliser with a router behind it."""

    def __init__(self, block_size: int = 16, mode: HashMode = HashMode.PAD_VALUE) -> None:
        self.normalizer = Normalizer(mode, MEDIA, block_size)
        self.view = RouterView(block_size)
        self.block_size = block_size

    def take(self, *events: Any) -> None:
        for event in events:
            out = self.normalizer.normalize(event)
            self.view.publish_batch([event.to_input() for event in out])

    def store(self, prompt: Prompt, **how: Any) -> list[BlockStored]:
        events = list(stored_events(prompt, self.block_size, **how))
        self.take(*events)
        return events

    def overlap(self, prompt: Prompt, **options: Any) -> int:
        return self.view.overlap(prompt.routing(), **options)

    def dropped(self) -> dict[str, int]:
        return dict(self.normalizer.statistics().dropped)


PROMPTS = {
    "no image": Prompt().text(100),
    "one image": Prompt().text(20).image(A, 36).text(50),
    "an image at the start": Prompt().image(A, 40).text(50),
    "an image that ends with a block": Prompt().text(12).image(A, 20).text(40),
    "an image that begins with a block": Prompt().text(32).image(A, 20).text(40),
    "an image over many blocks": Prompt().text(5).image(A, 144).text(20),
    "three images": Prompt().text(3).image(A, 20).text(4).image(B, 30).text(9).image(C, 9).text(30),
    "three images in one block": Prompt().image(A, 3).text(1).image(B, 3).image(C, 3).text(60),
    "adjacent images": Prompt().text(7).image(A, 30).image(B, 30).image(C, 30).text(20),
    "the same image twice": Prompt().text(7).image(A, 30).text(3).image(A, 30).text(20),
    "a video with timestamps": Prompt().text(9).masked(A, ([False] * 3 + [True] * 8) * 4).text(30),
    "a placeholder that begins with other tokens": Prompt()
    .image(A, 5)
    .masked(B, [False] * 20 + [True] * 20)
    .text(40),
    "a short hash": Prompt().text(20).image(A[:16], 36).text(50),
}  # fmt: skip


class Engine:
    """The prefix cache of an engine: what it holds, and the events that say so."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.copies: Counter[int] = Counter()
        self.parents: dict[int, int | None] = {}

    def run(self, prompt: Prompt, steps: Sequence[int], *, beside: bool) -> Iterator[BlockStored]:
        """Compute a prompt; `beside` another that computes the same, so nothing is reused."""
        for event in stored_events(prompt, self.block_size, steps=steps):
            hashes = [key for key in event.block_hashes if isinstance(key, int)]
            parent = event.parent_block_hash
            assert not isinstance(parent, bytes)
            known = 0 if beside else sum(1 for key in hashes if key in self.copies)
            self.parents.update(zip(hashes, [parent, *hashes], strict=False))
            self.copies.update(hashes[known:])
            if hashes[known:]:
                yield msgspec.structs.replace(
                    event,
                    block_hashes=hashes[known:],
                    parent_block_hash=self.parents[hashes[known]],
                    token_ids=event.token_ids[known * self.block_size :],
                    extra_keys=(event.extra_keys or [])[known:],
                )

    def evict(self, index: int) -> BlockRemoved | None:
        """Drop one copy of a block on which nothing follows."""
        inner = {self.parents[key] for key in self.copies}
        leaves = [key for key in self.copies if key not in inner]
        if not leaves:
            return None
        key = leaves[index % len(leaves)]
        self.copies[key] -= 1
        if not self.copies[key]:
            del self.copies[key]
        return BlockRemoved([key], medium="GPU", group_idx=0)


def chain(prompt: Prompt, block_size: int) -> list[int]:
    events = stored_events(prompt, block_size)
    return [key for event in events for key in event.block_hashes if isinstance(key, int)]


def leading(flags: Sequence[bool]) -> int:
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
