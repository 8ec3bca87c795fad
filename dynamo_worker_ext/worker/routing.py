"""Readers of what both engines are asked for alike, beyond sampling; see `options` for the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dynamo_worker_ext import options
from dynamo_worker_ext.errors import UnsupportedOptionError


def cache_salt(request: Mapping[str, Any]) -> str | None:
    """The client's cache salt, from wherever a frontend put it."""
    extra = options.section(request, "extra_args")
    for source in (
        options.section(request, "routing"),
        options.section(extra, "nvext"),
        options.section(request, "nvext"),
    ):
        if salt := source.get("cache_salt"):
            return options.text("cache_salt", salt)
    return None


def dp_rank(routing: Mapping[str, Any], first: int, count: int) -> int | None:
    """The data-parallel rank, counted from 0 within this worker; None where there is one only.

    Args:
        routing: the request's section of that name.
        first: this worker's first rank, in the router's numbers.
        count: its ranks.

    Raises:
        UnsupportedOptionError: it is another worker's.
    """
    if (rank := routing.get("dp_rank")) is None:
        return None
    local = options.integer("dp_rank", rank) - first
    if not 0 <= local < count:
        raise UnsupportedOptionError(
            f"dp_rank={rank}: this worker has ranks {first} to {first + count - 1}"
        )
    return local if count > 1 else None


def lora_name(request: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The adapter that is asked for; None for the base model.

    Args:
        request: the whole request.
        names: adapters that the engine has.

    Raises:
        UnsupportedOptionError: it has no such adapter.
    """
    if name := options.section(request, "routing").get("lora_name"):
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise UnsupportedOptionError(
                f"LoRA {options.short(name)} is not loaded; loaded: {known}"
            )
        return str(name)
    # The vLLM-processor frontend names the adapter only here; any other name is the base model's.
    model = request.get("model")
    return model if isinstance(model, str) and model in names else None


def wants_engine_data(request: Mapping[str, Any]) -> bool:
    """Whether the client opted into ``nvext.engine_data``."""
    extra = options.section(request, "extra_args")
    fields = options.section(extra, "nvext").get("extra_fields")
    return isinstance(fields, (list, tuple)) and "engine_data" in fields
