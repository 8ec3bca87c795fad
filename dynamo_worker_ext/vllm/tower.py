"""What a vLLM worker process does for an encode worker: run the vision tower on a batch.

`VisionTower` is vLLM's ``worker_extension_cls``: vLLM mixes it into its own worker class, and the
encode worker calls its method by ``collective_rpc``. Lives in the engine's worker processes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.vllm.items import kwargs_item

#: Of the batch and of its results: a list of payloads as `codec` has them.
BATCH: Final = msgspec.msgpack.Decoder(list[bytes])

#: What a result calls its embeddings.
EMBEDDINGS: Final = "embeddings"


class VisionTower:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def dwe_encode(self, modality: str, batch: bytes) -> bytes:
        """Encode processed items.

        Args:
            modality: of all of them.
            batch: msgpack list of payloads, each one processed item.

        Returns:
            msgpack list of payloads, in the same order; each holds `EMBEDDINGS`, [tokens, width],
            on the CPU and in the model's dtype.
        """
        items = [kwargs_item(codec.decode(memoryview(one))) for one in BATCH.decode(batch)]
        runner = self.model_runner
        model = runner.get_model()
        found: list[torch.Tensor] = []
        with torch.inference_mode():
            for _, _, kwargs in group_and_batch_mm_kwargs(
                [(modality, item) for item in items], device=runner.device
            ):
                found += list(model.embed_multimodal(**kwargs))
        return msgspec.msgpack.encode([_payload(one) for one in found])


def _payload(embeddings: torch.Tensor) -> bytes:
    field = KwargsField(embeddings.detach().cpu().contiguous(), "batched", {})
    return b"".join(codec.encode(KwargsItem({EMBEDDINGS: field})))
