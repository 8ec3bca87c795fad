"""What the patches of vLLM are for, checked against the installed vLLM; see `checks`.

Injects an item into vLLM's own processor cache, then asks the cache for the same item as its
processor does for raw media. Imports nothing of this package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def inject_into_mm_cache() -> None:
    """An injected item is sent once, and works as raw media afterwards."""
    import torch
    from vllm.multimodal.cache import MultiModalProcessorSenderCache
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )
    from vllm.multimodal.processing.processor import (
        PromptUpdateDetails,
        ResolvedPromptUpdate,
        UpdateMode,
    )
    from vllm.v1.engine.input_processor import InputProcessor

    inject: Any = getattr(InputProcessor, "inject_into_mm_cache", None)
    require(inject is not None, "InputProcessor has no inject_into_mm_cache")
    config: Any = SimpleNamespace(
        get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1)
    )
    cache = MultiModalProcessorSenderCache(config)
    counted: list[int] = []
    renderer: Any = SimpleNamespace(
        mm_processor_cache=cache, update_mm_cache_stats=lambda: counted.append(1)
    )
    processor = SimpleNamespace(renderer=renderer)
    element: Any = MultiModalFieldElem(data=torch.ones(4), field=MultiModalBatchedField())
    item = MultiModalKwargsItem({"pixel_values": element})
    update = ResolvedPromptUpdate(
        modality="image",
        item_idx=0,
        mode=UpdateMode.REPLACE,
        target=[7],
        content=PromptUpdateDetails(full=[7, 7]),
    )
    for expected in (item, None):
        kwargs = {"image": [item]}
        inject(processor, {"image": ["a"]}, kwargs, {"image": [[update]]})
        require(kwargs["image"][0] is expected, f"{kwargs['image'][0]} is sent, not {expected}")
    require(cache.is_cached_item("a"), "the item is not in the cache")
    _, updates = cache.get_and_update_item(None, "a")
    require(list(updates) == [update], f"the cache has the prompt updates {updates}")
    require(len(counted) == 2, "the statistics were not updated")
    renderer.mm_processor_cache = None
    kwargs = {"image": [item]}
    inject(processor, {"image": ["a"]}, kwargs, {"image": [[update]]})
    require(kwargs["image"][0] is item, "without a cache the item is not sent")


def require(good: bool, fault: str) -> None:
    """Raise if something is not as it should be."""
    if not good:
        raise AssertionError(fault)


CHECKS = {"inject-into-mm-cache": inject_into_mm_cache}


def main(report: str, *checks: str) -> None:
    """Run checks and write what they found."""
    faults = {}
    for name in checks:
        try:
            CHECKS[name]()
            faults[name] = ""
        except Exception as error:  # the boundary: whatever it is, it is what was found
            faults[name] = f"{type(error).__name__}: {error}"
    Path(report).write_text(json.dumps(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
