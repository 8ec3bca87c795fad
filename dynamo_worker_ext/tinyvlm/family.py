"""What one family of models is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_worker_ext.tinyvlm.vocabulary import QWEN, Vocabulary
from dynamo_worker_ext.tinyvlm.weights import WeightWriter

JsonObject = dict[str, Any]
TokenIds = Mapping[str, int]

CONTEXT_TOKENS = 32768
HIDDEN = 64
HEAD = 32


@dataclass(frozen=True)
class Family:
    """All that distinguishes one family from another."""

    name: str
    summary: str
    config: Callable[[TokenIds], JsonObject]
    """`config.json` as the hub has it, given the ids of the special tokens."""
    chat_template: str
    write_weights: WeightWriter
    image_processor: JsonObject | None = None
    """`preprocessor_config.json`; None for a model that takes no images."""
    video_processor: JsonObject | None = None
    """`video_preprocessor_config.json`; None for a model that takes no videos."""
    processor: JsonObject | None = None
    """`processor_config.json`; None for a family whose processor needs none."""
    vocabulary: Vocabulary = QWEN
    remote_code: tuple[str, ...] = ()
    """Python files that `--trust-remote-code` runs; they are beside `checkpoint.py`."""
