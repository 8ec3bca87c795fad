"""``python -m tests.broken_worker``: a worker whose KV events can be made wrong while it runs.

The file that ``BROKEN_NORMALIZER`` names says how; the worker is sound while there is none. For
proving that the gates of `tests.e2e.gates` notice.

- ``no_pads``     media positions keep the model's own token: routing by text prefix
- ``other_pads``  another number than the router's stands at media positions
- ``silent``      blocks with media are not published at all
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BREAKS = ("no_pads", "other_pads", "silent")


def break_normalizer(switch: Path) -> None:
    """Have `Normalizer` do what `switch` says."""
    from dynamo_worker_ext.kv_events import Normalizer, normalize

    sound_pad, sound_write, sound_stored = (
        normalize.pad_value,
        Normalizer._write_pads,
        Normalizer._stored,
    )

    def how() -> str:
        return switch.read_text() if switch.exists() else ""

    def pad_value(mm_hash: str) -> int:
        return sound_pad(mm_hash) + (how() == "other_pads")

    def write_pads(self: Any, *args: Any) -> None:
        if how() != "no_pads":
            sound_write(self, *args)

    def stored(self: Any, event: Any) -> Any:
        has_media = any(event.extra_keys or ())
        return "broken" if has_media and how() == "silent" else sound_stored(self, event)

    normalize.pad_value = pad_value
    Normalizer._write_pads = write_pads  # type: ignore[method-assign]
    Normalizer._stored = stored  # type: ignore[method-assign]


if __name__ == "__main__":
    from dynamo_worker_ext.vllm.__main__ import main

    break_normalizer(Path(os.environ["BROKEN_NORMALIZER"]))
    main()
