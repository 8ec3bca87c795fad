"""Routing tokens from a model's files: where each comes from, and when exactness is off."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import RoutingTokens, resolve_routing_tokens
from tests.model_folders import MARKER, only_in_config, variant, with_marker

TinyModel = Callable[[str], Path]

IMAGE_PAD, VISION_PAD, VIDEO_PAD = 510, 509, 511


def changed(model: Path, out: Path, name: str, values: dict[str, Any]) -> RoutingTokens:
    """What a model says whose file `name` has these values; None takes one out."""

    def change(content: dict[str, Any]) -> None:
        for key, value in values.items():
            content.pop(key) if value is None else content.update({key: value})

    return resolve_routing_tokens(variant(model, out / "changed", **{name: change}))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_token_of_a_qwen_image_is_the_one_that_config_json_names(
    tiny_model: TinyModel, family: str
) -> None:
    tokens = resolve_routing_tokens(tiny_model(family))
    assert tokens.exact
    assert tokens.image is not None
    assert tokens.video is not None
    assert (tokens.image.id, tokens.image.text) == (IMAGE_PAD, "<|image_pad|>")
    assert tokens.image.source == "config.json: image_token_id"
    assert tokens.media_ids == {IMAGE_PAD, VIDEO_PAD}
    assert VISION_PAD not in tokens.media_ids
    assert tokens.bos is None


def test_special_tokens_that_only_the_configuration_has_are_merged(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = variant(tiny_model("qwen2_vl"), tmp_path / "m", tokenizer=only_in_config)
    tokens = resolve_routing_tokens(folder)
    assert tokens.exact
    assert tokens.encode("<|vision_start|><|image_pad|><|vision_end|>") == [507, IMAGE_PAD, 508]


def test_a_token_that_is_not_special_stays_in_the_text(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    tokens = resolve_routing_tokens(with_marker(tiny_model("qwen2_vl"), tmp_path / "m"))
    assert tokens.exact
    assert tokens.tokenizer is not None
    ids = tokens.encode(f"a{MARKER}b<|image_pad|>")
    assert ids.count(498) == 1
    assert ids.count(IMAGE_PAD + 1) == 1
    assert tokens.tokenizer.decode(ids, skip_special_tokens=True) == f"a{MARKER}b"


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_llava_has_its_image_token_and_begins_with_bos(tiny_model: TinyModel, family: str) -> None:
    tokens = resolve_routing_tokens(tiny_model(family))
    assert tokens.exact
    assert tokens.image is not None
    assert tokens.chat_image is not None
    assert tokens.bos is not None
    assert (tokens.image.id, tokens.image.source) == (638, "config.json: image_token_index")
    assert tokens.chat_image.source == "processor_config.json: image_token"
    assert tokens.bos.id == 1
    assert tokens.process("<image>", [3]) == [1, 638, 638, 638]
    assert tokens.video is None


def test_phi3_numbers_its_images_in_plain_text(tiny_model: TinyModel) -> None:
    tokens = resolve_routing_tokens(tiny_model("phi3_v"))
    assert tokens.exact
    assert tokens.image is not None
    assert tokens.chat_image is not None
    assert (tokens.chat_image.text, tokens.chat_image.id) == ("<|image_1|>", None)
    assert tokens.image.id == 32044
    assert 32044 not in tokens.encode("<|image_1|>")
    text = "<|user|>\n<|image_1|>and<|image_2|><|end|>"
    ids = tokens.process(text, [2, 3])
    assert ids.count(32044) == 5
    assert ids.count(1) == 3  # one a stretch of text
    assert tokens.expand([5, 6], []) == [5, 6]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next", "phi3_v"])
def test_dynamos_frontend_finds_the_same_token(tiny_model: TinyModel, family: str) -> None:
    core = pytest.importorskip("dynamo._core")
    tokens = resolve_routing_tokens(tiny_model(family))
    assert tokens.image is not None
    assert core.resolve_routing_image_token_id(family, str(tiny_model(family))) == tokens.image.id


def test_a_model_without_images_has_nothing_to_be_wrong_about(tiny_model: TinyModel) -> None:
    tokens = resolve_routing_tokens(tiny_model("qwen2"))
    assert (tokens.exact, tokens.image, tokens.media_ids) == (True, None, frozenset())


@pytest.mark.parametrize(
    ("family", "name", "values", "reason"),
    [
        ("qwen2_vl", "config", {"model_type": "another_vl"}, "'another_vl' expand an image"),
        ("qwen2_vl", "config", {"image_token_id": None}, "no image_token_id"),
        ("qwen2_vl", "config", {"image_token_id": 600}, "the tokenizer does not have"),
        ("llava", "config", {"vision_config": {"model_type": "pixtral"}}, "row breaks"),
        ("llava", "config", {"image_token_index": 300}, "is not the one token 300"),
        ("llava", "processor_config", {"image_token": "<img>"}, "is not the one token 638"),
        ("qwen2_vl", "tokenizer", {"model": {"type": "None"}}, "cannot be loaded"),
        ("qwen2_vl", "tokenizer_config",
         {"added_tokens_decoder": {"505": {"content": "<|image_pad|>", "special": True}}},
         "is 510 by tokenizer.json, 505 by"),
        ("qwen2_vl", "tokenizer_config",
         {"added_tokens_decoder": {"512": {"content": MARKER, "special": False}}},
         "does not have '<tool_call>'"),
    ],
)  # fmt: skip
def test_what_cannot_be_proven_switches_exactness_off(
    tiny_model: TinyModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    name: str,
    values: dict[str, Any],
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        tokens = changed(tiny_model(family), tmp_path, name, values)
    assert not tokens.exact
    assert reason in tokens.reason
    assert [record.getMessage() for record in caplog.records] == [
        f"exact routing of media is off for {tmp_path / 'changed'}: {tokens.reason}"
    ]
    for use in (tokens.process, tokens.expand):
        with pytest.raises(StartupError, match="exact routing of media is off"):
            use("", [1])


def test_a_phi3_whose_image_token_is_another_is_not_exact(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        text = json.dumps(tokenizer).replace("<|image|>", "<|picture|>")
        tokenizer.update(json.loads(text))

    changes = {"tokenizer": swap, "tokenizer_config": swap}
    tokens = resolve_routing_tokens(variant(tiny_model("phi3_v"), tmp_path / "m", **changes))
    assert "is '<|picture|>' here" in tokens.reason


def test_a_phi3_whose_files_match_tokens_differently_is_not_exact(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    def strip(config: dict[str, Any]) -> None:
        config["added_tokens_decoder"]["32007"]["rstrip"] = True

    folder = variant(tiny_model("phi3_v"), tmp_path / "m", tokenizer_config=strip)
    assert resolve_routing_tokens(folder).reason == (
        "'<|end|>' has rstrip=False in tokenizer.json, True in tokenizer_config.json"
    )


def test_a_tokenizer_that_is_not_there_switches_exactness_off(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = variant(tiny_model("qwen2_vl"), tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    tokens = resolve_routing_tokens(folder)
    assert "there is no tokenizer.json" in tokens.reason
    assert tokens.image is not None  # what could be found is there


@pytest.mark.parametrize("counts", [[], [3], [3, 3, 3]])
def test_placeholders_and_counts_have_to_agree(tiny_model: TinyModel, counts: list[int]) -> None:
    tokens = resolve_routing_tokens(tiny_model("qwen2_vl"))
    with pytest.raises(ValueError, match=r"image\(s\), but 2 placeholder"):
        tokens.expand([IMAGE_PAD, 5, IMAGE_PAD], counts)
    phi3 = resolve_routing_tokens(tiny_model("phi3_v"))
    if len(counts) > 1:
        with pytest.raises(ValueError, match=r"no <\|image_2\|>"):
            phi3.process("<|image_1|>", counts)


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_a_folder_without_a_configuration_is_an_error(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(StartupError, match=r"config\.json"):
        resolve_routing_tokens(tmp_path)


def test_malformed_added_tokens_are_an_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="added_tokens_decoder is malformed"):
        changed(
            tiny_model("qwen2_vl"), tmp_path, "tokenizer_config", {"added_tokens_decoder": {"x": 1}}
        )


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "phi3_v"])
def test_each_file_is_read_once(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder, read = tiny_model(family), Counter[str]()
    original = Path.read_bytes

    def counted(path: Path) -> bytes:
        read[path.name] += 1
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    resolve_routing_tokens(folder)
    assert set(read.values()) == {1}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(read)


def test_importing_it_loads_neither_torch_nor_a_tokenizer() -> None:
    code = (
        "import sys, dynamo_worker_ext.hashing\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'vllm', 'dynamo'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
