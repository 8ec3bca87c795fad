"""Identity of media: hashes, and the numbers that stand for them in routing tokens.

An ``mm_hash`` is 16 or 64 lower-case hex characters. A router never sees it: it sees the
``pad_value`` that stands at the positions of the item in the token sequence (`HashMode.PAD_VALUE`)
or a per-block object beside the model's own image token (`HashMode.BLOCK_MM_INFOS`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from dynamo_worker_ext.errors import StartupError

if TYPE_CHECKING:
    from dynamo_worker_ext.card import WorkerCard
    from dynamo_worker_ext.wire import Placeholder

_MM_HASH = re.compile(r"(?:[0-9a-f]{16}|[0-9a-f]{64})\Z")

#: Source: Dynamo 1.6.1 ``dynamo.common.multimodal.routing_utils``, which mirrors SGLang's
#: 30-bit scheme up to 0.5.21.
_PAD_BASE: Final = 1_000_000
_PAD_MASK: Final = (1 << 30) - 1


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
