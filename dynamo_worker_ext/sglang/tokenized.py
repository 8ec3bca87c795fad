"""What SGLang's tokenizer manager makes of a request: looked at by the worker that begins it, and
given its media by the one that continues it. Lives in the worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Modality as EngineModality
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput

from dynamo_worker_ext.errors import UnsupportedOptionError
from dynamo_worker_ext.sglang.handoff import HandedItem, HandedMedia
from dynamo_worker_ext.wire import Modality


def media_of(tokenized: Any) -> HandedMedia | None:
    """What there is to tell of a request's media; None for a request without.

    Args:
        tokenized: what the engine's tokenizer manager made of the request.

    Raises:
        UnsupportedOptionError: this engine expands the model's prompts where it cannot be seen.
    """
    inputs = tokenized.mm_inputs
    if inputs is None or not inputs.mm_items:
        return None
    items = []
    for item in inputs.mm_items:
        if item.hash is None or item.offsets is None or inputs.padded_input_ids is None:
            raise UnsupportedOptionError(
                "media of this model cannot be shared between a prefill and a decode worker: "
                "SGLang expands its prompts within the scheduler; use an aggregated worker"
            )
        spans = tuple((int(first), int(last)) for first, last in item.offsets)
        modality: Modality = item.modality.name.lower()
        items.append(HandedItem(f"{item.hash:016x}", modality, spans))
    delta = inputs.mrope_position_delta
    return HandedMedia(
        token_ids=[int(token) for token in tokenized.input_ids],
        items=tuple(items),
        mrope_position_delta=None if delta is None else int(delta),
    )


def announce(manager: Any, waiting: Mapping[str, asyncio.Future[Any]]) -> None:
    """Have those who wait for a request learn what the engine's tokenizer manager made of it.

    Args:
        manager: the engine's tokenizer manager.
        waiting: by SGLang's request id.
    """
    tokenize_one = manager._tokenize_one_request

    async def announced(request: Any) -> Any:
        tokenized = await tokenize_one(request)
        future = waiting.get(request.rid)
        if future is not None and not future.done():
            if _unnamed(tokenized):
                await asyncio.to_thread(_name, tokenized)
            if not future.done():
                future.set_result(tokenized)
        return tokenized

    manager._tokenize_one_request = announced


def _unnamed(tokenized: Any) -> bool:
    """Whether there is media that no frontend has given a hash, such as raw videos."""
    inputs = tokenized.mm_inputs
    return inputs is not None and any(item.hash is None for item in inputs.mm_items)


def _name(tokenized: Any) -> None:
    """Give it the hash that the scheduler would; takes milliseconds for large media."""
    inputs = tokenized.mm_inputs
    for item in inputs.mm_items:
        item.set_pad_value()
    inputs.padded_input_ids = MultimodalProcessorOutput.build_padded_input_ids(
        tokenized.input_ids, inputs.mm_items
    )


def attach(manager: Any, handed: Mapping[str, HandedMedia]) -> None:
    """Have the engine continue requests as ones with media, without the media.

    Args:
        manager: the engine's tokenizer manager.
        handed: by SGLang's request id; their prompts are given as plain ids.
    """
    tokenize_one = manager._tokenize_one_request

    async def attached(request: Any) -> Any:
        tokenized = await tokenize_one(request)
        media = handed.get(request.rid)
        if media is not None:
            tokenized.mm_inputs = engine_inputs(media)
        return tokenized

    manager._tokenize_one_request = attached


def engine_inputs(media: HandedMedia) -> MultimodalProcessorOutput:
    """What the scheduler is to know of the media: no item, but where tokens belong."""
    items = []
    for one in media.items:
        item = MultimodalDataItem(modality=EngineModality[one.modality.upper()])
        item.set_hash(int(one.mm_hash, 16))
        item.offsets = [tuple(span) for span in one.spans]
        items.append(item)
    positions = delta = None
    if media.mrope_position_delta is not None:
        delta = torch.tensor([[media.mrope_position_delta]])
        # Of these only the last is ever looked at, where a request that was retracted comes back;
        # without them the scheduler would compute others, for a prompt of text.
        last = torch.arange(len(media.token_ids)) + media.mrope_position_delta
        positions = last.expand(3, -1).contiguous()
    return MultimodalProcessorOutput(
        mm_items=[],
        # With a prefix cache on the decode side, images of one size differ by this only.
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(media.token_ids, items),
        mrope_positions=positions,
        mrope_position_delta=delta,
    )
