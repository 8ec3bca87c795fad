"""The parity check: exact where both sides are, and where exactly not; on an engine that is not
real but publishes over a real socket. Real ones are in vllm/test_parity_real.py."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("dynamo.llm", reason="needs Dynamo's bindings")
pytest.importorskip("transformers")

from dynamo_worker_ext.hashing import HashMode, block_mm_infos
from dynamo_worker_ext.kv_events import BlockRemoved, BlockStored, Normalizer, private_endpoint
from dynamo_worker_ext.parity import engine as engine_module
from dynamo_worker_ext.parity import run as run_module
from dynamo_worker_ext.parity.__main__ import main
from dynamo_worker_ext.parity.check import placed
from dynamo_worker_ext.parity.engine import Served
from dynamo_worker_ext.wire import Placeholder
from tests.kv_simulation import IMAGE, MEDIA, PROMPTS, A, B, Engine, Prompt, Router, chain
from tests.model_folders import variant

BLOCK = 16
Spoil = Callable[[BlockStored], BlockStored | None]


class PretendedEngine:
    """A `ParityEngine` whose prefix cache is simulated; `spoil` changes what it publishes."""

    version = "0"
    block_size = BLOCK
    num_blocks = 10_000

    def __init__(self, spoil: Spoil, prefix: Sequence[int] = ()) -> None:
        events, self._end = private_endpoint()
        self.events, self.replay = events, None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(events)
        self._engine = Engine(BLOCK)
        self._spoil, self._prefix, self._sequence = spoil, list(prefix), 0
        self.closed = False

    def normalizer(self, mode: HashMode) -> Normalizer:
        return Normalizer(mode, MEDIA, BLOCK)

    def image_text(self, number: int) -> str:
        return "<|image_pad|>"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 500 for letter in text]

    async def serve(
        self, token_ids: Sequence[int], images: Sequence[Any], mm_hashes: Sequence[str]
    ) -> Served:
        if not self._sequence:
            self._pub.recv()  # somebody subscribed
        prompt, left = Prompt(list(self._prefix)), iter(zip(images, mm_hashes, strict=True))
        for token in token_ids:
            if token == IMAGE:
                image, mm_hash = next(left)
                prompt.image(mm_hash, 3 + image.width // 16)
            else:
                prompt.tokens.append(token)
        known = chain(prompt, BLOCK)
        cached = sum(key in self._engine.copies for key in known)
        for event in self._engine.run(prompt, (), beside=False):
            if (spoiled := self._spoil(event)) is not None:
                self.publish(spoiled)
        return Served(prompt.tokens, prompt.media, cached * BLOCK)

    def publish(self, event: Any) -> None:
        payload = msgspec.msgpack.encode([0.0, [event], 0])
        self._pub.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    async def close(self) -> None:
        self.closed = True
        self._context.destroy(linger=0)
        self._end()


def sound(event: BlockStored) -> BlockStored:
    return event


def with_another_token(event: BlockStored) -> BlockStored:
    tokens = [509 if token == IMAGE else token for token in event.token_ids]
    return msgspec.structs.replace(event, token_ids=tokens)


def with_unmarked_names(event: BlockStored) -> BlockStored:
    keys = [block and [["a-uuid", key[1]] for key in block] for block in event.extra_keys or ()]
    return msgspec.structs.replace(event, extra_keys=keys)


def without_media_blocks(event: BlockStored) -> BlockStored | None:
    return None if any(event.extra_keys or ()) else event


@pytest.fixture
def command(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """Runs the command on a pretended engine."""
    engines: list[PretendedEngine] = []

    def run(
        spoil: Spoil,
        *args: str,
        prefix: Sequence[int] = (),
        family: str = "qwen2_vl",
        model: Path | None = None,
    ) -> int:
        async def start(name: str, model: str, args: Sequence[str]) -> PretendedEngine:
            engines.append(PretendedEngine(spoil, prefix))
            return engines[-1]

        monkeypatch.setattr(engine_module, "start_engine", start)
        monkeypatch.setattr(run_module, "_EVENTS_S", 5.0 if spoil is sound else 0.2)
        folder = str(model or tiny_model(family))
        return main(["--model", folder, "--engine", "vllm", *args])

    yield run
    assert engines
    assert all(engine.closed for engine in engines)


@pytest.mark.parametrize("mode", HashMode)
def test_an_exact_engine_is_exact(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], mode: HashMode
) -> None:
    assert command(sound, "--images", "3", "--mode", mode.value) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "exact, 10 of 10"
    assert "DIFFERS" not in out


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        # The first image comes after 31 tokens of text.
        (with_another_token, r"block 1 of 4 \(counted from 0\), token 31: a frontend has \d+, "
         "the worker published 509"),
        (with_unmarked_names, r"block 1 of 4 \(counted from 0\), token 31: a frontend has \d+, "
         "the worker published 510"),
        (without_media_blocks, r"block 1 of 4 \(counted from 0\): the worker published nothing"),
    ],
)  # fmt: skip
def test_a_difference_is_named_by_block_and_token(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], spoil: Spoil, says: str
) -> None:
    assert command(spoil, "--images", "1") == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[-1] == "not exact, 1 of 3"
    assert lines[1].endswith("exact")  # text
    for side in ("processor", "files"):
        assert len(re.findall(f"by the {side}: {says}", out)) == 2, out


def test_an_engine_that_adds_what_the_files_do_not_say_differs_by_the_files(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(sound, "--images", "1", "--json", prefix=[1]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["exact"]
    assert [one["by_processor"] for one in report["verdicts"]] == ["", "", ""]
    assert "token 0: a frontend has" in report["verdicts"][0]["by_files"]
    assert all("block 0 of" in one["by_files"] for one in report["verdicts"])


def test_where_the_files_are_not_exact_the_processor_alone_counts(
    command: Callable[..., int],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rename(config: dict[str, Any]) -> None:
        config["model_type"] = "another_vl"

    model = variant(tiny_model("qwen2_vl"), tmp_path / "m", config=rename)
    # Its own tokenizer has no image token, so that there is text only.
    assert command(sound, "--images", "0", "--json", model=model) == 0
    report = json.loads(capsys.readouterr().out)
    assert "'another_vl'" in report["files"]
    assert [one["by_files"] for one in report["verdicts"]] == [None]


def test_a_model_without_images_is_checked_by_text(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(sound, "--images", "0", family="qwen2") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "exact, 1 of 1"
    assert command(sound, "--images", "1", family="qwen2") == 2
    assert "takes no images; check it with --images 0" in capsys.readouterr().err


def test_a_cache_that_is_too_small_to_tell_is_an_error(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    first: list[BlockStored] = []

    def evicting(event: BlockStored) -> Any:
        if first:
            return BlockRemoved(first[0].block_hashes[-1:])
        first.append(event)
        return event

    assert command(evicting, "--images", "1") == 2
    assert "its KV cache is too small" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo_worker_ext.sglang.parity", None)
    assert main(["--model", "m", "--engine", "sglang"]) == 2
    assert "run this in sglang's environment" in capsys.readouterr().err


def test_whatever_an_engine_raises_is_not_taken_for_a_difference(
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def start(name: str, model: str, args: Sequence[str]) -> Any:
        raise TypeError("an engine's own fault")

    monkeypatch.setattr(engine_module, "start_engine", start)
    assert main(["--model", str(tiny_model("qwen2_vl")), "--engine", "vllm"]) == 2
    assert "an engine's own fault" in capsys.readouterr().err


# The request side of block_mm_infos.


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "no image"])
def test_block_mm_infos_of_both_sides_are_equal(name: str, block_size: int) -> None:
    prompt, router = PROMPTS[name], Router(block_size, HashMode.BLOCK_MM_INFOS)
    router.store(prompt)
    infos = block_mm_infos(len(prompt.tokens), prompt.media, block_size)
    full = len(prompt.tokens) // block_size
    assert router.view.overlap(prompt.tokens, block_mm_infos=infos) == full


def test_a_block_that_begins_where_an_image_ends_does_not_overlap_it() -> None:
    infos = block_mm_infos(48, [(A, Placeholder(4, 12)), (B, Placeholder(20, 20))], 16)
    assert infos is not None
    assert [info and [one["offsets"] for one in info["mm_objects"]] for info in infos] == [
        [[[4, 16]]],
        [[[4, 16]]],
        [[[0, 8]]],
    ]
    assert block_mm_infos(48, [], 16) is None
    assert block_mm_infos(20, [(A, Placeholder(0, 16))], 16) == [infos_of(A, 0, 16), None]


def infos_of(mm_hash: str, first: int, last: int) -> dict[str, Any]:
    return {"mm_objects": [{"mm_hash": int(mm_hash[:16], 16), "offsets": [[first, last]]}]}


def test_images_are_found_by_their_token() -> None:
    assert placed([1, 9, 9, 9, 2], 9, [2, 1]) == [Placeholder(1, 2), Placeholder(3, 1)]
    assert placed([1, 9, 2, 9], 9, [2]) is None  # torn apart
    assert placed([1, 9, 9], 9, [1]) is None  # more than there should be
    assert placed([1], 9, []) == []
