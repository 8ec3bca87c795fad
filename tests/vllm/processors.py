"""Runs in a process of its own: what vLLM's and transformers' processors make of prompts.

    python tests/vllm/processors.py OUT NAME=MODEL...

No engine is started. OUT is a JSON file: by name and prompt, the ids before and after; and as
``embeddings`` the modalities whose embeddings `dynamo_worker_ext.vllm` has the model take.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((224, 112), (168, 168), (112, 280))


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompts(tag: str) -> dict[str, tuple[str, int]]:
    """Texts with their number of images; ``{}`` in `tag` is an image's number."""
    one, two, three = (tag.format(number) for number in (1, 2, 3))
    return {
        "one": (f"USER: {one}\nDescribe the image.", 1),
        "at the start": (f"{one}\nDescribe the image.", 1),
        "at the end": (f"What is this? {one}", 1),
        "adjacent": (f"Compare {one}{two}", 2),
        "roles": (f"<|user|>\n{one}\nWhat is this?<|end|>\n<|assistant|>\n", 1),
        "three": (f"a {one}\n{two}\n and\n {three} naïve 日本語", 3),
    }


def embeddings_of(processor: Any) -> list[str]:
    from dynamo_worker_ext.vllm.embeds import EmbeddingReference
    from dynamo_worker_ext.vllm.reference import learn_references

    limits = processor.info.allowed_mm_limits
    references = learn_references(processor, [one for one in ("image", "video") if limits.get(one)])
    return [m for m, one in references.items() if EmbeddingReference.learn(processor, m, one)]


def main() -> None:
    from transformers import AutoProcessor
    from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.engine.input_processor import InputProcessor

    report: dict[str, Any] = {}
    for argument in sys.argv[2:]:
        name, _, model = argument.partition("=")
        kind = json.loads(Path(model, "config.json").read_text())["model_type"]
        remote = {"trust_remote_code": kind == "phi3_v"}
        config = ModelConfig(model=model, max_model_len=8192, dtype="bfloat16", **remote)
        multimodal = config.multimodal_config
        assert multimodal is not None
        multimodal.mm_processor_cache_gb = 0
        vllm = InputProcessor(
            VllmConfig(
                model_config=config,
                load_config=LoadConfig(load_format="dummy"),
                cache_config=CacheConfig(),
            )
        )
        transformers = AutoProcessor.from_pretrained(model, **remote)
        tag = {"phi3_v": "<|image_{}|>", "llava": "<image>", "llava_next": "<image>"}
        results = report[name] = {}
        for label, (text, count) in prompts(
            tag.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")
        ).items():
            images = [picture(seed, size) for seed, size in enumerate(SIZES[:count])]
            tokenizer = vllm.get_tokenizer()
            asked = {
                "without": tokenizer.encode(text, add_special_tokens=False),
                "with": tokenizer.encode(text, add_special_tokens=True),
            }
            expanded = {}
            for how, ids in asked.items():
                made = vllm.renderer.process_for_engine(
                    {"prompt_token_ids": list(ids), "multi_modal_data": {"image": images}},
                    time.time(),
                )
                expanded[how] = list(made["prompt_token_ids"])
                counts = [where.length for where in made["mm_placeholders"]["image"]]
            ids = transformers(text=[text], images=images, return_tensors="pt")["input_ids"][0]
            results[label] = {
                "text": text,
                "counts": counts,
                "asked": asked,
                "vllm": expanded,
                "transformers": ids.tolist(),
            }
        results["embeddings"] = embeddings_of(vllm.renderer.get_mm_processor())
        vllm.renderer.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
