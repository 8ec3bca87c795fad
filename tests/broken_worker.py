"""``python -m tests.broken_worker ENGINE``: a worker whose KV events can be made wrong.

The file that ``BROKEN_NORMALIZER`` names says how; the worker is sound while there is none. For
proving that the gates of `tests.e2e.gates` notice.

- ``no_pads``     media positions keep the model's own token: routing by text prefix
- ``unmarked``    the engine names items in a way that no router knows, as where nobody told it
- ``other_pads``  another number than the router's stands at media positions
- ``silent``      blocks with media are not published at all
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

BREAKS = ("no_pads", "unmarked", "other_pads", "silent")


def break_normalizer(switch: Path) -> None:
    """Have `Normalizer` do what `switch` says."""
    from dynamo_worker_ext.kv_events import Normalizer, normalize

    sound_pad, sound_is_hash, sound_write, sound_stored = (
        normalize.pad_value,
        normalize.is_mm_hash,
        Normalizer._write_pads,
        Normalizer._stored,
    )

    def how() -> str:
        return switch.read_text() if switch.exists() else ""

    def pad_value(mm_hash: str) -> int:
        return sound_pad(mm_hash) + (how() == "other_pads")

    def is_mm_hash(value: object) -> bool:
        return how() != "unmarked" and sound_is_hash(value)

    def write_pads(self: Any, *args: Any) -> None:
        if how() != "no_pads":
            sound_write(self, *args)

    def stored(self: Any, event: Any) -> Any:
        # SGLang's events have pads in the tokens, vLLM's say beside them what overlaps a block.
        pads = [token >= 1_000_000 for token in event.token_ids]
        if how() == "silent" and (any(pads) or any(event.extra_keys or ())):
            return "broken"
        if how() and any(pads):
            (placeholder, *_) = sorted(self.media_token_ids)
            tokens = [
                (token + 1 if how() == "other_pads" else placeholder) if is_pad else token
                for token, is_pad in zip(event.token_ids, pads, strict=True)
            ]
            event = msgspec.structs.replace(event, token_ids=tokens)
        return sound_stored(self, event)

    normalize.pad_value = pad_value
    normalize.is_mm_hash = is_mm_hash  # type: ignore[assignment]
    Normalizer._write_pads = write_pads  # type: ignore[method-assign]
    Normalizer._stored = stored  # type: ignore[method-assign]


if __name__ == "__main__":
    engine = sys.argv.pop(1)
    break_normalizer(Path(os.environ["BROKEN_NORMALIZER"]))
    importlib.import_module(f"dynamo_worker_ext.{engine}.__main__").main()
