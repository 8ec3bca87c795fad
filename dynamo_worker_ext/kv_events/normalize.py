"""From the engine's blocks to the router's.

The router hashes a prompt in which each media position holds a number that stands for the item
(`hashing.routing_tokens`). vLLM publishes the same prompt with the model's placeholder token
there and says beside each block which items overlap it and where they began. A position belongs
to the last item that began at or before it, and it is a media position if it holds one of the
model's placeholder tokens: that is what ``is_embed`` masks select (timestamps and row breaks
inside a placeholder are other tokens), so no table of models is needed.

Blocks get hashes of our own, made from what the router sees. Its indexers take for granted that
a hash and the tokens before it belong together, on every worker. vLLM's do not keep to that: two
videos whose placeholders begin with the same timestamp differ for vLLM from their first block on,
for the router from their first embedding on, and it would drop what follows on the second;
and some of vLLM's hash algorithms have another seed in each process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from dynamo_worker_ext.hashing import HashMode, is_mm_hash, pad_value, routing_hash, wide_pad_values
from dynamo_worker_ext.kv_events.frames import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EngineEvent,
)
from dynamo_worker_ext.kv_events.router import RemovedBlocks, RouterEvent, StoredBlocks
from dynamo_worker_ext.kv_events.states import States

#: Dynamo's handlers mark a client's cache salt so before they give it to vLLM; the router knows
#: it without. Source: ``dynamo.vllm.handlers`` 1.6.1.
CACHE_SALT_PREFIX: Final = "dynamo-cache-salt:"

#: The accelerator's memory. Blocks in other tiers (CPU, STORAGE, DISK, ...) are not published: a
#: pushed event has no field for the tier and would count as a hit that costs nothing.
_DEVICE: Final = (None, "GPU", "DEVICE")

#: Groups of a hybrid model whose blocks all have to be there for a prefix to be reused. Sliding
#: windows and state caches store other blocks under the same hashes.
MAIN_KINDS: Final = ("full_attention", "mla_attention", "sink_full_attention")

_TOKEN_LIMIT: Final = 2**32


class NormalizerStatistics(NamedTuple):
    """Attributes:
    blocks: distinct blocks of the engine's that are known.
    dropped: events that were not passed on, by reason.
    """

    blocks: int
    dropped: Mapping[str, int]


class _Item(NamedTuple):
    mm_hash: str | None  # None: an identifier that no router knows (a client's uuid)
    offset: int  # of its placeholder, relative to the block


class WidePads:
    """Which item each of SGLang's wide pads stands for, for the items that were given to it.

    Remembers the last `CAPACITY` items. Safe to teach on one thread and to ask on another.
    """

    CAPACITY: Final = 65_536

    def __init__(self) -> None:
        self._pads: dict[int, int] = {}
        self._items: OrderedDict[str, None] = OrderedDict()

    def learn(self, mm_hash: str) -> None:
        """From now on know the pads of `mm_hash`."""
        key = mm_hash[:16]
        if key in self._items:
            self._items.move_to_end(key)
            return
        self._items[key] = None
        self._pads.update(dict.fromkeys(wide_pad_values(key), pad_value(key)))
        if len(self._items) > self.CAPACITY:
            oldest, _ = self._items.popitem(last=False)
            for wide in wide_pad_values(oldest):
                self._pads.pop(wide, None)

    def routing(self, tokens: list[int]) -> list[int]:
        """`tokens` with the pads that a router knows in the place of those known here."""
        known = self._pads
        return [known.get(token, token) if token >= _TOKEN_LIMIT else token for token in tokens]


class Normalizer:
    """Turns one engine's events into the router's, in one `HashMode`.

    Does no I/O. Keeps the hashes that it has handed out, because Dynamo's publisher has no
    "cleared" and because a block may only follow one that the router has. Not thread-safe.

    Args:
        mode: what the worker's card says.
        media_token_ids: the model's placeholder tokens for images, video and audio.
        block_size: tokens of a block, as registered with the router.
        wide_pads: for an engine that writes pads which no router's token can hold.
        context_tokens: longest sequence of the engine; windows that long leave nothing out.
        state_groups: numbers of its cache groups whose layers carry a state along.
    """

    def __init__(
        self,
        mode: HashMode,
        media_token_ids: frozenset[int],
        block_size: int,
        wide_pads: WidePads | None = None,
        context_tokens: int | None = None,
        state_groups: Collection[int] = (),
    ) -> None:
        self._wide_pads = wide_pads
        self._states = States(state_groups) if state_groups else None
        self._context_tokens = context_tokens
        self.mode = mode
        self.media_token_ids = media_token_ids
        self.block_size = block_size
        # The engine's hashes, and ours for each. vLLM keeps duplicates of a block (two requests
        # that computed it side by side) and reports each; Dynamo's publisher counts as well and
        # removes with the last.
        self._copies: Counter[BlockHash] = Counter()
        self._ours: dict[BlockHash, int] = {}
        # Only of salted blocks: vLLM names the salt with the first block of a prompt, the
        # router wants it with every block.
        self._salts: dict[BlockHash, str] = {}
        self._group_kinds: dict[int, str] = {}
        self._dropped: Counter[str] = Counter()

    def statistics(self) -> NormalizerStatistics:
        """What is held and what was dropped."""
        return NormalizerStatistics(len(self._copies), dict(self._dropped))

    def normalize(self, event: EngineEvent) -> list[RouterEvent]:
        """What the router is to be told; empty where it is none of its business."""
        if isinstance(event, AllBlocksCleared):
            return self.forget()
        reason = self._not_ours(event)
        if reason is None:
            if isinstance(event, BlockRemoved):
                return self._removed(event)
            stored = self._stored(event)
            if isinstance(stored, StoredBlocks):
                if self._states is None:
                    return [stored]
                return self._states.stored(event.block_hashes, event.parent_block_hash, stored)
            reason = stored
        elif reason == "other_group" and self._states and event.group_idx in self._states.groups:
            if isinstance(event, BlockStored):
                return self._states.state_stored(event)
            gone = self._states.state_removed(event)
            return [RemovedBlocks(gone)] if gone else []
        self._dropped[reason] += 1
        return []

    def forget(self) -> list[RouterEvent]:
        """Take back everything: the cache was cleared, or events were lost.

        After a loss some of it may still be cached. Claiming too little costs hits until the
        engine stores those blocks anew; claiming blocks that are gone sends requests to the
        wrong worker for as long as nobody notices. What follows on a block taken back is
        dropped as ``orphan``, because no router could place it.
        """
        # Children first, so that no router has to prune a branch.
        copies, ours = self._copies, self._ours
        if self._states is not None:
            hashes = self._states.forget()
        else:
            hashes = [ours[key] for key in reversed(copies) for _ in range(copies[key])]
        copies.clear()
        ours.clear()
        self._salts.clear()
        return [RemovedBlocks(hashes)] if hashes else []

    def _not_ours(self, event: BlockStored | BlockRemoved) -> str | None:
        if event.medium not in _DEVICE:
            return "other_medium"
        if event.locality not in (None, "LOCAL"):
            return "remote"
        kind = None
        if isinstance(event, BlockStored):
            kind = event.kv_cache_spec_kind
            window, context = event.kv_cache_spec_sliding_window, self._context_tokens
            if kind == "sliding_window" and window and context and window >= context:
                kind = MAIN_KINDS[0]
            if kind is not None and event.group_idx is not None:
                self._group_kinds[event.group_idx] = kind
        if kind is None and event.group_idx is not None:
            # Removals carry the group alone. Without a word about group 0 it is the only one.
            kind = self._group_kinds.get(event.group_idx, None if event.group_idx == 0 else "?")
        return None if kind is None or kind in MAIN_KINDS else "other_group"

    def _removed(self, event: BlockRemoved) -> list[RouterEvent]:
        hashes = []
        for key in event.block_hashes:
            copies = self._copies.get(key, 0)
            if not copies:
                self._dropped["unknown_block"] += 1
                continue
            if self._states is None:
                hashes.append(self._ours[key])
            if copies > 1:
                self._copies[key] = copies - 1
                continue
            if self._states is not None:
                hashes += self._states.removed(key)
            del self._copies[key], self._ours[key]
            self._salts.pop(key, None)
        return [RemovedBlocks(hashes)] if hashes else []

    def _stored(self, event: BlockStored) -> StoredBlocks | str:
        hashes, parent = event.block_hashes, event.parent_block_hash
        if event.block_size != self.block_size:
            return "block_size"  # vLLM also reports the partial blocks of hybrid models
        if not hashes:
            return "empty"
        if len(event.token_ids) != len(hashes) * self.block_size:
            return "tokens"
        if event.extra_keys is not None and len(event.extra_keys) != len(hashes):
            return "extra_keys"
        tokens = list(event.token_ids)
        if self._wide_pads is not None:
            tokens = self._wide_pads.routing(tokens)
        if not 0 <= min(tokens) <= max(tokens) < _TOKEN_LIMIT:
            return "token_range"
        if len({*hashes, parent}) != len(hashes) + 1:
            return "loop"
        if parent is not None and parent not in self._copies:
            return "orphan"

        lora_name = event.lora_name if isinstance(event.lora_name, str) else None
        salt = _salt(event, lora_name) if parent is None else self._salts.get(parent)
        infos: list[dict[str, Any] | None] = [None] * len(hashes)
        for block, keys in enumerate(event.extra_keys or ()):
            if not keys:
                continue
            if any(isinstance(key, bytes) for key in keys):
                return "prompt_embeds"  # tokens say nothing about such a prompt
            items = _items(keys)
            if self.mode is HashMode.PAD_VALUE:
                self._write_pads(tokens, block * self.block_size, items)
            else:
                infos[block] = _mm_info(items, self.block_size)

        parent_hash = None if parent is None else self._ours[parent]
        ours = self._hash(tokens, infos, parent_hash, f"{lora_name or ''}\0{salt or ''}")
        self._copies.update(hashes)
        self._ours.update(zip(hashes, ours, strict=True))
        if salt is not None:
            self._salts.update(dict.fromkeys(hashes, salt))
        return StoredBlocks(
            block_hashes=ours,
            parent_hash=parent_hash,
            token_ids=tokens,
            block_size=self.block_size,
            block_mm_infos=infos if any(infos) else None,
            lora_name=lora_name or None,
            cache_salt=salt,
        )

    def _hash(
        self,
        tokens: list[int],
        infos: list[dict[str, Any] | None],
        parent: int | None,
        namespace: str,
    ) -> list[int]:
        """Our hash of each block, over everything that the router sees up to its end."""
        words = memoryview(array("Q", tokens)).cast("B")
        step = 8 * self.block_size
        hashes = []
        for block, info in enumerate(infos):
            state = hashlib.blake2b(f"{parent}\0{namespace}\0".encode(), digest_size=8)
            state.update(words[block * step : (block + 1) * step])
            for item in info["mm_objects"] if info else ():
                state.update(item["mm_hash"].to_bytes(8, "little"))
            parent = int.from_bytes(state.digest(), "little", signed=True)
            hashes.append(parent)
        return hashes

    def _write_pads(self, tokens: list[int], start: int, items: list[_Item]) -> None:
        """Replace, in place, the media positions of the block that begins at `start`."""
        for item, first, last in _spans(items, self.block_size):
            if item.mm_hash is None:
                continue
            pad = pad_value(item.mm_hash)
            for i in range(start + first, start + last):
                if tokens[i] in self.media_token_ids:
                    tokens[i] = pad


def _items(keys: list[Any]) -> list[_Item]:
    """The media items of one block, by where they begin."""
    items = []
    for key in keys:
        match key:
            case [str(identifier), int(offset)]:
                # With adapters in the vision tower vLLM writes "ADAPTER:HASH".
                tail = identifier.rpartition(":")[2]
                items.append(_Item(tail if is_mm_hash(tail) else None, offset))
            case _:
                pass
    return sorted(items, key=lambda item: item.offset)


def _spans(items: list[_Item], block_size: int) -> Iterator[tuple[_Item, int, int]]:
    """Each item with the first and one past the last position that can be its own."""
    for index, item in enumerate(items, start=1):
        end = items[index].offset if index < len(items) else block_size
        yield item, max(item.offset, 0), end


def _mm_info(items: list[_Item], block_size: int) -> dict[str, Any] | None:
    objects = [
        {"mm_hash": routing_hash(item.mm_hash), "offsets": [[first, last]]}
        for item, first, last in _spans(items, block_size)
        if item.mm_hash is not None
    ]
    return {"mm_objects": objects} if objects else None


def _salt(event: BlockStored, lora_name: str | None) -> str | None:
    """The cache salt of a prompt, from the event that begins with its first block."""
    if event.cache_salt:
        return event.cache_salt
    if isinstance(event.lora_name, dict):
        named = event.lora_name.get("cache_salt")
        return named if isinstance(named, str) and named else None
    names = [key for key in (event.extra_keys or [None])[0] or () if isinstance(key, str)]
    if lora_name in names:
        names.remove(lora_name)  # vLLM puts the adapter first; a salt may have the same name
    return names[0].removeprefix(CACHE_SALT_PREFIX) if names else None
