"""Tokens that only stand for media, and must not reach an engine without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

from dynamo_worker_ext.errors import StrayPlaceholderError
from dynamo_worker_ext.model_tokens import PHI3, PHI3_IMAGE_ID

#: Where Hugging Face configs name such tokens.
_MEDIA_TOKEN_FIELDS: Final = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "media_placeholder_token_id",
)


class Span(Protocol):
    """A part of a prompt: a `Placeholder` of ours or vLLM's ``PlaceholderRange``."""

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...


def media_token_ids(hf_config: Any) -> frozenset[int]:
    """The tokens that must not reach the engine without media, from a model's config."""
    values = [getattr(hf_config, name, None) for name in _MEDIA_TOKEN_FIELDS]
    if getattr(hf_config, "model_type", None) == PHI3:
        values.append(PHI3_IMAGE_ID)  # vLLM 0.31.0 has it in its code, the config does not
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def check_stray(
    tokens: Sequence[int], placed: Sequence[Span], media_tokens: Collection[int]
) -> None:
    """Refuse a prompt that holds a media token outside of its placeholders.

    Args:
        tokens: the expanded prompt.
        placed: where its media stands.
        media_tokens: see `media_token_ids`.

    Raises:
        StrayPlaceholderError: it does.
    """
    text: list[int] = []
    at = 0
    for where in sorted(placed, key=lambda one: one.offset):
        text += tokens[at : where.offset]
        at = where.offset + where.length
    text += tokens[at:]
    if stray := [token for token in text if token in media_tokens]:
        raise StrayPlaceholderError(
            f"the prompt holds {len(stray)} token(s) {sorted(set(stray))} that stand for media, "
            "but the request carries no media for them"
        )
