"""Prompts before and after expansion, and vLLM's words for where media stands in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.processing.processor import (
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from dynamo_worker_ext.wire import Placeholder, Transfer


def prompt_updates(
    token_ids: Sequence[int], transfer: Transfer
) -> list[ResolvedPromptUpdate] | None:
    """Rebuild what vLLM's processor would store with each item.

    Of each item the expanded prompt shows what its placeholder became; what it was before follows
    from lining the two prompts up.

    Args:
        token_ids: the prompt before expansion.
        transfer: the items and the expanded prompt.

    Returns:
        Aligned with the items; None where the prompts do not line up, or a placeholder was
        nothing before (an insertion).
    """
    before, after = list(token_ids), transfer.expanded_token_ids
    ordered = sorted(transfer.items, key=lambda item: item.placeholder.offset)
    kept = len(after) - sum(item.placeholder.length for item in ordered)
    width, rest = divmod(len(before) - kept, len(ordered))
    if width < 1 or rest:
        return None
    targets: dict[int, list[int]] = {}
    at_before = at_after = 0
    for item in ordered:
        where = item.placeholder
        text = after[at_after : where.offset]
        if before[at_before : at_before + len(text)] != text:
            return None
        at_before += len(text)
        targets[where.offset] = before[at_before : at_before + width]
        at_before += width
        at_after = where.end
    if before[at_before:] != after[at_after:]:
        return None
    indexes: dict[str, int] = {}
    result = []
    for item in transfer.items:
        index = indexes[item.modality] = indexes.get(item.modality, -1) + 1
        where = item.placeholder
        result.append(
            ResolvedPromptUpdate(
                modality=item.modality,
                item_idx=index,
                mode=UpdateMode.REPLACE,
                target=targets[where.offset],
                content=PromptUpdateDetails(
                    full=after[where.offset : where.end], is_embed=_embed_mask(where)
                ),
            )
        )
    return result


def placeholder_range(where: Placeholder) -> PlaceholderRange:
    """The same placeholder in vLLM's form."""
    return PlaceholderRange(offset=where.offset, length=where.length, is_embed=_mask(where))


def _mask(where: Placeholder) -> torch.Tensor | None:
    return None if where.is_embed is None else torch.tensor(where.is_embed, dtype=torch.bool)


def _embed_mask(where: Placeholder) -> Callable[[list[int]], torch.Tensor] | None:
    mask = _mask(where)
    return None if mask is None else lambda _full: mask
