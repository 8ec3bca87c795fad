"""What an engine publishes while it serves one request: proof of how it identifies media."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import zmq
import zmq.asyncio

from dynamo_worker_ext.kv_events.frames import FrameError, decode_batch
from dynamo_worker_ext.kv_events.normalize import Normalizer
from dynamo_worker_ext.kv_events.router import StoredBlocks

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 60.0


async def published_tokens(
    endpoint: str, normalizer: Normalizer, want: int, serve: Callable[[], Awaitable[None]]
) -> list[int]:
    """Tokens of the blocks that the engine stores, normalised, in order.

    Args:
        endpoint: where to subscribe; see `engine_endpoint`.
        normalizer: a fresh one.
        want: how many tokens to wait for.
        serve: has the engine serve one request.

    Returns:
        At least `want` tokens, or fewer if no more came within a minute.
    """
    seen: list[int] = []
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        # A subscription takes effect a moment after connecting; nothing tells when.
        await asyncio.sleep(0.2)
        await serve()
        async with asyncio.timeout(_TIMEOUT_S):
            while len(seen) < want:
                frames = await socket.recv_multipart()
                for event in decode_batch(frames[-1]).events:
                    for stored in normalizer.normalize(event):
                        if isinstance(stored, StoredBlocks):
                            seen.extend(stored.token_ids)
    except (TimeoutError, FrameError) as error:
        log.debug("no complete events: %r", error)
    finally:
        socket.close()
        context.term()
    return seen
