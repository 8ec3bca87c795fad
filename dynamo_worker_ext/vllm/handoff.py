"""Prefill's and decode's ends of a handoff, in vLLM's terms; the form: `dynamo_worker_ext.wire`.

Decode gets engine inputs with the same tokens, identities and places as prefill had, so that its
blocks have the same hashes, and of each item only its facts: enough for mRoPE's positions. vLLM
(0.31.0) asks for no more where it is told that the KV comes from elsewhere. Whatever would need
the item itself is ended by `dynamo_worker_ext.vllm.scheduler`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from dynamo_worker_ext.errors import (
    CacheMissError,
    HandoffError,
    InvalidTransferError,
    UnsupportedOptionError,
)
from dynamo_worker_ext.vllm.inject import VllmMedia
from dynamo_worker_ext.vllm.prompts import placeholder_range
from dynamo_worker_ext.wire import Fact, HandedItem, Handoff, Modality, Placeholder
from dynamo_worker_ext.wire.handoff import MAX_FACT_VALUES, Dtype
from dynamo_worker_ext.worker.prompts import check_stray

_DTYPES: Final[Mapping[Dtype, torch.dtype]] = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}

#: Seconds that a prefill worker may take to answer.
_ANSWER_S: Final = 5.0

#: Items whose facts are kept before it is looked which of them are still needed.
_FIRST_PRUNE: Final = 1024


class ItemFacts:
    """What a prefill worker knows of the items of its prompts. Lives in the worker process.

    Args:
        media: the engine's side of media.
    """

    def __init__(self, media: VllmMedia) -> None:
        self._media = media
        # An item that the engine holds is sent to it by its hash alone, so its facts are kept for
        # as long as it does.
        self._facts: dict[str, Mapping[str, Fact]] = {}
        self._prune_at = _FIRST_PRUNE

    async def of(self, prompt: Mapping[str, Any]) -> tuple[HandedItem, ...]:
        """The items of an engine input, as decode is to get them.

        Raises:
            CacheMissError: of an item there are none; the engine will take it anew.
            UnsupportedOptionError: decode could not go on from this prompt.
        """
        result: list[HandedItem] = []
        unknown = []
        end = len(prompt["prompt_token_ids"])
        for modality, items in prompt.get("mm_kwargs", {}).items():
            for mm_hash, item, where in zip(
                prompt["mm_hashes"][modality],
                items,
                prompt["mm_placeholders"][modality],
                strict=True,
            ):
                if where.offset + where.length == end:
                    raise UnsupportedOptionError(
                        f"the prompt ends in its {modality}; prefill and decode workers need text "
                        "after it, as decode computes the last token of a prompt"
                    )
                if item is not None:
                    self._facts[mm_hash] = _facts(item)
                elif mm_hash not in self._facts:
                    unknown.append(mm_hash)
                    continue
                facts = self._facts[mm_hash]
                result.append(
                    HandedItem(cast(Modality, modality), mm_hash, _placeholder(where), facts)
                )
        if unknown:
            await self._media.forget(unknown)
            raise CacheMissError(unknown)
        self._prune()
        return tuple(result)

    def _prune(self) -> None:
        if len(self._facts) < self._prune_at:
            return
        self._facts = {
            mm_hash: facts for mm_hash, facts in self._facts.items() if self._media.holds(mm_hash)
        }
        self._prune_at = max(_FIRST_PRUNE, 2 * len(self._facts))


def engine_input(handoff: Handoff, media: VllmMedia) -> dict[str, Any]:
    """What decode gives its engine.

    Raises:
        HandoffError: what is said of an item does not fit this model.
        StrayPlaceholderError: the prompt holds a media token outside of its items.
    """
    check_stray(handoff.token_ids, [item.placeholder for item in handoff.media], media.media_tokens)
    prompt: dict[str, Any] = {
        "type": "multimodal" if handoff.media else "token",
        "prompt_token_ids": handoff.token_ids,
        "arrival_time": time.time(),
    }
    if handoff.media:
        for key in ("mm_kwargs", "mm_hashes", "mm_placeholders"):
            prompt[key] = {item.modality: [] for item in handoff.media}
        for item in handoff.media:
            prompt["mm_kwargs"][item.modality].append(_item(item, media))
            prompt["mm_hashes"][item.modality].append(item.mm_hash)
            prompt["mm_placeholders"][item.modality].append(placeholder_range(item.placeholder))
    return prompt


async def check_source(kv: Mapping[str, Any]) -> None:
    """Make sure that the prefill worker which holds the KV still serves NIXL's side channel.

    A read from one that has just been killed does not always fail: UCX (NIXL 1.4.1) at times ends
    the reading engine's process, or keeps a lock that this and every later read waits for.

    Args:
        kv: what vLLM's NIXL connector needs to read it, as `wire.parse_handoff` has checked it.

    Raises:
        HandoffError: nobody answers there.
    """
    host, port = kv["remote_host"], kv["remote_port"]
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                # ZeroMQ greets whoever connects. That a connection is accepted says nothing: the
                # system does that for a process that is being torn down, too.
                await reader.readexactly(1)
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
        raise HandoffError(
            f"the prefill worker that has the KV of the prompt is gone: {host} port {port} does "
            "not answer; send the request again",
            reason="kv",
        ) from error


def _facts(item: MultiModalKwargsItem) -> dict[str, Fact]:
    """Those fields of a processed item that are a few numbers."""
    result = {}
    for name, element in item.items():
        data = element.data
        if isinstance(data, (bool, int, float)):
            data = torch.tensor(data)
        if (
            isinstance(data, torch.Tensor)
            and data.numel() <= MAX_FACT_VALUES
            and data.dtype in _NAMES
        ):
            values: Sequence[Any] = data.flatten().tolist()
            result[name] = Fact(_NAMES[data.dtype], tuple(data.shape), tuple(values))
    return result


def _item(item: HandedItem, media: VllmMedia) -> MultiModalKwargsItem:
    tensors = {
        name: torch.tensor(fact.values, dtype=_DTYPES[fact.dtype]).reshape(fact.shape)
        for name, fact in item.facts.items()
    }
    try:
        tensors = media.check_facts(item.modality, tensors, item.placeholder)
    except InvalidTransferError as error:
        raise HandoffError(
            f"what prefill handed over does not fit this model: {error}", reason="invalid"
        ) from error
    # vLLM drops the fields of items whose KV is there, but for those that stay on the CPU.
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=True))
            for name, data in tensors.items()
        }
    )


def _placeholder(where: PlaceholderRange) -> Placeholder:
    mask = None if where.is_embed is None else tuple(bool(one) for one in where.is_embed.tolist())
    return Placeholder(where.offset, where.length, mask)
