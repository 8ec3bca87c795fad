"""From what an engine generated to the chunks that Dynamo's frontends read, for both engines.

A chunk is ``{"index", "token_ids"}`` with, where there is something to say, ``log_probs`` and
``top_logprobs`` (aligned with the tokens), ``finish_reason``, ``stop_reason``,
``completion_usage`` and ``engine_data``. What Dynamo 1.6.1's frontends make of them:

- Both count completion tokens themselves. From ``completion_usage`` they take the prompt's length
  and the cached tokens, and the vLLM-processor one has to know them before it sees a stop string,
  so the first chunk carries it as well as the last.
- With ``finish_reason: stop`` the vLLM-processor frontend leaves out the text of the last token,
  as is right for an EOS or stop token. After a stop string the tokens therefore come first and
  the reason in a chunk of its own.
- Both make the text of ``top_logprobs`` themselves if a chunk has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

Chunk = dict[str, Any]

#: JSON has no infinity, and a frontend would show null; vLLM's own server writes this as well.
_LEAST_LOGPROB: Final = -9999.0


@dataclass(slots=True)
class Delta:
    """What one choice has generated since the last one.

    Attributes:
        index: of the choice.
        token_ids: the new tokens.
        log_probs: of each of them its logprob; None if nobody asked.
        top_logprobs: of each of them the entries of its position.
        finish_reason: in Dynamo's words (``stop``, ``length``, ``cancelled``), None before the end.
        stop_reason: the stop string or token that ended it.
    """

    index: int
    token_ids: list[int]
    log_probs: list[float] | None = None
    top_logprobs: list[list[dict[str, Any]]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class PromptFacts:
    """What is known of the prompt once the engine has seen it.

    Attributes:
        tokens: its length after expansion.
        cached: tokens that came from the prefix cache; None if the engine does not say.
        token_ids: after expansion; only for ``engine_data``.
        logprobs: as ``engine_data`` has them.
    """

    tokens: int = 0
    cached: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None


class ChunkAssembler:
    """The chunks of one request, of all its choices. Lives in the worker, for one request.

    Args:
        n: number of choices.
        wants_engine_data: the client opted into ``nvext.engine_data``.
        one_finish_reason: send a single chunk with a ``finish_reason``, after everything else.
            Dynamo's Backend SDK (1.6.1) ends the stream at the first such chunk, so that with
            n > 1 the rest of the other choices would be lost. It is given to the choice that ran
            to its length, if there is one: the Rust frontend sees for itself where a choice
            stopped. False where chunks go to a frontend without that adapter.
    """

    def __init__(
        self, n: int, *, wants_engine_data: bool = False, one_finish_reason: bool = True
    ) -> None:
        self._n = n
        self._one_finish_reason = one_finish_reason
        self._announced = False
        self._counts: dict[int, int] = {}
        self._last: Chunk | None = None
        self._finished = 0
        self._record: dict[int, tuple[list[int], list[float]]] | None = (
            {} if wants_engine_data else None
        )

    def plain(self, index: int, token_ids: list[int]) -> Chunk | None:
        """The chunk of new tokens with nothing else to say, which nearly all are; None where
        there is more, and `chunks` has to say it."""
        if not self._announced or self._record is not None or not token_ids:
            return None
        self._counts[index] = self._counts.get(index, 0) + len(token_ids)
        return {"index": index, "token_ids": token_ids}

    def chunks(self, one: Delta, prompt: PromptFacts) -> Iterator[Chunk]:
        """The chunks that say `one`."""
        tokens = one.token_ids
        delta: Chunk = {"index": one.index, "token_ids": tokens}
        self._counts[one.index] = self._counts.get(one.index, 0) + len(tokens)
        if one.log_probs is not None:
            delta["log_probs"], delta["top_logprobs"] = one.log_probs, one.top_logprobs
        if self._record is not None:
            ids, logprobs = self._record.setdefault(one.index, ([], []))
            ids += tokens
            logprobs += one.log_probs or ()

        if one.finish_reason is None:
            if tokens:
                yield self._with_first_usage(delta, prompt)
            return
        finish = self._finish(one, prompt)
        self._finished += 1
        is_last = self._finished == self._n
        together = isinstance(one.stop_reason, str) or (self._one_finish_reason and self._n > 1)
        if not together:
            yield finish | delta
            return
        if tokens:
            yield self._with_first_usage(delta, prompt)
        if not self._one_finish_reason:
            yield finish
            return
        if self._last is None or self._last["finish_reason"] != "length":
            self._last = finish
        if is_last:
            yield self._last | {"completion_usage": self._usage(prompt)}

    def _finish(self, one: Delta, prompt: PromptFacts) -> Chunk:
        """The end of one choice, without tokens."""
        chunk: Chunk = {
            "index": one.index,
            "token_ids": [],
            "finish_reason": one.finish_reason,
            "completion_usage": self._usage(prompt),
        }
        if one.stop_reason is not None:
            chunk["stop_reason"] = one.stop_reason
        data: dict[str, Any] = {}
        if self._record is not None:
            ids, logprobs = self._record.pop(one.index)
            data = {
                "prompt_token_ids": list(prompt.token_ids),
                "completion_token_ids": ids,
                "finished": True,
            }
            if logprobs:
                data["completion_logprobs"] = logprobs
        if prompt.logprobs is not None:
            data["prompt_logprobs"] = prompt.logprobs
        if data:
            chunk["engine_data"] = data
        return chunk

    def _with_first_usage(self, delta: Chunk, prompt: PromptFacts) -> Chunk:
        if not self._announced:
            self._announced = True
            delta["completion_usage"] = self._usage(prompt)
        return delta

    def _usage(self, prompt: PromptFacts) -> dict[str, Any]:
        """Of the whole request: the sum over its choices so far."""
        completion = sum(self._counts.values())
        return {
            "prompt_tokens": prompt.tokens,
            "completion_tokens": completion,
            "total_tokens": prompt.tokens + completion,
            "prompt_tokens_details": (
                None if prompt.cached is None else {"cached_tokens": prompt.cached}
            ),
        }


def finite(logprob: float) -> float:
    """A logprob that JSON can carry."""
    return float(logprob) if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
