"""SGLang's output as chunks; what a chunk is: `dynamo_worker_ext.worker.chunks`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dynamo_worker_ext.errors import EngineError
from dynamo_worker_ext.sglang.errors import of_abort
from dynamo_worker_ext.sglang.sampling import EngineCall
from dynamo_worker_ext.worker.chunks import Chunk, ChunkAssembler, Delta, PromptFacts, finite

#: SGLang's reasons in Dynamo's words.
_FINISH: Final = {"stop": "stop", "length": "length", "abort": "cancelled"}


class ChunkStream:
    """The chunks of one request. Lives in the worker, for one request.

    Args:
        call: what the engine was given.
        token_ids: the prompt as it was given; for ``engine_data``.
    """

    def __init__(self, call: EngineCall, token_ids: Sequence[int]) -> None:
        self._call = call
        self._prompt = PromptFacts()
        if call.wants_engine_data:
            self._prompt.token_ids = list(token_ids)
        stops = call.sampling_params.get("stop_token_ids") or ()
        self._stop_token_ids = frozenset(stops)
        self._assembler = ChunkAssembler(call.n, wants_engine_data=call.wants_engine_data)

    def of(self, output: Mapping[str, Any]) -> Iterator[Chunk]:
        """The chunks of one of the engine's outputs, whose ``output_ids`` are new tokens.

        Raises:
            RequestError: the engine refused the request.
            EngineError: the engine gave up on it, or its output makes no sense.
        """
        meta = output["meta_info"]
        prompt = self._prompt
        prompt.tokens = meta.get("prompt_tokens") or prompt.tokens
        if (cached := meta.get("cached_tokens")) is not None:
            # With n > 1 the choices find what a first pass over the prompt has stored.
            prompt.cached = cached if prompt.cached is None else min(prompt.cached, cached)
        if self._call.logprob_start_len == 0 and prompt.logprobs is None:
            prompt.logprobs = _prompt_logprobs(meta)
        yield from self._assembler.chunks(self._delta(output, meta), prompt)

    def _delta(self, output: Mapping[str, Any], meta: Mapping[str, Any]) -> Delta:
        index = output.get("index") or 0
        tokens = list(output.get("output_ids") or ())
        reason = meta.get("finish_reason")
        if reason is not None and reason["type"] == "abort" and (error := of_abort(reason)):
            raise error
        delta = Delta(index, tokens)
        if self._call.return_logprob:
            delta.log_probs, delta.top_logprobs = self._logprobs(index, tokens, meta)
        if reason is not None:
            delta.finish_reason = _FINISH.get(reason["type"])
            if delta.finish_reason is None:
                raise EngineError(f"the engine ended the request with {reason['type']!r}")
            matched = reason.get("matched")
            # An EOS is no stop that the client asked for.
            if isinstance(matched, str) or matched in self._stop_token_ids:
                delta.stop_reason = matched
        return delta

    def _logprobs(
        self, index: int, tokens: Sequence[int], meta: Mapping[str, Any]
    ) -> tuple[list[float], list[list[dict[str, Any]]]]:
        """Of each new token its own logprob, and the entries of its position.

        SGLang 0.5.21 sends those of all tokens so far, or with incremental output of the new ones.
        """
        own = meta.get("output_token_logprobs") or []
        top = meta.get("output_top_logprobs") or [None] * len(own)
        if len(own) < len(tokens):
            raise EngineError(f"the engine gave {len(own)} logprobs for {len(tokens)} tokens")
        new = slice(len(own) - len(tokens), None)
        values, entries = [], []
        for token, (logprob, token_id, _), others in zip(tokens, own[new], top[new], strict=True):
            if token_id != token:
                raise EngineError(f"the engine gave the logprob of {token_id} for token {token}")
            values.append(finite(logprob))
            position = {token_id: logprob, **{i: value for value, i, _ in others or ()}}
            ranked = sorted(position.items(), key=lambda one: -one[1])
            entries.append(
                [
                    {"rank": rank, "token_id": i, "logprob": finite(value)}
                    for rank, (i, value) in enumerate(ranked, start=1)
                ]
            )
        return values, entries


def _prompt_logprobs(meta: Mapping[str, Any]) -> list[Any] | None:
    """Token ids become strings, as they are keys of JSON objects. The first token has none."""
    own = meta.get("input_token_logprobs")
    if not own:
        return None
    top = meta.get("input_top_logprobs") or [None] * len(own)
    result: list[Any] = []
    for (logprob, token_id, _), others in zip(own, top, strict=True):
        if logprob is None:
            result.append(None)
            continue
        position = {token_id: logprob, **{i: value for value, i, _ in others or ()}}
        result.append({str(i): {"logprob": finite(value)} for i, value in position.items()})
    return result
