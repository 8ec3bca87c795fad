"""How a vLLM engine's KV cache is laid out, as far as a router has to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm.config import VllmConfig

from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.kv_events import MAIN_KINDS, Normalizer

#: Cache groups of layers that carry a state along, such as Mamba's and gated delta nets'.
_STATES: Final = "mamba"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of one engine's cache.

    Attributes:
        block_size: tokens of a block, as a router hashes them.
        context_tokens: longest sequence.
        state_groups: of a hybrid model, the numbers of the cache groups with states.
    """

    block_size: int
    context_tokens: int
    state_groups: frozenset[int] = frozenset()

    @classmethod
    async def of(cls, engine: Any) -> KvLayout:
        """The layout of a running `AsyncLLM`."""
        # Made for those who read KV events: the configuration knows one block size alone.
        groups = await engine.engine_core.call_utility_async("get_kv_cache_group_metadata")
        return cls.from_groups(groups, engine.vllm_config)

    @classmethod
    def from_groups(cls, groups: Sequence[Mapping[str, Any]], config: VllmConfig) -> KvLayout:
        """The layout that an engine core's ``get_kv_cache_group_metadata`` tells of."""
        sizes = [group["block_size"] for group in groups if group["kind"] in MAIN_KINDS]
        block_size = sizes[0] if sizes else config.cache_config.block_size
        return cls(
            block_size,
            config.model_config.max_model_len,
            # States at other places than the ends of blocks have hashes that no block has.
            frozenset(
                group["group_idx"]
                for group in groups
                if group["kind"] == _STATES and group["block_size"] == block_size
            ),
        )

    def all_published(self) -> KvLayout:
        """The same to one who asks what is published, whether a state lets it be reused or not."""
        return replace(self, state_groups=frozenset())

    def normalizer(self, mode: HashMode, media_token_ids: frozenset[int]) -> Normalizer:
        """A fresh one for the engine's events."""
        return Normalizer(
            mode,
            media_token_ids,
            self.block_size,
            context_tokens=self.context_tokens,
            state_groups=self.state_groups,
        )
