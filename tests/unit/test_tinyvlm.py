"""The tiny models: complete, the same for the same seed, and never made over foreign files."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_worker_ext.tinyvlm import FAMILIES, make
from dynamo_worker_ext.tinyvlm.__main__ import main

TEXT_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "tinyvlm.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
VISION_FILES = TEXT_FILES | {"preprocessor_config.json", "video_preprocessor_config.json"}

LLAVA_FILES = TEXT_FILES - {"merges.txt", "vocab.json"} | {
    "preprocessor_config.json",
    "processor_config.json",
}
FILES = {
    "qwen2": TEXT_FILES,
    "llava": LLAVA_FILES,
    "llava_next": LLAVA_FILES,
    "phi3_v": LLAVA_FILES - {"model.safetensors", "processor_config.json"}
    | {"configuration_phi3_v.py", "processing_phi3_v.py"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("tinyvlm") / "model"
    make(FAMILIES["qwen2_5_vl"], directory, seed=3)
    return directory


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    directory = tmp_path / "foreign"
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")
    return directory


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_a_vision_model_has_the_files_that_engines_and_frontends_read(model: Path) -> None:
    assert {path.name for path in model.iterdir()} == VISION_FILES


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_complete_and_takes_32768_tokens(
    name: str, model: Path, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    make(family, tmp_path / name)

    assert {path.name for path in (tmp_path / name).iterdir()} == FILES.get(name, VISION_FILES)
    config = json.loads((tmp_path / name / "config.json").read_text())
    text_config = config.get("text_config", config)
    assert text_config["max_position_embeddings"] >= 32768


def test_the_same_seed_makes_the_same_bytes(model: Path, tmp_path: Path) -> None:
    make(FAMILIES["qwen2_5_vl"], tmp_path / "again", seed=3)
    assert digests(tmp_path / "again") == digests(model)


def test_parameters_that_are_no_matrices_are_drawn_from_the_seed_too(tmp_path: Path) -> None:
    """LLaVA-NeXT's line break and CLIP's class token are vectors that begin as noise."""
    pytest.importorskip("torch")
    for name in ("one", "two"):
        make(FAMILIES["llava_next"], tmp_path / name)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_another_seed_changes_the_weights_and_nothing_else(model: Path, tmp_path: Path) -> None:
    make(FAMILIES["qwen2_5_vl"], tmp_path / "other", seed=4)
    ours, theirs = digests(model), digests(tmp_path / "other")
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "model.safetensors",
        "tinyvlm.json",
    }


def test_no_file_is_left_beside_the_model(model: Path) -> None:
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_text_survives_the_tokenizer_and_special_tokens_are_one_token(model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("Describe the image.", "naïve 日本語\t\r\n 12345 don't"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((model / "config.json").read_text())
    assert tokenizer.encode("<|image_pad|>").ids == [config["image_token_id"]]
    assert tokenizer.encode("<|video_pad|>").ids == [config["video_token_id"]]


class TestChatTemplate:
    def render(self, name: str, content: object, *, trim: bool = True) -> str:
        jinja2 = pytest.importorskip("jinja2")
        environment = jinja2.Environment(trim_blocks=trim, lstrip_blocks=trim)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        text: str = environment.from_string(FAMILIES[name].chat_template).render(
            messages=[{"role": "user", "content": content}], add_generation_prompt=True
        )
        return text

    @pytest.mark.parametrize("trim", [True, False])
    def test_every_form_of_a_media_part_becomes_its_placeholder(self, trim: bool) -> None:
        parts = [
            {"type": "image"},
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "video"},
            {"type": "video_url", "video_url": {"url": "x"}},
            {"type": "text", "text": "hello\n there"},
        ]
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        video = "<|vision_start|><|video_pad|><|vision_end|>"
        assert self.render("qwen2_vl", parts, trim=trim) == (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{image}{image}{video}{video}hello\n there<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_llava_asks_and_answers_in_turn(self) -> None:
        parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "hi"}]
        assert self.render("llava", parts) == "USER: <image>\nhi ASSISTANT:"

    def test_phi3_takes_text_in_which_images_are_numbered(self) -> None:
        assert self.render("phi3_v", "<|image_1|>\nhi") == (
            "<|user|>\n<|image_1|>\nhi<|end|>\n<|assistant|>\n"
        )

    def test_a_string_and_one_text_part_are_the_same(self) -> None:
        parts = [{"type": "text", "text": "hello"}]
        assert self.render("qwen2_vl", "hello") == self.render("qwen2_vl", parts)

    @pytest.mark.parametrize(
        ("name", "kind"), [("qwen2_vl", "audio_url"), ("qwen2", "image_url"), ("llava", "video")]
    )
    def test_a_part_that_the_model_does_not_take_is_refused(self, name: str, kind: str) -> None:
        with pytest.raises(Exception, match=f"no content part of type {kind}"):
            self.render(name, [{"type": kind}])


class TestForeignDirectories:
    def test_are_refused_and_left_alone(self, foreign: Path) -> None:
        with pytest.raises(FileExistsError, match="was not made here"):
            make(FAMILIES["qwen2"], foreign)
        assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]

    def test_are_replaced_when_forced(self, model: Path, foreign: Path) -> None:
        make(FAMILIES["qwen2"], foreign, force=True)
        assert {path.name for path in foreign.iterdir()} == TEXT_FILES

    def test_that_hold_the_working_directory_are_refused_even_when_forced(
        self, foreign: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(foreign)
        with pytest.raises(FileExistsError, match="not a directory to replace"):
            make(FAMILIES["qwen2"], foreign.parent, force=True)

    def test_may_not_be_files(self, foreign: Path) -> None:
        with pytest.raises(FileExistsError, match="is a file"):
            make(FAMILIES["qwen2"], foreign / "thesis.txt", force=True)

    def test_a_model_made_earlier_is_replaced(self, model: Path, tmp_path: Path) -> None:
        make(FAMILIES["qwen2_5_vl"], tmp_path / "model")
        make(FAMILIES["qwen2"], tmp_path / "model")
        assert {path.name for path in (tmp_path / "model").iterdir()} == TEXT_FILES

    def test_a_model_made_earlier_survives_a_failure(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = digests(model)
        monkeypatch.setattr(Path, "write_text", lambda *_args, **_kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(FAMILIES["qwen2_5_vl"], model)
        assert digests(model) == before


class TestCommand:
    def test_list_names_every_family(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(FAMILIES)

    def test_a_foreign_directory_is_a_message_and_not_a_traceback(
        self, foreign: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--family", "qwen2", "--out", str(foreign)]) == 1
        assert "--force" in capsys.readouterr().err

    def test_what_is_missing_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--family", "qwen2"])
        assert "--out" in capsys.readouterr().err

    def test_help_does_not_wait_for_torch(self) -> None:
        code = (
            "import sys; from dynamo_worker_ext.tinyvlm.__main__ import main\n"
            "try: main(['--help'])\n"
            "except SystemExit: pass\n"
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "--family" in done.stdout
        assert time.monotonic() - started < 5
