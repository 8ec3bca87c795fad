"""From what a client asked for to what ``AsyncLLM.generate`` is given. A pure mapping.

Dynamo 1.6.1's frontends put a client's options into these places of a request:

    sampling_options    temperature, top_p, n, seed, penalties, guided_decoding, ...
    stop_conditions     max_tokens, min_tokens, ignore_eos, stop, stop token ids, thinking budget
    output_options      logprobs, prompt_logprobs, skip_special_tokens
    extra_args          sampling_options: token-id options of the Rust frontend;
                        nvext: cache_salt, extra_fields; reasoning_ended, reasoning_parser_kwargs
    routing             priority, dp_rank, cache_salt, lora_name
    model               the name of the LoRA adapter, where the client asked for one

Every option that carries a value is in one of the tables below. One that is not, or that vLLM
would ignore, is refused: a client learns that it cannot be had, instead of getting an answer
that looks as if it had been honoured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from dynamo_worker_ext import options
from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError
from dynamo_worker_ext.kv_events.normalize import CACHE_SALT_PREFIX
from dynamo_worker_ext.worker import sampling as shared
from dynamo_worker_ext.worker.routing import (
    cache_salt,
    dp_rank,
    lora_name,
    wants_engine_data,
)

#: What a frontend sends for -1, "the whole vocabulary", in an unsigned field.
_WHOLE_VOCABULARY: Final = 2**32 - 1

#: Sets of options that are kept with what they were mapped to, and the most bytes of one.
_KNOWN: Final = 256
_KNOWN_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What an engine can honour, as far as it decides about a request. Fixed at start-up.

    Attributes:
        defaults: sampling defaults of the model's generation_config.json.
        vocab_size: number of token ids.
        guided_backend: ``--structured-outputs-config.backend``.
        has_tokenizer: False under ``--skip-tokenizer-init``.
        first_dp_rank, dp_ranks: the data-parallel ranks of this worker, in the router's numbers.
        lora_names: adapters that the engine has.
        known: options that were mapped before, for `build_call` alone.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 2**31
    guided_backend: str = "auto"
    has_tokenizer: bool = True
    first_dp_rank: int = 0
    dp_ranks: int = 1
    lora_names: Collection[str] = ()
    known: dict[bytes, SamplingParams] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, vllm_config: VllmConfig, *, lora_names: Collection[str] = ()) -> SamplingContext:
        """The context of an engine that runs with `vllm_config`."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        return cls(
            defaults=model.get_diff_sampling_param(),
            vocab_size=model.get_vocab_size(),
            guided_backend=vllm_config.structured_outputs_config.backend,
            has_tokenizer=not model.skip_tokenizer_init,
            first_dp_rank=parallel.data_parallel_rank,
            dp_ranks=(
                parallel.data_parallel_size_local
                if parallel.local_engines_only
                else parallel.data_parallel_size
            ),
            lora_names=lora_names,
        )


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What ``AsyncLLM.generate`` is given besides the prompt.

    Attributes:
        sampling_params: streams deltas of token ids; frontends detokenise.
        priority: vLLM's, where a smaller number is served earlier. Only an engine started with
            ``--scheduling-policy priority`` looks at it.
        cache_salt: belongs into the prompt; marked as Dynamo's, see `CACHE_SALT_PREFIX`.
        data_parallel_rank: counted from 0 within this worker; None where there is one rank only.
        lora_name: the adapter, None for the base model.
        reasoning_ended: whether the prompt ends outside of a reasoning block, None if unknown.
        reasoning_parser_kwargs: how the frontend set up its reasoning parser.
        trace_headers: W3C trace context.
        wants_engine_data: the client opted into ``nvext.engine_data``.
        hands_over: decode goes on from here.
    """

    sampling_params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    lora_name: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    wants_engine_data: bool = False
    hands_over: bool = False


def build_call(
    request: Mapping[str, Any],
    context: SamplingContext,
    *,
    trace_headers: Mapping[str, str] | None = None,
    first_token_only: bool = False,
) -> EngineCall:
    """Map one of Dynamo's preprocessed requests. Leaves the request alone.

    Args:
        request: the request as the Backend SDK hands it to ``generate``.
        context: what the engine can honour.
        trace_headers: ``context.trace_headers()`` of the SDK's context.
        first_token_only: for a prefill worker, whose one token is drawn again by decode.

    Raises:
        UnsupportedOptionError: an option cannot be honoured.
        RequestError: a value is of a wrong type or out of range.
    """
    extra = options.section(request, "extra_args")
    routing = options.section(request, "routing")
    if extra.get("vllm_tito") is not None:
        # Comes only if the card advertises vllm_inference_v1_generate, and ours does not.
        raise UnsupportedOptionError("the token-in generate API is not served by this worker")
    reasoning_ended = request.get("reasoning_ended", extra.get("reasoning_ended"))
    parser_kwargs = request.get("reasoning_parser_kwargs", extra.get("reasoning_parser_kwargs"))
    salt = cache_salt(request)
    return EngineCall(
        sampling_params=_known_params(request, extra, context, first_token_only),
        # Dynamo: the larger, the sooner. vLLM: the smaller, the sooner.
        priority=-options.integer("priority", routing.get("priority") or 0),
        cache_salt=None if salt is None else CACHE_SALT_PREFIX + salt,
        data_parallel_rank=dp_rank(routing, context.first_dp_rank, context.dp_ranks),
        lora_name=lora_name(request, context.lora_names),
        reasoning_ended=(
            None if reasoning_ended is None else options.flag("reasoning_ended", reasoning_ended)
        ),
        reasoning_parser_kwargs=(
            None if parser_kwargs is None else options.obj("reasoning_parser_kwargs", parser_kwargs)
        ),
        trace_headers=trace_headers,
        # Of a prefill worker's answer frontends take what it hands over.
        wants_engine_data=not first_token_only and wants_engine_data(request),
        hands_over=first_token_only,
    )


def continued_call(call: EngineCall, kv: Mapping[str, Any] | None) -> EngineCall:
    """`call` for a decode worker.

    Args:
        call: what the client asked for. It may share its parameters with others and is left alone.
        kv: where the prompt's KV lies, in the KV connector's words.

    Raises:
        UnsupportedOptionError: it cannot be had there.
    """
    check_split(call.sampling_params.n, call.sampling_params.prompt_logprobs)
    if kv is None:
        return call
    params = copy(call.sampling_params)
    params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": dict(kv)}
    return replace(call, sampling_params=params)


def _count_of_logprobs(name: str, value: object) -> int:
    count = options.integer(name, value)
    return -1 if count == _WHOLE_VOCABULARY else count


# Where the name of the field of SamplingParams is None, a value is checked and not passed on.
_SAMPLING: Final[options.Table] = {
    **shared.SAMPLING,
    "seed": ("seed", options.integer),
    "allowed_token_ids": ("allowed_token_ids", options.token_ids),
    "bad_words": ("bad_words", options.texts),
    "bad_words_token_ids": ("_bad_words_token_ids", options.token_id_lists),
    "logprob_token_ids": ("logprob_token_ids", options.token_ids),
    "skip_reading_prefix_cache": ("skip_reading_prefix_cache", options.flag),
    # The frontends cut the text at a stop string; ours only ends the generation there.
    "include_stop_str_in_output": ("include_stop_str_in_output", options.flag),
    "guided_decoding": ("structured_outputs", options.obj),
    "use_beam_search": (None, options.only(False, "vLLM's engine has no beam search")),
    "length_penalty": (
        None,
        options.only(1.0, "it belongs to beam search, which vLLM's engine lacks"),
    ),
}
_STOPPING: Final[options.Table] = {
    **shared.STOPPING,
    "max_tokens": ("max_tokens", options.integer),
    "min_tokens": ("min_tokens", options.integer),
    "max_thinking_tokens": ("thinking_token_budget", options.integer),
}
_OUTPUT: Final[options.Table] = {
    **shared.OUTPUT,
    "logprobs": ("logprobs", _count_of_logprobs),
    "prompt_logprobs": ("prompt_logprobs", _count_of_logprobs),
}


#: What tells a KV connector to keep the prompt's KV until decode has it.
_FOR_DECODE: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


_PACK: Final = msgspec.msgpack.Encoder().encode


def _known_params(
    request: Mapping[str, Any],
    extra: Mapping[str, Any],
    context: SamplingContext,
    first_token_only: bool,
) -> SamplingParams:
    """`_sampling_params`, remembered: most requests ask for what another one has asked for."""
    sections = [request.get(n) for n in ("sampling_options", "stop_conditions", "output_options")]
    try:
        # Tells 1 from True and from 1.0, and NaN from null.
        key = _PACK((sections, extra.get("sampling_options"), first_token_only))
    except (TypeError, ValueError, OverflowError, RecursionError):  # refused below
        key = b""
    if (params := context.known.get(key)) is None:
        params = _sampling_params(request, extra, context, first_token_only)
        # Guided decoding is left out: vLLM writes into it which backend is to compile it.
        if 0 < len(key) <= _KNOWN_BYTES and params.structured_outputs is None:
            if len(context.known) == _KNOWN:
                context.known.clear()
            context.known[key] = params
    return params


def _sampling_params(
    request: Mapping[str, Any],
    extra: Mapping[str, Any],
    context: SamplingContext,
    first_token_only: bool,
) -> SamplingParams:
    by_token_id = options.section(extra, "sampling_options")
    asked = {
        **options.read("sampling_options", options.section(request, "sampling_options"), _SAMPLING),
        **options.read("extra_args.sampling_options", by_token_id, _SAMPLING),
        **options.read("stop_conditions", options.section(request, "stop_conditions"), _STOPPING),
        **options.read("output_options", options.section(request, "output_options"), _OUTPUT),
    }
    shared.check_best_of(asked)
    if stop_token_ids := shared.all_stop_token_ids(asked):
        asked["stop_token_ids"] = stop_token_ids
    if (guided := asked.pop("structured_outputs", None)) is not None:
        asked["structured_outputs"] = _structured_outputs(guided, context.guided_backend)
    if asked.get("logprob_token_ids"):
        # These replace the most likely tokens; vLLM wants no count, or exactly their number.
        asked.pop("logprobs", None)
    _check_bad_words(asked, context.vocab_size)
    if first_token_only:
        check_split(asked.get("n", 1), asked.get("prompt_logprobs"))
        # Decode samples, stops and counts; here a min_tokens above 1 would even be refused.
        for name in ("stop", "logprobs", "logprob_token_ids", "structured_outputs"):
            asked.pop(name, None)
        asked.update(n=1, max_tokens=1, min_tokens=0)
        asked["extra_args"] = {"kv_transfer_params": dict(_FOR_DECODE)}
    # Both frontends cut the text at a stop string themselves. The Rust one also cancels the
    # request; the vLLM-processor one (Dynamo 1.6.1) waits for the engine to end, and counts all
    # that it generates. So the engine stops there too, for which it has to make text.
    if not context.has_tokenizer:
        asked.pop("stop", None)
    needs_text = bool(asked.get("stop")) or asked.get("prompt_logprobs") is not None
    # No max_tokens: vLLM fills in what the model's length leaves after the expanded prompt.
    params = {"max_tokens": None, **context.defaults, **asked}
    try:
        return SamplingParams(
            **params,
            detokenize=needs_text and context.has_tokenizer,
            output_kind=RequestOutputKind.DELTA,
            # A shallow clone does, for `_known_params` too: what vLLM (0.31.0) changes in the
            # lists and sets of a clone depends on these options and the engine alone.
            skip_clone=True,
        )
    except (VLLMClientError, TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def check_split(n: int, prompt_logprobs: int | None) -> None:
    """Refuse what cannot be had where one worker computes the prompt and another the answer.

    Raises:
        UnsupportedOptionError: the client asked for it.
    """
    if n != 1:
        # NIXL's connector (vLLM 0.31.0) gives up the prompt's KV once the first choice has it,
        # and would read whatever comes there next for the others.
        raise UnsupportedOptionError(
            f"n={n} cannot be honoured by prefill and decode workers; send {n} requests"
        )
    if prompt_logprobs is not None:
        raise UnsupportedOptionError(
            "prompt_logprobs cannot be honoured by prefill and decode workers: the one that "
            "answers does not compute the prompt"
        )


def _check_bad_words(asked: Mapping[str, Any], vocab_size: int) -> None:
    """Check token ids that go around vLLM's own check, where a bad one would end the engine."""
    sequences = asked.get("_bad_words_token_ids")
    if not sequences:
        return
    if asked.get("bad_words"):
        raise RequestError("bad_words and bad_words_token_ids exclude each other")
    if not all(sequences):
        raise RequestError("bad_words_token_ids holds an empty list")
    for token in (token for sequence in sequences for token in sequence):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"bad_words_token_ids are token ids from 0 to {vocab_size - 1}, got {token}"
            )


def _structured_outputs(
    guided: Mapping[str, Any], engine_backend: str
) -> StructuredOutputsParams | None:
    """Guided decoding: exactly one constraint. vLLM compiles it later and refuses a bad one."""
    found = shared.constraint(guided, "vLLM", engine_backend)
    if found is None:
        return None
    name, value = found
    if name == "structural_tag" and not isinstance(value, str):
        value = json.dumps(value)
    try:
        return StructuredOutputsParams(**{name: value})
    except (VLLMClientError, TypeError, ValueError) as error:
        raise RequestError(f"guided_decoding.{name}: {error}") from error
