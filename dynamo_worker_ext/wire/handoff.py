"""What a prefill worker hands to decode: ``disaggregated_params`` of its answer, checked.

    version              of this form
    kv_transfer_params   where the prompt's KV lies, in the words of the engine's KV connector
    block_size           tokens of a block of that KV
    prompt               the expanded prompt; a run of one token is the pair [token, count]
    media                of each item: modality, mm_hash, offset, length, is_embed, facts

With it decode needs neither the media nor the model's processor: identity and place of each item
make its blocks the same as everywhere, and the facts (a grid, a length, a duration; never pixels)
are what positions are computed from. The frontend carries it as JSON, so it is small, and comes
back over the wire, so that nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import Annotated, Any, Final, Literal

import msgspec

from dynamo_worker_ext.errors import HandoffError
from dynamo_worker_ext.wire.transfer import short
from dynamo_worker_ext.wire.types import MAX_ITEMS, Modality, Placeholder

VERSION: Final = 1

#: Values of one fact: a fact is a handful of numbers.
MAX_FACT_VALUES: Final = 64

#: A shorter run is shorter as it is.
_SHORTEST_RUN: Final = 4

_MAX_TOKEN: Final = 2**31
_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Parallel = Annotated[int, msgspec.Meta(ge=1, le=4096)]


Dtype = Literal["bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A few numbers of one media item.

    Attributes:
        dtype: of the tensor they were.
        shape: of that tensor; () for a single number.
        values: of that tensor, flat.
    """

    dtype: Dtype
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_FACT_VALUES)], ...],
        msgspec.Meta(max_length=8),
    ]
    values: Annotated[tuple[bool | int | float, ...], msgspec.Meta(max_length=MAX_FACT_VALUES)]


class HandedItem(msgspec.Struct, frozen=True):
    """One media item of a prompt whose KV is already there.

    Attributes:
        modality: of the item.
        mm_hash: its identity, as the prefill engine has it in its blocks.
        placeholder: where it stands in the expanded prompt.
        facts: by the names that the engine has for them.
    """

    modality: Modality
    mm_hash: str
    placeholder: Placeholder
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True)
class Handoff:
    """What one prompt's decode starts from.

    Attributes:
        token_ids: the expanded prompt.
        media: its items.
        kv: where the KV lies, in the KV connector's words; None where the connector finds it by
            the prompt alone.
        block_size: tokens of a block on the prefill worker.
    """

    token_ids: list[int]
    media: tuple[HandedItem, ...]
    kv: Mapping[str, Any] | None
    block_size: int


class _Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    modality: Modality
    mm_hash: _Text
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]
    is_embed: list[tuple[bool, _Count]] | None = None
    facts: Annotated[dict[_Text, Fact], msgspec.Meta(max_length=MAX_FACT_VALUES)] = {}


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    # No fixed-length tuples of bounded numbers: msgspec 0.22.0 crashes on a union of such with a
    # bounded number.
    prompt: list[int | list[int]]
    media: Annotated[list[_Item], msgspec.Meta(max_length=MAX_ITEMS)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    kv_transfer_params: dict[str, Any] | None


class _NixlKv(msgspec.Struct, frozen=True):
    """What NIXL's connector reads of its parameters. vLLM 0.31.0 does not check them: without one
    of these it computes the prompt anew, and some values end the engine."""

    do_remote_prefill: Literal[True]
    remote_engine_id: _Text
    remote_request_id: _Text
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    remote_block_ids: Annotated[
        list[Annotated[list[_BlockId], msgspec.Meta(min_length=1)]],
        msgspec.Meta(min_length=1, max_length=64),
    ]
    tp_size: _Parallel
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    do_remote_decode: Literal[False] = False
    dcp_size: _Parallel = 1
    pp_size: _Parallel = 1
    remote_blocks_expiry_time: float | None = None
    transfer_mode: Literal["pull"] = "pull"


def write_handoff(handoff: Handoff) -> dict[str, Any]:
    """`handoff` as plain JSON values."""
    return {
        "version": VERSION,
        "kv_transfer_params": None if handoff.kv is None else dict(handoff.kv),
        "block_size": handoff.block_size,
        "prompt": _runs(handoff.token_ids),
        "media": [
            {
                "modality": item.modality,
                "mm_hash": item.mm_hash,
                "offset": item.placeholder.offset,
                "length": item.placeholder.length,
                "is_embed": _pairs(item.placeholder.is_embed),
                "facts": {name: msgspec.to_builtins(fact) for name, fact in item.facts.items()},
            }
            for item in handoff.media
        ],
    }


def parse_handoff(prefill_result: object, *, max_tokens: int, uses_nixl: bool) -> Handoff:
    """Read what prefill left.

    Args:
        prefill_result: of the request, as the Backend SDK hands it to ``generate``.
        max_tokens: the longest prompt of the model.
        uses_nixl: the engine's KV connector is NIXL's, so that the parameters are too.

    Raises:
        HandoffError: there is none, or it is malformed.
    """
    if prefill_result is None:
        raise HandoffError(
            "this is a decode worker and the request comes without the work of a prefill worker "
            "(prefill_result); start one, or a worker with --disaggregation-mode agg",
            reason="missing",
        )
    form = _convert("prefill_result", prefill_result, dict[str, Any])
    params = _convert("disaggregated_params", form.get("disaggregated_params"), _Form)
    if params.version != VERSION:
        raise _invalid(
            f"version {params.version}, and this worker reads {VERSION}; run one release of "
            "dynamo-worker-ext on both sides"
        )
    tokens = _tokens(params.prompt, max_tokens)
    total = len(tokens)
    media = tuple(_item(item, total) for item in params.media)
    ordered = sorted((item.placeholder for item in media), key=lambda where: where.offset)
    for before, after in pairwise(ordered):
        if after.offset < before.end:
            raise _invalid(f"placeholders overlap at {after.offset}")
    kv = params.kv_transfer_params
    if uses_nixl:
        _check_nixl(kv, total, params.block_size)
    return Handoff(tokens, media, kv, params.block_size)


def _tokens(runs: Sequence[int | list[int]], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    for run in runs:
        if isinstance(run, int):
            token, count = run, 1
        elif len(run) == 2:
            token, count = run
        else:
            raise _invalid(f"prompt has a run of {len(run)} numbers instead of token and count")
        if not 0 <= token < _MAX_TOKEN or not 1 <= count <= max_tokens - len(tokens):
            raise _invalid(
                f"prompt has {count} token(s) {token} at {len(tokens)}; there may be {max_tokens} "
                f"tokens in all, from 0 to {_MAX_TOKEN - 1}"
            )
        tokens += [token] * count
    if not tokens:
        raise _invalid("prompt is empty")
    return tokens


def _item(item: _Item, total: int) -> HandedItem:
    if item.offset + item.length > total:
        raise _invalid(
            f"placeholder ({item.offset}, {item.length}) lies outside the prompt of {total} tokens"
        )
    mask: tuple[bool, ...] | None = None
    if item.is_embed is not None:
        if sum(count for _, count in item.is_embed) != item.length:
            raise _invalid(f"is_embed does not have {item.length} entries")
        mask = tuple(flag for flag, count in item.is_embed for _ in range(count))
    for name, fact in item.facts.items():
        if prod(fact.shape) != len(fact.values):
            raise _invalid(f"{short(name)} has shape {fact.shape} and {len(fact.values)} values")
        if not all(-(2**53) <= value <= 2**53 for value in fact.values):  # not for NaN either
            raise _invalid(f"{short(name)} has values that are out of range")
    return HandedItem(
        item.modality, item.mm_hash, Placeholder(item.offset, item.length, mask), item.facts
    )


def _check_nixl(kv: Mapping[str, Any] | None, total: int, block_size: int) -> None:
    nixl = _convert("kv_transfer_params", kv, _NixlKv)
    # With several groups some keep a window of the prompt only.
    if len(nixl.remote_block_ids) == 1 and (
        len(nixl.remote_block_ids[0]) * block_size < min(total, nixl.remote_num_tokens)
    ):
        raise _invalid(
            f"{len(nixl.remote_block_ids[0])} block(s) of {block_size} tokens do not hold the "
            f"prompt of {total}"
        )


def _runs(tokens: Sequence[int]) -> list[int | list[int]]:
    result: list[int | list[int]] = []
    for token, run in groupby(tokens):
        count = sum(1 for _ in run)
        result += [token] * count if count < _SHORTEST_RUN else [[token, count]]
    return result


def _pairs(mask: Sequence[bool] | None) -> list[list[Any]] | None:
    return None if mask is None else [[flag, sum(1 for _ in run)] for flag, run in groupby(mask)]


def _convert(name: str, value: object, form: Any) -> Any:
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        text = str(error)
        raise _invalid(f"{name}: {text if len(text) <= 200 else text[:200] + '...'}") from None


def _invalid(what: str) -> HandoffError:
    return HandoffError(f"what prefill handed over is malformed: {what}", reason="invalid")
