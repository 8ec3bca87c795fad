"""Identity of media: hashes, and the numbers that stand for them in routing tokens.

An ``mm_hash`` is 16 or 64 lower-case hex characters. A router never sees it: it sees the
``pad_value`` that stands at the positions of the item in the token sequence (`HashMode.PAD_VALUE`)
or a per-block object beside the model's own image token (`HashMode.BLOCK_MM_INFOS`).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.model_tokens import RoutingTokens, resolve_routing_tokens

if TYPE_CHECKING:
    from dynamo_worker_ext.card import WorkerCard
    from dynamo_worker_ext.wire import Placeholder

__all__ = [
    "HashMode",
    "RoutingTokens",
    "block_mm_infos",
    "is_mm_hash",
    "pad_value",
    "resolve_routing_tokens",
    "routing_hash",
    "routing_tokens",
    "wide_pad_values",
]

_MM_HASH = re.compile(r"(?:[0-9a-f]{16}|[0-9a-f]{64})\Z")

#: Source: Dynamo 1.6.1 ``dynamo.common.multimodal.routing_utils``, which mirrors SGLang's
#: 30-bit scheme up to 0.5.21.
_PAD_BASE: Final = 1_000_000
_PAD_MASK: Final = (1 << 30) - 1
_WIDE_PAD_TAG: Final = b"sglang-mm-wide-pad-v1"
_WIDE_PAD_MASK: Final = (1 << 62) - 1


class HashMode(StrEnum):
    """How a router and its workers express the identity of media."""

    PAD_VALUE = "pad_value"
    BLOCK_MM_INFOS = "block_mm_infos"

    @property
    def hex_chars(self) -> int:
        """Characters of the hash that a frontend forwards in this mode."""
        return 16 if self is HashMode.PAD_VALUE else 64

    @classmethod
    def for_backend(cls, card: WorkerCard) -> HashMode:
        """The mode a frontend uses for the worker behind `card`.

        Raises:
            StartupError: the card's mode is one that its engine cannot speak.
        """
        if card.backend_framework == "sglang" and card.mm_hash_mode is not cls.PAD_VALUE:
            raise StartupError(
                f"worker {card.describe()} is SGLang, which knows only "
                f"{cls.PAD_VALUE.value}, but its card says {card.mm_hash_mode.value}"
            )
        return card.mm_hash_mode


def is_mm_hash(value: object) -> bool:
    """Whether `value` is exactly 16 or 64 lower-case hex characters."""
    return isinstance(value, str) and _MM_HASH.match(value) is not None


def routing_hash(mm_hash: str) -> int:
    """The unsigned 64-bit number a router works with: the first 16 hex characters."""
    return int(mm_hash[:16], 16)


def pad_value(mm_hash: str) -> int:
    """The number that stands for an item in routing tokens, in [1_000_000, 1_000_000 + 2**30)."""
    return _PAD_BASE + (routing_hash(mm_hash) & _PAD_MASK)


def wide_pad_values(mm_hash: str) -> tuple[int, int, int, int]:
    """The numbers that stand for an item in SGLang's own tokens from 0.5.23 on, in turn.

    Source: SGLang 0.5.23 ``srt/managers/schedule_batch.py``. No router's token can hold them.
    """
    digest = hashlib.sha256(_WIDE_PAD_TAG + routing_hash(mm_hash).to_bytes(8, "big")).digest()
    a, b, c, d = struct.unpack(">4Q", digest)
    return (
        _PAD_BASE + (a & _WIDE_PAD_MASK),
        _PAD_BASE + (b & _WIDE_PAD_MASK),
        _PAD_BASE + (c & _WIDE_PAD_MASK),
        _PAD_BASE + (d & _WIDE_PAD_MASK),
    )


def routing_tokens(token_ids: Sequence[int], media: Sequence[tuple[str, Placeholder]]) -> list[int]:
    """The expanded prompt as a router hashes it in `HashMode.PAD_VALUE`.

    Args:
        token_ids: the expanded prompt.
        media: (mm_hash, placeholder) of each item; only embedding positions are replaced.
    """
    tokens = list(token_ids)
    for mm_hash, where in media:
        pad = pad_value(mm_hash)
        if where.is_embed is None:
            tokens[where.offset : where.end] = [pad] * where.length
        else:
            for i, embed in enumerate(where.is_embed, start=where.offset):
                if embed:
                    tokens[i] = pad
    return tokens


def block_mm_infos(
    length: int, media: Sequence[tuple[str, Placeholder]], block_size: int
) -> list[dict[str, Any] | None] | None:
    """What a router hashes beside the expanded prompt in `HashMode.BLOCK_MM_INFOS`.

    Args:
        length: of the expanded prompt.
        media: (mm_hash, placeholder) of each item.
        block_size: tokens of a block.

    Returns:
        For each block, the incomplete last one included, the items whose placeholder overlaps it,
        by their order, with offsets [first, one past the last] within the block; None for a block
        without media. None altogether for a prompt without media. A block that begins where an
        item ends does not overlap it; a mask makes no difference, as it makes none for vLLM.
    """
    if not media:
        return None
    infos: list[dict[str, Any] | None] = []
    for start in range(0, length, block_size):
        objects = [
            {
                "mm_hash": routing_hash(mm_hash),
                "offsets": [[max(where.offset - start, 0), min(where.end - start, block_size)]],
            }
            for mm_hash, where in media
            if where.offset < start + block_size and where.end > start
        ]
        infos.append({"mm_objects": objects} if objects else None)
    return infos
