"""LoRA adapters, each registered as a model of its own over the same endpoint.

An alias of the base model would do for a client, but not for a router: it has to know the
adapter's name to hash blocks as the engine does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from dynamo.common.backend.engine import EngineConfig
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.endpoint_types import parse_endpoint_types
from dynamo.llm import ModelInput, ModelRuntimeConfig, WorkerType, register_model, unregister_model


class Adapter(NamedTuple):
    """One adapter: the name clients ask for, and the engine's number for it."""

    name: str
    number: int


async def register_adapters(
    endpoint: Any, adapters: Iterable[Adapter], config: EngineConfig, worker: WorkerConfig
) -> None:
    """Put the adapters' cards into discovery, with what the base model's card says.

    Args:
        endpoint: the endpoint that serves the base model.
        adapters: those the engine serves.
        config: what the worker registered with.
        worker: the SDK's configuration.
    """
    llm = config.llm
    if llm is None:
        raise ValueError("an engine that serves adapters registers as a language model")
    runtime = ModelRuntimeConfig()
    for name in (
        "context_length",
        "total_kv_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "data_parallel_size",
        "data_parallel_start_rank",
    ):
        if (value := getattr(llm, name)) is not None:
            setattr(runtime, name, value)
    runtime.enable_local_indexer = worker.enable_local_indexer
    runtime.tool_call_parser = worker.tool_call_parser
    runtime.reasoning_parser = worker.reasoning_parser
    for key, value in (config.runtime_data or {}).items():
        runtime.set_engine_specific(key, json.dumps(value))
    for adapter in adapters:
        await register_model(
            ModelInput.Tokens,
            parse_endpoint_types(worker.endpoint_types),
            endpoint,
            config.model,
            worker_type=WorkerType.Aggregated,
            needs=[],
            kv_cache_block_size=llm.kv_cache_block_size,
            runtime_config=runtime,
            custom_template_path=worker.custom_jinja_template,
            media_decoder=worker.media_decoder,
            media_fetcher=worker.media_fetcher,
            user_data={"lora_adapter": True, "lora_id": adapter.number},
            lora_name=adapter.name,
            base_model_path=config.model,
            ignore_weights=True,
            max_gpu_lora_count=llm.max_gpu_lora_count,
        )


async def unregister_adapters(endpoint: Any, adapters: Iterable[Adapter]) -> None:
    """Take the adapters' cards out of discovery."""
    for adapter in adapters:
        await unregister_model(endpoint, adapter.name)
