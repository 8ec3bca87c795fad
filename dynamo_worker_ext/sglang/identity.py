"""Known items at start-up: what the engine does with their hashes, and the canary."""

from __future__ import annotations

import base64
import io
import logging
import secrets
from typing import Any

from dynamo.common.backend.health_check import build_health_check_payload

from dynamo_worker_ext.hashing import HashMode, routing_tokens
from dynamo_worker_ext.kv_events import Normalizer, WidePads, published_tokens
from dynamo_worker_ext.sglang.media import SglangMedia
from dynamo_worker_ext.sglang.probe import HashSupport, known_image, probe, tokenize
from dynamo_worker_ext.wire import Placeholder

log = logging.getLogger(__name__)


async def find_support(engine: Any, media: SglangMedia) -> HashSupport:
    """Probe the engine with a known image.

    Args:
        engine: the running ``sglang.Engine``.
        media: its media side.
    """
    if not media.limits.get("image"):
        return await probe(engine, None, None)
    raw = {"input_ids": _image_prompt(engine, media), "image_data": [known_image()]}
    try:
        tokenized = await tokenize(engine.tokenizer_manager, raw)
    except Exception as error:  # whatever a model's processor may raise
        log.warning(
            "the engine makes nothing of a known image (%s: %s), so that nothing is known of its "
            "hashes",
            type(error).__name__,
            error,
        )
        return HashSupport(accepted=True)
    processed = media.processed(tokenized.mm_inputs.mm_items, tokenized.input_ids)
    return await probe(engine, raw, processed)


async def routes_exactly(
    engine: Any, media: SglangMedia, support: HashSupport, endpoint: str, page_size: int
) -> bool:
    """Whether the engine's events say of a known image what a router expects.

    Args:
        engine: the running ``sglang.Engine``.
        media: its media side.
        support: what the probe found; exact.
        endpoint: where the engine publishes KV events.
        page_size: tokens of a block.
    """
    # Another hash at each start, so that nothing cached can stand in for an answer.
    mm_hash = secrets.token_hex(8)
    # The first block with image tokens is complete.
    prompt = _image_prompt(engine, media)
    prompt += prompt[-1:] * page_size
    raw = {"input_ids": prompt, "image_data": [known_image()], "mm_hashes": [mm_hash]}
    tokens = media.expanded((await tokenize(engine.tokenizer_manager, raw)).input_ids)
    media_token = media.tokens["image"]
    offset, length = tokens.index(media_token), tokens.count(media_token)
    expected = routing_tokens(tokens, [(mm_hash, Placeholder(offset, length))])
    expected = expected[: len(tokens) // page_size * page_size]
    pads = WidePads()
    support.teach(pads, [mm_hash])

    async def serve() -> None:
        await engine.async_generate(
            **raw, sampling_params={"max_new_tokens": 1, "temperature": 0.0}
        )

    normalizer = Normalizer(HashMode.PAD_VALUE, media.media_tokens, page_size, wide_pads=pads)
    seen = await published_tokens(endpoint, normalizer, len(expected), serve)
    return seen[: len(expected)] == expected


def canary_request(engine: Any, media: SglangMedia) -> dict[str, Any]:
    """The request that Dynamo's health check sends when the worker is idle.

    It carries an image where the model takes one, so that a broken media path shows up too.
    """
    config = engine.tokenizer_manager.model_config.hf_text_config
    bos = getattr(config, "bos_token_id", None)
    payload: dict[str, Any]
    if not media.limits.get("image"):
        payload = build_health_check_payload(bos_token_id=bos if isinstance(bos, int) else 1)
        return payload
    buffer = io.BytesIO()
    known_image().save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    payload = build_health_check_payload(
        bos_token_id=1,
        extras={
            "token_ids": _image_prompt(engine, media),
            "multi_modal_data": {"image_url": [{"Url": uri}]},
        },
    )
    return payload


def _image_prompt(engine: Any, media: SglangMedia) -> list[int]:
    """A prompt with the placeholder of one image; a token of text or of a frame comes last."""
    manager = engine.tokenizer_manager
    if (known := getattr(manager.mm_processor, "mm_tokens", None)) is None:
        return [media.tokens["image"], 0]
    return list(manager.tokenizer.encode(known.image_token, add_special_tokens=False))
