"""What a prefill worker tells the decode worker that continues a request.

It travels as ``disaggregated_params`` of the prefill worker's answer, which the frontend passes on:

    host, port, room                    where the KV cache is fetched
    media                               of a request with media, else null:
        token_ids                           the prompt as the KV cache has it
        items [{mm_hash, modality, spans}]  which tokens of it stand for which item
        mrope_position_delta                see below

(With the names that Dynamo gives to the first three, ``bootstrap_host`` and so on, its router takes
them for all there is and drops the rest, 1.6.1.)

The decode worker needs no more of the media than this, and could have it from nobody else: the
frontend's request has neither the expanded prompt in every case nor the sizes of the images. Models
with multimodal rotary embeddings (mRoPE) place each new token at its index plus one number, which
follows from the media's grids; SGLang (0.5.21) calls it ``mrope_position_delta``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from dynamo_worker_ext.errors import HandoffError
from dynamo_worker_ext.sglang.sampling import Bootstrap
from dynamo_worker_ext.wire import MAX_ITEMS, Modality

_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Host = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:\-\[\]%]{1,255}\Z")]
_Port = Annotated[int, msgspec.Meta(gt=0, lt=2**16)]
_Room = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Delta = Annotated[int, msgspec.Meta(gt=-(2**31), lt=2**31)]


class HandedItem(msgspec.Struct, frozen=True):
    """One media item that is in the KV cache.

    Attributes:
        mm_hash: the engine's identity of it, 16 hex.
        modality: its kind.
        spans: [first, last] of each run of tokens that stands for it.
    """

    mm_hash: _Hash
    modality: Modality
    spans: tuple[tuple[_Index, _Index], ...]


class HandedMedia(msgspec.Struct, frozen=True):
    """What is to be known of a request's media to continue it.

    Attributes:
        token_ids: the expanded prompt.
        items: in the order of the engine.
        mrope_position_delta: None for a model without mRoPE.
    """

    token_ids: list[_Index]
    items: Annotated[tuple[HandedItem, ...], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    mrope_position_delta: _Delta | None = None


class Handoff(msgspec.Struct, frozen=True):
    """All that a decode worker is told; see the module."""

    host: _Host
    port: _Port
    room: _Room
    media: HandedMedia | None = None

    @property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap(self.host, self.port, self.room)

    def to_params(self) -> dict[str, Any]:
        """As ``disaggregated_params``: plain JSON types."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params


def parse_handoff(request: Mapping[str, Any], *, vocabulary: int) -> Handoff:
    """What came from the prefill worker.

    Args:
        request: the request as the Backend SDK hands it to ``generate``.
        vocabulary: number of token ids.

    Raises:
        HandoffError: there is nothing, or it is malformed.
    """
    result = request.get("prefill_result")
    if result is None:
        raise HandoffError(
            "a decode worker only continues what a prefill worker has begun, and this request "
            "comes from none; start a prefill worker for this model",
            reason="missing",
        )
    params = result.get("disaggregated_params") if isinstance(result, Mapping) else None
    try:
        handoff = msgspec.convert(params, Handoff)
    except msgspec.ValidationError as error:
        raise HandoffError(
            f"prefill_result.disaggregated_params is not what this package's SGLang prefill "
            f"worker writes: {error}",
            reason="invalid",
        ) from error
    if handoff.media is not None:
        _check_media(handoff.media, vocabulary)
    return handoff


def _check_media(media: HandedMedia, vocabulary: int) -> None:
    tokens = media.token_ids
    if any(token >= vocabulary for token in tokens):
        raise HandoffError(
            f"the handed prompt has token ids above {vocabulary - 1}", reason="invalid"
        )
    end = -1
    for first, last in sorted(span for item in media.items for span in item.spans):
        if not end < first <= last < len(tokens):
            raise HandoffError(
                f"the span [{first}, {last}] of a media item overlaps another one or leaves the "
                f"handed prompt of {len(tokens)} tokens",
                reason="invalid",
            )
        end = last
