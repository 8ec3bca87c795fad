"""Expanded prompts from a model's files are byte for byte what the real processors make.

vLLM's and transformers' processors run in a process of their own, processors.py, without an engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from dynamo_worker_ext.hashing import RoutingTokens, resolve_routing_tokens
from tests.model_folders import only_in_config, variant, with_marker
from tests.stack import BASE_ENV, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "llava_next", "phi3_v")
VARIANTS = (
    "only_in_config", "marker", "no_bos", "bos_ignored", "phi3_no_bos", "phi3_specials",
    "phi3_lstrip",
)  # fmt: skip
PROMPTS = ("one", "at the start", "at the end", "adjacent", "roles", "three")


def folders(tiny_model: Callable[[str], Path], out: Path) -> Iterator[tuple[str, Path]]:
    for family in FAMILIES:
        yield family, tiny_model(family)
    qwen, llava, phi3 = (tiny_model(name) for name in ("qwen2_vl", "llava", "phi3_v"))

    def ignored(config: dict[str, Any]) -> None:
        config["add_bos_token"] = False

    def add_no_bos(tokenizer: dict[str, Any]) -> None:
        tokenizer["post_processor"] = None

    def name_specials(config: dict[str, Any]) -> None:
        config["additional_special_tokens"] = ["<|user|>", "<|end|>"]

    def strip_left(tokenizer: dict[str, Any]) -> None:
        # In both files alike, which have them as a list and as a map.
        added = tokenizer.get("added_tokens") or tokenizer["added_tokens_decoder"].values()
        for one in added:
            one["lstrip"] = one["content"] == "<|image|>"

    both = {"tokenizer": strip_left, "tokenizer_config": strip_left}
    yield "only_in_config", variant(qwen, out / "only_in_config", tokenizer=only_in_config)
    yield "marker", with_marker(qwen, out / "marker")
    yield "no_bos", variant(llava, out / "no_bos", tokenizer=add_no_bos)
    yield "bos_ignored", variant(llava, out / "bos_ignored", tokenizer_config=ignored)
    yield "phi3_no_bos", variant(phi3, out / "phi3_no_bos", tokenizer=add_no_bos)
    yield "phi3_specials", variant(phi3, out / "phi3_specials", tokenizer_config=name_specials)
    yield "phi3_lstrip", variant(phi3, out / "phi3_lstrip", **both)


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[RoutingTokens, dict[str, Any]]]:
    """By folder: what its files say, and what the processors made of each prompt."""
    out = tmp_path_factory.mktemp("processors")
    models = dict(folders(tiny_model, out))
    report = out / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.processors", report]
        + [f"{name}={folder}" for name, folder in models.items()],
        env={**os.environ, **BASE_ENV, "HF_MODULES_CACHE": str(out / "modules")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(report.read_text())
    return {
        name: (resolve_routing_tokens(folder), results[name]) for name, folder in models.items()
    }


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_a_text_expands_as_transformers_has_it(
    made: dict[str, Any], name: str, prompt: str
) -> None:
    tokens, results = made[name]
    result = results[prompt]
    # Phi-3-vision's own processor writes image number i as -i.
    theirs = [tokens.image.id if token < 0 else token for token in result["transformers"]]
    assert tokens.process(result["text"], result["counts"]) == theirs


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("special", ["with", "without"])
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_token_ids_expand_as_vllm_has_them(
    made: dict[str, Any], name: str, special: str, prompt: str
) -> None:
    tokens, results = made[name]
    result = results[prompt]
    assert tokens.expand(result["asked"][special], result["counts"]) == result["vllm"][special]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_a_text_is_encoded_as_vllm_encodes_it(made: dict[str, Any], name: str, prompt: str) -> None:
    tokens, results = made[name]
    assert tokens.encode(results[prompt]["text"]) == results[prompt]["asked"]["without"]


@pytest.mark.parametrize(
    ("family", "modalities"),
    [
        ("qwen2_vl", ["image", "video"]),
        ("qwen2_5_vl", ["image", "video"]),
        ("qwen3_vl", ["image", "video"]),
        ("qwen3_5", ["image", "video"]),
        ("llava", ["image"]),
        # Their images differ in length, of which vLLM's core would end.
        ("llava_next", []),
        ("phi3_v", []),
    ],
)
def test_which_embeddings_are_taken(
    made: dict[str, tuple[RoutingTokens, dict[str, Any]]], family: str, modalities: list[str]
) -> None:
    assert made[family][1]["embeddings"] == modalities
