"""A tiny random LLaVA in the form of its authors' checkpoints, which SGLang loads.

No family of `dynamo_worker_ext.tinyvlm`, because vLLM and Dynamo's vLLM frontend do not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
)

_WIDTH = 64
_SIDE = 56
_PATCH = 14


def make_llava(qwen: Path, out: Path) -> Path:
    """Write the model to `out`, with tokenizer and chat template of the tiny Qwen2-VL `qwen`."""
    skip = shutil.ignore_patterns("*.safetensors", "*config.json", "video_*")
    shutil.copytree(qwen, out, ignore=skip)
    shutil.copy(qwen / "tokenizer_config.json", out)
    ids = json.loads((qwen / "config.json").read_text())
    torch.manual_seed(0)
    common = {"hidden_size": _WIDTH, "intermediate_size": 128, "num_attention_heads": 4}
    vision = CLIPVisionConfig(
        **common, projection_dim=_WIDTH, num_hidden_layers=3, image_size=_SIDE, patch_size=_PATCH
    )
    CLIPVisionModel(vision).save_pretrained(out / "clip_tower")  # told by its name
    text = LlamaConfig(
        **common,
        vocab_size=ids["vocab_size"],
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
        initializer_range=0.1,  # with the usual 0.02 it says the same of every seventh picture
    )
    weights = {name: one.contiguous() for name, one in LlamaForCausalLM(text).state_dict().items()}
    for layer in (0, 2):
        weights[f"model.mm_projector.{layer}.weight"] = torch.randn(_WIDTH, _WIDTH)
        weights[f"model.mm_projector.{layer}.bias"] = torch.zeros(_WIDTH)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        **text.to_dict(),
        "architectures": ["LlavaLlamaForCausalLM"],
        "model_type": "llava",
        "mm_vision_tower": str(out / "clip_tower"),
        "mm_hidden_size": _WIDTH,
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_patch_merge_type": "flat",
        "image_aspect_ratio": "pad",
        "image_token_index": ids["image_token_id"],
        "projector_hidden_act": "gelu",
        "dtype": "float32",
        "text_config": text.to_dict(),
        "vision_config": vision.to_dict(),
    }
    (out / "config.json").write_text(json.dumps(config))
    crop = {"height": _SIDE, "width": _SIDE}
    CLIPImageProcessor(size={"shortest_edge": _SIDE}, crop_size=crop).save_pretrained(out)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<|image_pad|>",
        "patch_size": _PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (out / "processor_config.json").write_text(json.dumps(processor))
    return out
