"""vLLM's ``RequestOutput`` as chunks; what a chunk is: `dynamo_worker_ext.worker.chunks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from dynamo_worker_ext.errors import EngineError
from dynamo_worker_ext.vllm.sampling import EngineCall
from dynamo_worker_ext.worker.chunks import Chunk, ChunkAssembler, Delta, PromptFacts, finite

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

#: vLLM's reasons in Dynamo's words. Repetition is a stop that Dynamo has no word for.
_FINISH: Final = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    "repetition": "stop",
}


class ChunkStream:
    """The chunks of one request. Lives in the worker, for one request.

    Args:
        call: what the engine was given.
        one_finish_reason: see `ChunkAssembler`.
    """

    def __init__(self, call: EngineCall, *, one_finish_reason: bool = True) -> None:
        self._wants_engine_data = call.wants_engine_data
        self._prompt = PromptFacts()
        self._assembler = ChunkAssembler(
            call.sampling_params.n,
            wants_engine_data=call.wants_engine_data,
            one_finish_reason=one_finish_reason,
        )

    def of(self, output: RequestOutput) -> Iterator[Chunk]:
        """The chunks of one of the engine's outputs, which are deltas.

        Raises:
            EngineError: the engine gave up on the request, or its output makes no sense.
        """
        prompt = self._prompt
        prompt.tokens = len(output.prompt_token_ids or ())
        if self._wants_engine_data:
            prompt.token_ids = list(output.prompt_token_ids or ())
        if output.num_cached_tokens is not None:
            # Choices that start later find what the first one stored: the least is true.
            known = output.num_cached_tokens if prompt.cached is None else prompt.cached
            prompt.cached = min(known, output.num_cached_tokens)
        if output.prompt_logprobs is not None and prompt.logprobs is None:
            prompt.logprobs = _prompt_logprobs(output.prompt_logprobs)
        for one in output.outputs:
            if one.finish_reason is None and one.logprobs is None:
                chunk = self._assembler.plain(one.index, list(one.token_ids))
                if chunk is not None:
                    yield chunk
                    continue
            yield from self._assembler.chunks(_delta(one), prompt)


def _delta(one: CompletionOutput) -> Delta:
    tokens = list(one.token_ids)
    delta = Delta(one.index, tokens)
    if one.logprobs is not None:
        delta.log_probs, delta.top_logprobs = _logprobs(tokens, one.logprobs)
    if one.finish_reason is not None:
        delta.finish_reason = _FINISH.get(one.finish_reason)
        if delta.finish_reason is None:
            raise EngineError(f"the engine ended the request with {one.finish_reason!r}")
        delta.stop_reason = one.stop_reason
    return delta


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
        own.append(finite(entries[token].logprob))
        top.append(
            [
                {"rank": one.rank or 0, "token_id": i, "logprob": finite(one.logprob)}
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
            entry: dict[str, Any] = {"logprob": finite(one.logprob)}
            if one.rank is not None:
                entry["rank"] = one.rank
            if one.decoded_token is not None:
                entry["decoded_token"] = one.decoded_token
            position[str(token)] = entry
        result.append(position)
    return result
