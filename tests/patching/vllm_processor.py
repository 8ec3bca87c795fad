"""vLLM's input processor takes an item that another one has processed, then the same as raw media.

    python vllm_processor.py MODEL OUT

Prints nothing; OUT gets what was seen, as JSON. A script, for another vLLM than this one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Look<|im_end|>\n"


class Processor:
    """One input processor with a cache of its own."""

    def __init__(self, model: str) -> None:
        from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, VllmConfig
        from vllm.v1.engine.input_processor import InputProcessor

        self._processor: Any = InputProcessor(
            VllmConfig(
                model_config=ModelConfig(model=model, max_model_len=2048, dtype="float32"),
                load_config=LoadConfig(load_format="dummy"),
                cache_config=CacheConfig(),
                device_config=DeviceConfig("cpu"),
            )
        )
        self.cache = self._processor.renderer.mm_processor_cache

    def raw(self, image: Any) -> Any:
        """What the engine would be given for an image."""
        renderer = self._processor.renderer
        tokens = renderer.get_tokenizer().encode(PROMPT, add_special_tokens=False)
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": [image]}}
        return renderer.process_for_engine(prompt, time.time())

    def inject(self, mm_hashes: Any, mm_kwargs: Any, prompt_updates: Any) -> None:
        self._processor.inject_into_mm_cache(mm_hashes, mm_kwargs, prompt_updates)


def main(model: str, out: str) -> None:
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    image = Image.fromarray(draw.integers(0, 255, (112, 112, 3), dtype=numpy.uint8))
    sender, receiver, poisoned = (Processor(model) for _ in range(3))
    made = sender.raw(image)
    hashes, item = {"image": list(made["mm_hashes"]["image"])}, made["mm_kwargs"]["image"][0]
    _, updates = sender.cache.get_and_update_item(None, hashes["image"][0])

    first, again = {"image": [item]}, {"image": [item]}
    receiver.inject(hashes, first, {"image": [updates]})
    receiver.inject(hashes, again, {"image": [updates]})
    after = receiver.raw(image)
    try:
        poisoned.inject(hashes, {"image": [item]}, {"image": [[]]})
        without = str(poisoned.raw(image)["prompt_token_ids"])
    except Exception as error:  # what it is depends on the version
        without = f"{type(error).__name__}: {error}"
    Path(out).write_text(
        json.dumps(
            {
                "sent first": first["image"][0] is item,
                "sent again": again["image"][0] is not None,
                "raw is sent": after["mm_kwargs"]["image"][0] is not None,
                "same hash": after["mm_hashes"] == made["mm_hashes"],
                "same tokens": after["prompt_token_ids"] == made["prompt_token_ids"],
                "without updates": without,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
