"""LoRA adapters for the tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def make_adapter(model: Path, folder: Path) -> None:
    """Write an adapter of the language model with large random weights, in PEFT's form."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    # SGLang (0.5.21) takes no adapter that changes queries and not values.
    sides = {"q_proj": heads * width, "v_proj": config["num_key_value_heads"] * width}
    random = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for target, side in sides.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=random)
            weights[f"{name}.lora_B.weight"] = torch.randn(side, 8, generator=random)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(sides),
             "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base"}
        )
    )  # fmt: skip
