"""Copies of a model's small files, changed as real models differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def variant(model: Path, out: Path, **changes: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a model without its weights, and change its JSON files in place.

    Args:
        changes: by the file's name without ``.json``.
    """
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, change in changes.items():
        path = out / f"{name}.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    return out


KEPT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER = "<tool_call>"


def only_in_config(tokenizer: dict[str, Any]) -> None:
    """Qwen2-VL-2B's form: ``tokenizer.json`` does not have the vision tokens."""
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["content"] in KEPT]


def with_marker(model: Path, out: Path) -> Path:
    """Of a Qwen model: a token that is added but not special (as ``<tool_call>`` is) stands before
    the special ones, and those stand in ``tokenizer_config.json`` alone."""

    def tokenizer(content: dict[str, Any]) -> None:
        first = content["added_tokens"][0]
        content["added_tokens"] = [{**first, "content": MARKER, "special": False}]

    def tokenizer_config(content: dict[str, Any]) -> None:
        old = content["added_tokens_decoder"]
        first = min(old, key=int)
        content["added_tokens_decoder"] = {
            first: {**old[first], "content": MARKER, "special": False},
            **{str(int(number) + 1): entry for number, entry in old.items()},
        }

    def config(content: dict[str, Any]) -> None:
        for key in content:
            if key.endswith("_token_id"):
                content[key] += 1

    changes = {"tokenizer": tokenizer, "tokenizer_config": tokenizer_config, "config": config}
    return variant(model, out, **changes)
