"""What embeddings of images clients may send, learned from what the model's processor does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dynamo_worker_ext.vllm.embeds import EmbeddingReference
from dynamo_worker_ext.vllm.reference import process_example
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm

log = logging.getLogger(__name__)


def learn_form(processor: Any, reference: EmbeddingReference) -> EmbeddingsForm | None:
    """Process two pictures of different shape and look at what becomes of the prompt. Blocks.

    Args:
        processor: the engine's own multimodal processor.
        reference: what embeddings the model takes.

    Returns:
        None for a model whose images are not one token, repeated: where their embeddings would go
        could only be guessed.
    """
    found = [
        _repeated(*process_example(processor, "image", size=size)) for size in (None, (112, 224))
    ]
    tokens, counts = {token for token, _ in found}, {count for _, count in found}
    if None in tokens or len(tokens) > 1:
        log.info("embeddings of images are not taken from clients: %s", found)
        return None
    dtype = str(processor.info.ctx.model_config.dtype).removeprefix("torch.")
    merge = reference.merge
    every = counts.pop() if merge is None else None
    return EmbeddingsForm(tokens.pop() or 0, reference.width, dtype, merge, every)


def _repeated(before: Sequence[int], output: Any) -> tuple[int | None, int]:
    """The token that the one image of a prompt repeats, and how often; None if it is not so."""
    (where,) = output["mm_placeholders"]["image"]
    first, count = where.offset, where.length
    if first >= len(before) or where.get_num_embeds() != count:
        return None, count
    token = before[first]
    after = [*before[:first], *[token] * count, *before[first + 1 :]]
    return (token if after == list(output["prompt_token_ids"]) else None), count
