"""What a vLLM engine says of its cache groups, as a router has to know it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_worker_ext.vllm.kv_layout import KvLayout


def group(index: int, kind: str, block_size: int) -> dict[str, Any]:
    return {"group_idx": index, "kind": kind, "block_size": block_size, "sliding_window": None}


FULL = group(2, "full_attention", 528)


@pytest.mark.parametrize(
    ("groups", "block_size", "states"),
    [
        ([], 16, ()),
        ([FULL], 528, ()),
        ([group(0, "sliding_window", 64), FULL], 528, ()),
        ([group(0, "mamba", 528), group(1, "mamba", 528), FULL], 528, (0, 1)),
        ([group(0, "mamba", 1056), FULL], 528, ()),  # states that no block's hash is for
        ([group(0, "mamba", 528), group(1, "mla_attention", 528)], 528, (0,)),
    ],
)
async def test_what_a_router_has_to_know(
    groups: list[dict[str, Any]], block_size: int, states: tuple[int, ...]
) -> None:
    async def call(name: str) -> list[dict[str, Any]]:
        assert name == "get_kv_cache_group_metadata"
        return groups

    engine = SimpleNamespace(
        engine_core=SimpleNamespace(call_utility_async=call),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16),
            model_config=SimpleNamespace(max_model_len=4096),
        ),
    )
    layout = await KvLayout.of(engine)
    assert layout == KvLayout(block_size, 4096, frozenset(states))
