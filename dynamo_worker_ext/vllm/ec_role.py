"""What makes vLLM's older model runner leave out the KV cache of an encoder-only engine.

vLLM 0.31.0 has two model runners. The newer one makes no KV cache for an engine that only encodes;
the older one, which runs on CPU, makes none for the producer of an encoder cache transfer alone.
`SilentProducer` is such a producer. Nothing is transferred by it: the encode worker calls the
vision tower past the scheduler, so that no request ever reaches it. It can go when the older
runner is gone, or asks for ``mm_encoder_only`` as the newer one does. Lives in the engine's
processes.
"""

from __future__ import annotations

from typing import Any

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

from dynamo_worker_ext.errors import EngineError


class SilentProducer(ECConnectorBase):
    """A connector that transfers nothing; vLLM asks it nothing while there are no requests."""

    def start_load_caches(self, *args: Any, **kwargs: Any) -> None:
        raise _unexpected()

    def save_caches(self, *args: Any, **kwargs: Any) -> None:
        raise _unexpected()

    def has_cache_item(self, *args: Any, **kwargs: Any) -> bool:
        raise _unexpected()

    def update_state_after_alloc(self, *args: Any, **kwargs: Any) -> None:
        raise _unexpected()

    def build_connector_meta(self, *args: Any, **kwargs: Any) -> ECConnectorMetadata:
        raise _unexpected()


def silent_producer() -> ECTransferConfig:
    """vLLM's configuration of it."""
    return ECTransferConfig(
        ec_connector=SilentProducer.__name__,
        ec_connector_module_path=SilentProducer.__module__,
        ec_role="ec_producer",
    )


def _unexpected() -> EngineError:
    return EngineError("an encoder-only engine was given a request")
