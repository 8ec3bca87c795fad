"""What both engines make alike of a client's sampling options; see `options` for the readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynamo.common.utils.guided_json import reject_nonprogressing_guided_json_ref_cycles
from dynamo.llm import HttpError

from dynamo_worker_ext import options
from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError

#: Options that both engines call as the request does.
SAMPLING: Final[options.Table] = {
    "n": ("n", options.integer),
    "presence_penalty": ("presence_penalty", options.number),
    "frequency_penalty": ("frequency_penalty", options.number),
    "repetition_penalty": ("repetition_penalty", options.number),
    "temperature": ("temperature", options.number),
    "top_p": ("top_p", options.number),
    "top_k": ("top_k", options.integer),
    "min_p": ("min_p", options.number),
    "logit_bias": ("logit_bias", options.logit_bias),
    "best_of": ("best_of", options.integer),
    # A worker's answer is token ids either way; the frontends make text of them.
    "detokenize": (None, options.flag),
}
STOPPING: Final[options.Table] = {
    "ignore_eos": ("ignore_eos", options.flag),
    "stop": ("stop", options.text_or_texts),
    "stop_token_ids": ("stop_token_ids", options.token_ids),
    "stop_token_ids_visible": ("stop_token_ids_visible", options.token_ids),
    "stop_token_ids_hidden": ("stop_token_ids_hidden", options.token_ids),
}
OUTPUT: Final[options.Table] = {
    "skip_special_tokens": ("skip_special_tokens", options.flag),
    # The frontends keep the prompt's text and write logprobs' tokens as ids themselves.
    "formatted_prompt": (None, options.flag),
    "return_tokens_as_token_ids": (None, options.flag),
}

_CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "structural_tag")


def constraint(guided: Mapping[str, Any], engine: str, backend: str) -> tuple[str, Any] | None:
    """The one constraint of guided decoding, checked as far as no compiler is needed.

    Args:
        guided: the request's section of that name.
        engine: what to call the engine in an error.
        backend: what it compiles all grammars with.

    Returns:
        Name and value: ``choice`` strings, ``regex`` and ``grammar`` a string, ``json`` and
        ``structural_tag`` a string or an object. None if nothing is asked for.

    Raises:
        UnsupportedOptionError: the engine cannot do it.
        RequestError: it is malformed, or there is more than one.
    """
    given = {name: value for name, value in guided.items() if value is not None}
    if not given:
        return None
    asked = given.pop("backend", None)
    if asked not in (None, "auto", backend):
        raise UnsupportedOptionError(
            f"guided_decoding.backend={options.short(asked)} cannot be honoured: {engine} has no "
            f"choice of backend for one request; this engine runs with {backend!r}"
        )
    for name in given:
        if name not in _CONSTRAINTS:
            # whitespace_pattern among them: vLLM 0.31 has the field, but no backend reads it.
            raise UnsupportedOptionError(f"guided_decoding.{name} cannot be honoured by {engine}")
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
    return name, value


def check_best_of(asked: dict[str, Any]) -> None:
    """Take ``best_of`` out of `asked`, where it changes nothing.

    Raises:
        UnsupportedOptionError: it would.
    """
    if (best_of := asked.pop("best_of", None)) not in (None, asked.get("n", 1)):
        raise UnsupportedOptionError(
            f"best_of={best_of} cannot be honoured: the engine returns what it generates; "
            "leave it out or make it equal to n"
        )


def all_stop_token_ids(asked: dict[str, Any]) -> list[int]:
    """Take the stop tokens out of `asked`: the client's, and what a frontend adds to them."""
    return [
        token
        for name in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
        for token in asked.pop(name, ())
    ]
