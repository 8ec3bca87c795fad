"""From vLLM's ``RequestOutput`` to the chunks that Dynamo's frontends read.

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

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from dynamo_worker_ext.errors import EngineError
from dynamo_worker_ext.vllm.sampling import EngineCall

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

Chunk = dict[str, Any]

#: vLLM's reasons in Dynamo's words. Repetition is a stop that Dynamo has no word for.
_FINISH: Final = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    "repetition": "stop",
}

#: JSON has no infinity, and a frontend would show null; vLLM's own server writes this as well.
_LEAST_LOGPROB: Final = -9999.0


class ChunkStream:
    """The chunks of one request, of all its choices. Lives in the worker, for one request.

    Args:
        call: what the engine was given.
        one_finish_reason: send a single chunk with a ``finish_reason``, after everything else.
            Dynamo's Backend SDK (1.6.1) ends the stream at the first such chunk, so that with
            n > 1 the rest of the other choices would be lost. It is given to the choice that ran
            to its length, if there is one: the Rust frontend sees for itself where a choice
            stopped. False where chunks go to a frontend without that adapter.
    """

    def __init__(self, call: EngineCall, *, one_finish_reason: bool = True) -> None:
        self._n: int = call.sampling_params.n
        self._one_finish_reason = one_finish_reason
        self._announced = False
        self._cached: int | None = None
        self._prompt_logprobs: list[Any] | None = None
        self._counts: dict[int, int] = {}
        self._last: Chunk | None = None
        self._finished = 0
        self._record: dict[int, tuple[list[int], list[float]]] | None = (
            {} if call.wants_engine_data else None
        )

    def of(self, output: RequestOutput) -> Iterator[Chunk]:
        """The chunks of one of the engine's outputs, which are deltas.

        Raises:
            EngineError: the engine gave up on the request, or its output makes no sense.
        """
        if output.num_cached_tokens is not None:
            # Choices that start later find what the first one stored: the least is true.
            known = output.num_cached_tokens if self._cached is None else self._cached
            self._cached = min(known, output.num_cached_tokens)
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = _prompt_logprobs(output.prompt_logprobs)
        for one in output.outputs:
            yield from self._of_choice(output, one)

    def _of_choice(self, output: RequestOutput, one: CompletionOutput) -> Iterator[Chunk]:
        tokens = list(one.token_ids)
        delta: Chunk = {"index": one.index, "token_ids": tokens}
        self._counts[one.index] = self._counts.get(one.index, 0) + len(tokens)
        if one.logprobs is not None:
            delta["log_probs"], delta["top_logprobs"] = _logprobs(tokens, one.logprobs)
        if self._record is not None:
            ids, logprobs = self._record.setdefault(one.index, ([], []))
            ids += tokens
            logprobs += delta.get("log_probs", ())

        if one.finish_reason is None:
            if tokens:
                yield self._with_first_usage(delta, output)
            return
        finish = self._finish(output, one)
        self._finished += 1
        is_last = self._finished == self._n
        together = isinstance(one.stop_reason, str) or (self._one_finish_reason and self._n > 1)
        if not together:
            yield finish | delta
            return
        if tokens:
            yield self._with_first_usage(delta, output)
        if not self._one_finish_reason:
            yield finish
            return
        if self._last is None or self._last["finish_reason"] != "length":
            self._last = finish
        if is_last:
            yield self._last | {"completion_usage": self._usage(output)}

    def _finish(self, output: RequestOutput, one: CompletionOutput) -> Chunk:
        """The end of one choice, without tokens."""
        reason = _FINISH.get(one.finish_reason or "")
        if reason is None:
            raise EngineError(f"the engine ended the request with {one.finish_reason!r}")
        chunk: Chunk = {
            "index": one.index,
            "token_ids": [],
            "finish_reason": reason,
            "completion_usage": self._usage(output),
        }
        if one.stop_reason is not None:
            chunk["stop_reason"] = one.stop_reason
        data: dict[str, Any] = {}
        if self._record is not None:
            ids, logprobs = self._record.pop(one.index)
            data = {
                "prompt_token_ids": list(output.prompt_token_ids or ()),
                "completion_token_ids": ids,
                "finished": True,
            }
            if logprobs:
                data["completion_logprobs"] = logprobs
        if self._prompt_logprobs is not None:
            data["prompt_logprobs"] = self._prompt_logprobs
        if data:
            chunk["engine_data"] = data
        return chunk

    def _with_first_usage(self, delta: Chunk, output: RequestOutput) -> Chunk:
        if not self._announced:
            self._announced = True
            delta["completion_usage"] = self._usage(output)
        return delta

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Of the whole request: the sum over its choices so far."""
        prompt, completion = len(output.prompt_token_ids or ()), sum(self._counts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": (
                None if self._cached is None else {"cached_tokens": self._cached}
            ),
        }


def _logprobs(
    tokens: Sequence[int], positions: Sequence[dict[int, Logprob]]
) -> tuple[list[float], list[list[dict[str, Any]]]]:
    """Of each token its own logprob, and the entries of its position.

    Frontends align them with the tokens by position alone: a list of another length would put
    every later one at the wrong token.
    """
    if len(positions) != len(tokens):
        raise EngineError(f"the engine gave {len(positions)} logprobs for {len(tokens)} tokens")
    own, top = [], []
    for token, entries in zip(tokens, positions, strict=True):
        if token not in entries:
            raise EngineError(f"the engine gave no logprob for token {token}")
        own.append(_finite(entries[token].logprob))
        top.append(
            [
                {"rank": one.rank or 0, "token_id": i, "logprob": _finite(one.logprob)}
                for i, one in entries.items()
            ]
        )
    return own, top


def _prompt_logprobs(positions: Sequence[dict[int, Logprob] | None]) -> list[Any]:
    """Token ids become strings, as they are keys of JSON objects. The first token has none."""
    result: list[Any] = []
    for entries in positions:
        if entries is None:
            result.append(None)
            continue
        position = {}
        for token, one in entries.items():
            entry: dict[str, Any] = {"logprob": _finite(one.logprob)}
            if one.rank is not None:
                entry["rank"] = one.rank
            if one.decoded_token is not None:
                entry["decoded_token"] = one.decoded_token
            position[str(token)] = entry
        result.append(position)
    return result


def _finite(logprob: float) -> float:
    return float(logprob) if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
