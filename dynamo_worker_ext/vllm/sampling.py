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
from dataclasses import dataclass, field
from typing import Any, Final

from dynamo.common.utils.guided_json import reject_nonprogressing_guided_json_ref_cycles
from dynamo.llm import HttpError
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from dynamo_worker_ext import options
from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError
from dynamo_worker_ext.kv_events.normalize import CACHE_SALT_PREFIX

#: What a frontend sends for -1, "the whole vocabulary", in an unsigned field.
_WHOLE_VOCABULARY: Final = 2**32 - 1


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
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 2**31
    guided_backend: str = "auto"
    has_tokenizer: bool = True
    first_dp_rank: int = 0
    dp_ranks: int = 1
    lora_names: Collection[str] = ()

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
    fields = options.section(extra, "nvext").get("extra_fields")
    return EngineCall(
        sampling_params=_sampling_params(request, context, first_token_only),
        # Dynamo: the larger, the sooner. vLLM: the smaller, the sooner.
        priority=-options.integer("priority", routing.get("priority") or 0),
        cache_salt=_cache_salt(request, extra, routing),
        data_parallel_rank=_dp_rank(routing, context),
        lora_name=_lora_name(request, routing, context),
        reasoning_ended=(
            None if reasoning_ended is None else options.flag("reasoning_ended", reasoning_ended)
        ),
        reasoning_parser_kwargs=(
            None if parser_kwargs is None else options.obj("reasoning_parser_kwargs", parser_kwargs)
        ),
        trace_headers=trace_headers,
        wants_engine_data=isinstance(fields, (list, tuple)) and "engine_data" in fields,
    )


def _count_of_logprobs(name: str, value: object) -> int:
    count = options.integer(name, value)
    return -1 if count == _WHOLE_VOCABULARY else count


# Where the name of the field of SamplingParams is None, a value is checked and not passed on.
_SAMPLING: Final[options.Table] = {
    "n": ("n", options.integer),
    "presence_penalty": ("presence_penalty", options.number),
    "frequency_penalty": ("frequency_penalty", options.number),
    "repetition_penalty": ("repetition_penalty", options.number),
    "temperature": ("temperature", options.number),
    "top_p": ("top_p", options.number),
    "top_k": ("top_k", options.integer),
    "min_p": ("min_p", options.number),
    "seed": ("seed", options.integer),
    "logit_bias": ("logit_bias", options.logit_bias),
    "allowed_token_ids": ("allowed_token_ids", options.token_ids),
    "bad_words": ("bad_words", options.texts),
    "bad_words_token_ids": ("_bad_words_token_ids", options.token_id_lists),
    "logprob_token_ids": ("logprob_token_ids", options.token_ids),
    "skip_reading_prefix_cache": ("skip_reading_prefix_cache", options.flag),
    # The frontends cut the text at a stop string; ours only ends the generation there.
    "include_stop_str_in_output": ("include_stop_str_in_output", options.flag),
    "guided_decoding": ("structured_outputs", options.obj),
    "best_of": ("best_of", options.integer),
    "use_beam_search": (None, options.only(False, "vLLM's engine has no beam search")),
    "length_penalty": (
        None,
        options.only(1.0, "it belongs to beam search, which vLLM's engine lacks"),
    ),
    # This worker's answer is token ids either way; the frontends make text of them.
    "detokenize": (None, options.flag),
}
_STOPPING: Final[options.Table] = {
    "max_tokens": ("max_tokens", options.integer),
    "min_tokens": ("min_tokens", options.integer),
    "ignore_eos": ("ignore_eos", options.flag),
    "stop": ("stop", options.text_or_texts),
    "stop_token_ids": ("stop_token_ids", options.token_ids),
    "stop_token_ids_visible": ("stop_token_ids_visible", options.token_ids),
    "stop_token_ids_hidden": ("stop_token_ids_hidden", options.token_ids),
    "max_thinking_tokens": ("thinking_token_budget", options.integer),
}
_OUTPUT: Final[options.Table] = {
    "logprobs": ("logprobs", _count_of_logprobs),
    "prompt_logprobs": ("prompt_logprobs", _count_of_logprobs),
    "skip_special_tokens": ("skip_special_tokens", options.flag),
    # The frontends keep the prompt's text and write logprobs' tokens as ids themselves.
    "formatted_prompt": (None, options.flag),
    "return_tokens_as_token_ids": (None, options.flag),
}


def _sampling_params(
    request: Mapping[str, Any], context: SamplingContext, first_token_only: bool
) -> SamplingParams:
    by_token_id = options.section(options.section(request, "extra_args"), "sampling_options")
    asked = {
        **options.read("sampling_options", options.section(request, "sampling_options"), _SAMPLING),
        **options.read("extra_args.sampling_options", by_token_id, _SAMPLING),
        **options.read("stop_conditions", options.section(request, "stop_conditions"), _STOPPING),
        **options.read("output_options", options.section(request, "output_options"), _OUTPUT),
    }
    if (best_of := asked.pop("best_of", None)) not in (None, asked.get("n", 1)):
        raise UnsupportedOptionError(
            f"best_of={best_of} cannot be honoured: vLLM returns what it generates; "
            "leave it out or make it equal to n"
        )
    stop_token_ids = [
        token
        for name in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
        for token in asked.pop(name, ())
    ]
    if stop_token_ids:
        asked["stop_token_ids"] = stop_token_ids
    if (guided := asked.pop("structured_outputs", None)) is not None:
        asked["structured_outputs"] = _structured_outputs(guided, context.guided_backend)
    if asked.get("logprob_token_ids"):
        # These replace the most likely tokens; vLLM wants no count, or exactly their number.
        asked.pop("logprobs", None)
    _check_bad_words(asked, context.vocab_size)
    if first_token_only:
        # Decode samples, stops and counts; here a min_tokens above 1 would even be refused.
        for name in ("stop", "logprobs", "prompt_logprobs", "logprob_token_ids"):
            asked.pop(name, None)
        asked.update(n=1, max_tokens=1, min_tokens=0)
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
            skip_clone=True,  # made for this request alone
        )
    except (VLLMClientError, TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


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


_CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "structural_tag")


def _structured_outputs(
    guided: Mapping[str, Any], engine_backend: str
) -> StructuredOutputsParams | None:
    """Guided decoding: exactly one constraint. vLLM compiles it later and refuses a bad one."""
    given = {name: value for name, value in guided.items() if value is not None}
    if not given:
        return None
    backend = given.pop("backend", None)
    if backend not in (None, "auto", engine_backend):
        raise UnsupportedOptionError(
            f"guided_decoding.backend={options.short(backend)} cannot be honoured: vLLM has no "
            f"choice of backend for one request; this engine runs with {engine_backend!r}"
        )
    for name in given:
        if name not in _CONSTRAINTS:
            # whitespace_pattern among them: vLLM 0.31 has the field, but no backend reads it.
            raise UnsupportedOptionError(f"guided_decoding.{name} cannot be honoured by vLLM")
    if len(given) != 1:
        raise RequestError(
            f"guided decoding takes exactly one of {', '.join(_CONSTRAINTS)}; "
            f"got {', '.join(given) or 'none'}"
        )
    ((name, value),) = given.items()
    where = f"guided_decoding.{name}"
    if name == "choice":
        value = options.texts(where, value)
    elif name in ("regex", "grammar"):
        value = options.text(where, value)
    elif not isinstance(value, str):
        value = options.obj(where, value)
    if name == "json":
        try:
            # A schema that refers to itself without end hangs the grammar compiler.
            reject_nonprogressing_guided_json_ref_cycles(value)
        except HttpError as error:
            raise RequestError(f"{where}: {error.message}") from error
    if name == "structural_tag" and not isinstance(value, str):
        value = json.dumps(value)
    try:
        return StructuredOutputsParams(**{name: value})
    except (VLLMClientError, TypeError, ValueError) as error:
        raise RequestError(f"{where}: {error}") from error


def _cache_salt(
    request: Mapping[str, Any], extra: Mapping[str, Any], routing: Mapping[str, Any]
) -> str | None:
    for source in (routing, options.section(extra, "nvext"), options.section(request, "nvext")):
        if salt := source.get("cache_salt"):
            return CACHE_SALT_PREFIX + options.text("cache_salt", salt)
    return None


def _dp_rank(routing: Mapping[str, Any], context: SamplingContext) -> int | None:
    if (rank := routing.get("dp_rank")) is None:
        return None
    local = options.integer("dp_rank", rank) - context.first_dp_rank
    if not 0 <= local < context.dp_ranks:
        last = context.first_dp_rank + context.dp_ranks - 1
        raise UnsupportedOptionError(
            f"dp_rank={rank}: this worker has ranks {context.first_dp_rank} to {last}"
        )
    return local if context.dp_ranks > 1 else None


def _lora_name(
    request: Mapping[str, Any], routing: Mapping[str, Any], context: SamplingContext
) -> str | None:
    if name := routing.get("lora_name"):
        if name not in context.lora_names:
            known = ", ".join(sorted(context.lora_names)) or "none"
            raise UnsupportedOptionError(
                f"LoRA {options.short(name)} is not loaded; loaded: {known}"
            )
        return str(name)
    # The vLLM-processor frontend names the adapter only here; any other name is the base model's.
    model = request.get("model")
    return model if isinstance(model, str) and model in context.lora_names else None
