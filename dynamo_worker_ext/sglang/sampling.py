"""From what a client asked for to what ``Engine.async_generate`` is given. A pure mapping.

Where a client's options stand in a request is said in `dynamo_worker_ext.vllm.sampling`; it is the
same for every engine. Every option that carries a value is in one of the tables below. One that is
not, or that SGLang would ignore, is refused: a client learns that it cannot be had, instead of
getting an answer that looks as if it had been honoured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dynamo_worker_ext import options
from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError
from dynamo_worker_ext.worker import sampling as shared
from dynamo_worker_ext.worker.routing import (
    cache_salt,
    dp_rank,
    lora_name,
    wants_engine_data,
)


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What an engine can honour, as far as it decides about a request. Fixed at start-up.

    Attributes:
        defaults: sampling defaults of the model's generation_config.json.
        grammar_backend: ``--grammar-backend``; ``none`` for no guided decoding.
        deterministic: ``--enable-deterministic-inference``, without which seeds are ignored.
        has_tokenizer: False under ``--skip-tokenizer-init``.
        priorities: ``--enable-priority-scheduling``.
        traces: ``--enable-trace``.
        first_dp_rank, dp_ranks: the data-parallel ranks of this worker, in the router's numbers.
        lora_names: adapters that the engine has.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    grammar_backend: str = "xgrammar"
    deterministic: bool = False
    has_tokenizer: bool = True
    priorities: bool = False
    traces: bool = False
    first_dp_rank: int = 0
    dp_ranks: int = 1
    lora_names: Collection[str] = ()


class Bootstrap(NamedTuple):
    """Where the two halves of a request meet to move its KV cache: the address of the prefill
    worker's bootstrap server, and a number of theirs."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What ``Engine.async_generate`` is given besides the prompt.

    Attributes:
        sampling_params: as its argument of that name.
        return_logprob: the client wants logprobs.
        top_logprobs_num: entries of each position.
        logprob_start_len: 0 for the prompt's logprobs too, -1 for none of them.
        priority: a larger number is served earlier, for Dynamo and SGLang alike; None where the
            engine does not schedule by it.
        cache_salt: keeps prefix cache, features and routing apart.
        data_parallel_rank: counted from 0 within this worker; None where there is one rank only.
        lora_name: the adapter, None for the base model.
        trace_headers: W3C trace context; None where the engine does not trace.
        wants_engine_data: the client opted into ``nvext.engine_data``.
        bootstrap: of a request that a prefill and a decode worker share; None for all others.
    """

    sampling_params: dict[str, Any]
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    lora_name: str | None = None
    trace_headers: Mapping[str, str] | None = None
    wants_engine_data: bool = False
    bootstrap: Bootstrap | None = None

    @property
    def n(self) -> int:
        """Number of choices."""
        return int(self.sampling_params.get("n", 1))

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``async_generate`` that are not left at their defaults."""
        given: dict[str, Any] = {"sampling_params": self.sampling_params}
        if self.return_logprob:
            given |= {
                "return_logprob": True,
                "top_logprobs_num": self.top_logprobs_num,
                "logprob_start_len": self.logprob_start_len,
            }
        for name, value in (
            ("priority", self.priority),
            ("cache_salt", self.cache_salt),
            ("routed_dp_rank", self.data_parallel_rank),
            ("lora_path", self.lora_name),
            ("external_trace_header", self.trace_headers),
        ):
            if value is not None:
                given[name] = value
        if self.bootstrap is not None:
            given |= {f"bootstrap_{n}": v for n, v in self.bootstrap._asdict().items()}
        return given


def build_call(
    request: Mapping[str, Any],
    context: SamplingContext,
    *,
    trace_headers: Mapping[str, str] | None = None,
) -> EngineCall:
    """Map one of Dynamo's preprocessed requests. Leaves the request alone.

    Args:
        request: the request as the Backend SDK hands it to ``generate``.
        context: what the engine can honour.
        trace_headers: ``context.trace_headers()`` of the SDK's context.

    Raises:
        UnsupportedOptionError: an option cannot be honoured.
        RequestError: a value is of a wrong type or out of range.
    """
    extra = options.section(request, "extra_args")
    if extra.get("sglang_tito") is not None:
        # Comes only if the card advertises sglang_generate, and ours does not.
        raise UnsupportedOptionError("SGLang's native generate API is not served by this worker")
    routing = options.section(request, "routing")
    output = options.read("output_options", options.section(request, "output_options"), _OUTPUT)
    logprobs, of_prompt = output.pop("logprobs", None), output.pop("prompt_logprobs", None)
    priority = options.integer("priority", routing.get("priority") or 0)
    return EngineCall(
        sampling_params={**context.defaults, **_sampling_params(request, context), **output},
        return_logprob=logprobs is not None or of_prompt is not None,
        top_logprobs_num=max(logprobs or 0, of_prompt or 0),
        logprob_start_len=-1 if of_prompt is None else 0,
        priority=priority if context.priorities else None,
        cache_salt=cache_salt(request),
        data_parallel_rank=dp_rank(routing, context.first_dp_rank, context.dp_ranks),
        lora_name=lora_name(request, context.lora_names),
        trace_headers=trace_headers if context.traces else None,
        wants_engine_data=wants_engine_data(request),
    )


def _count(name: str, value: object) -> int:
    count = options.integer(name, value)
    if not 0 <= count <= 1024:
        raise RequestError(f"{name} is from 0 to 1024, got {count}")
    return count


_SAMPLING: Final[options.Table] = {
    **shared.SAMPLING,
    "seed": ("sampling_seed", options.integer),
    "guided_decoding": ("guided", options.obj),
    "use_beam_search": (None, options.only(False, "this worker offers no beam search")),
    "length_penalty": (None, options.only(1.0, "it belongs to beam search")),
    # This worker's answer is token ids; the frontends make text of them and cut it.
    "include_stop_str_in_output": (None, options.flag),
}
_STOPPING: Final[options.Table] = {
    **shared.STOPPING,
    "max_tokens": ("max_new_tokens", options.integer),
    "min_tokens": ("min_new_tokens", options.integer),
}
_OUTPUT: Final[options.Table] = {
    **shared.OUTPUT,
    "logprobs": ("logprobs", _count),
    "prompt_logprobs": ("prompt_logprobs", _count),
}


def _sampling_params(request: Mapping[str, Any], context: SamplingContext) -> dict[str, Any]:
    by_token_id = options.section(options.section(request, "extra_args"), "sampling_options")
    asked = {
        # SGLang takes None for "until the end of the context", and 128 where nothing is said.
        "max_new_tokens": None,
        **options.read("sampling_options", options.section(request, "sampling_options"), _SAMPLING),
        **options.read("extra_args.sampling_options", by_token_id, _SAMPLING),
        **options.read("stop_conditions", options.section(request, "stop_conditions"), _STOPPING),
    }
    shared.check_best_of(asked)
    if stop_token_ids := shared.all_stop_token_ids(asked):
        asked["stop_token_ids"] = stop_token_ids
    if (guided := asked.pop("guided", None)) is not None:
        asked |= _guided(guided, context.grammar_backend)
    if bias := asked.pop("logit_bias", None):
        asked["logit_bias"] = {str(token): value for token, value in bias.items()}
    if asked.get("n", 1) < 1:
        raise RequestError(f"n is at least 1, got {asked['n']}")
    _check_seed(asked, context)
    if not context.has_tokenizer:
        if asked.get("stop") or asked.get("min_new_tokens"):
            raise UnsupportedOptionError(
                "stop strings and min_tokens need a tokenizer in the engine; this one was started "
                "with --skip-tokenizer-init"
            )
        asked.pop("stop", None)
    return asked


def _check_seed(asked: dict[str, Any], context: SamplingContext) -> None:
    if context.deterministic:
        if asked.get("min_p"):
            # SGLang 0.5.21 asserts that the two do not meet, in the scheduler, which then dies.
            raise UnsupportedOptionError(
                "min_p cannot be honoured under --enable-deterministic-inference; leave it out"
            )
        return
    if asked.get("sampling_seed") is None:
        return
    if asked.get("temperature") == 0 or asked.get("top_k") == 1:
        del asked["sampling_seed"]  # greedy: every seed gives the same
        return
    raise UnsupportedOptionError(
        "seed cannot be honoured: SGLang samples by it only where it was started with "
        "--enable-deterministic-inference; leave it out, or set temperature to 0"
    )


def _guided(guided: Mapping[str, Any], engine_backend: str) -> dict[str, str]:
    """Guided decoding: exactly one constraint. SGLang compiles it later and refuses a bad one."""
    if engine_backend == "none" and any(value is not None for value in guided.values()):
        raise UnsupportedOptionError(
            "guided decoding cannot be honoured: this engine runs with --grammar-backend none"
        )
    found = shared.constraint(guided, "SGLang", engine_backend)
    if found is None:
        return {}
    name, value = found
    match name:
        case "choice":
            if not value:
                raise RequestError(f"guided_decoding.{name} is an empty list")
            return {"regex": "(" + "|".join(map(re.escape, value)) + ")"}
        case "regex":
            return {"regex": value}
        case "grammar":
            return {"ebnf": value}
    text = value if isinstance(value, str) else json.dumps(value)
    return {"json_schema" if name == "json" else "structural_tag": text}
