"""What an engine says about its KV cache, in the words that the router hashes by.

    engine core --ZMQ PUB--> KvEventPump -> frames -> Normalizer -> Dynamo's KvEventPublisher

Both engines publish blocks of tokens with the model's own placeholder tokens in them, or with
their own stand-ins; a router compares hashes of tokens in which `hashing.routing_tokens` has
been at work. The `Normalizer` is the one place that turns the first into the second. The measure
is exactness: the router's blocks for a repeated request equal the worker's, all but the
incomplete last one; and what may be gone is never claimed.

Lives in the worker process. Nothing here imports an engine or Dynamo.
"""

from dynamo_worker_ext.kv_events.endpoints import (
    PrivateEndpoint,
    engine_endpoint,
    private_endpoint,
)
from dynamo_worker_ext.kv_events.frames import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    FrameError,
    decode_batch,
)
from dynamo_worker_ext.kv_events.normalize import (
    CACHE_SALT_PREFIX,
    MAIN_KINDS,
    Normalizer,
    NormalizerStatistics,
    WidePads,
)
from dynamo_worker_ext.kv_events.observe import published_tokens
from dynamo_worker_ext.kv_events.pump import EventPublisher, KvEventPump
from dynamo_worker_ext.kv_events.router import RemovedBlocks, RouterEvent, StoredBlocks

__all__ = [
    "CACHE_SALT_PREFIX",
    "MAIN_KINDS",
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "EngineEvent",
    "EventPublisher",
    "FrameError",
    "KvEventPump",
    "Normalizer",
    "NormalizerStatistics",
    "PrivateEndpoint",
    "RemovedBlocks",
    "RouterEvent",
    "StoredBlocks",
    "WidePads",
    "decode_batch",
    "engine_endpoint",
    "private_endpoint",
    "published_tokens",
]
