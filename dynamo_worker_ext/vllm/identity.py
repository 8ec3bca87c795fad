"""Known items: proof at start-up that the engine identifies media as the card will say, and the
canary that keeps proving that the media path works."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import time
from collections.abc import Mapping
from typing import Any

from dynamo.common.backend.health_check import build_health_check_payload
from PIL import Image
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventsConfig

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode, routing_tokens
from dynamo_worker_ext.kv_events import engine_endpoint, published_tokens
from dynamo_worker_ext.vllm.inject import VllmMedia
from dynamo_worker_ext.vllm.kv_layout import KvLayout
from dynamo_worker_ext.wire import Placeholder

log = logging.getLogger(__name__)


def known_image() -> Image.Image:
    """A picture of 448 x 448 pixels that is the same on every worker."""
    ramp = bytes(range(256)) * 3
    return Image.frombytes("RGB", (16, 16), ramp).resize((448, 448), Image.Resampling.NEAREST)


async def verify_hash_mode(
    engine: Any,
    media: VllmMedia,
    mode: HashMode,
    layout: KvLayout,
    sources: Mapping[int, KVEventsConfig],
) -> None:
    """Send a known image through the engine and look at what it publishes.

    Args:
        engine: the running `AsyncLLM`.
        media: its media side.
        mode: what the card is to say.
        layout: of the engine's KV cache.
        sources: what it publishes KV events by, for each rank.

    Raises:
        StartupError: the engine's events do not carry the identity that was given.
    """
    if not sources or not media.limits.get("image"):
        return
    # Another hash at each start, so that nothing cached can stand in for an answer.
    mm_hash = hashlib.sha256(f"dynamo-worker-ext {time.time_ns()}".encode()).hexdigest()
    block_size = layout.block_size
    prompt = await _image_prompt(engine, mm_hash, block_size)
    tokens = prompt["prompt_token_ids"]
    if len(tokens) >= layout.context_tokens:
        log.warning("the context is too short to verify how the engine identifies media")
        return
    (where,) = prompt["mm_placeholders"]["image"]
    mask = None if where.is_embed is None else tuple(bool(b) for b in where.is_embed.tolist())
    placeholder = Placeholder(where.offset, where.length, mask)
    expected = routing_tokens(tokens, [(mm_hash, placeholder)])
    expected = expected[: len(tokens) // block_size * block_size]
    endpoint = engine_endpoint(next(iter(sources.values())).endpoint)

    async def serve() -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        async for _ in engine.generate(prompt, params, f"verify-{time.time_ns()}"):
            pass

    # Pad values show the identity of each block, whatever the card is to say.
    normalizer = layout.all_published().normalizer(HashMode.PAD_VALUE, media.media_tokens)
    seen = await published_tokens(endpoint, normalizer, len(expected), serve)
    if seen[: len(expected)] != expected:
        raise StartupError(
            f"this engine does not identify media as {mode.value}: of {len(expected)} routing "
            f"tokens of a known image it published {len(seen)}, and they differ; "
            "start with another --mm-hash-mode"
        )


async def _image_prompt(engine: Any, mm_hash: str, block_size: int) -> dict[str, Any]:
    """An engine input whose first block with image tokens is complete."""
    processor = engine.renderer.get_mm_processor()
    tokenizer = processor.info.get_tokenizer()
    text = processor.dummy_inputs.get_dummy_text({"image": 1})
    filler = tokenizer.encode("a", add_special_tokens=False)[:1] or [0]
    tokens = tokenizer.encode(text, add_special_tokens=False) + filler * block_size
    result: dict[str, Any] = await engine.renderer.process_for_engine_async(
        {
            "prompt_token_ids": tokens,
            "multi_modal_data": {"image": [known_image()]},
            "multi_modal_uuids": {"image": [mm_hash]},
        },
        time.time(),
    )
    return result


async def canary_request(
    engine: Any, media: VllmMedia, *, with_image: bool = True
) -> dict[str, Any]:
    """The request that Dynamo's health check sends when the worker is idle.

    It carries an image where the model takes one, so that a broken media path shows up too.

    Args:
        engine: the running `AsyncLLM`.
        media: its media side.
        with_image: False for a worker that media does not come to.
    """
    config = engine.vllm_config.model_config
    bos = getattr(config.hf_text_config, "bos_token_id", None)
    payload: dict[str, Any]
    if not with_image or not media.limits.get("image"):
        payload = build_health_check_payload(bos_token_id=bos if isinstance(bos, int) else 1)
        return payload
    processor = engine.renderer.get_mm_processor()
    text = processor.dummy_inputs.get_dummy_text({"image": 1})
    buffer = io.BytesIO()
    known_image().resize((64, 64)).save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    payload = build_health_check_payload(
        bos_token_id=1,
        extras={
            "token_ids": list(
                processor.info.get_tokenizer().encode(text, add_special_tokens=False)
            ),
            "multi_modal_data": {"image_url": [{"Url": uri}]},
        },
    )
    return payload
