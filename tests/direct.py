"""A frontend double: makes requests as Dynamo's vLLM-processor frontend does, or as a hostile one
would, and sends them straight to a worker's endpoint.

`FrontendDouble` renders pictures with vLLM's own processor; `Segments` holds their payloads;
`request` puts a request together, whose every field a test may then spoil. `DirectClient` is a
client of the request plane, in a process of its own because Dynamo's runtime belongs to one
process and one set of environment variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image

from tests.pictures import data_uri

#: What the chat template of the tiny models makes of one image.
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass(frozen=True)
class RenderedItem:
    """One processed picture: identity, place in the expanded prompt, payload as sent."""

    mm_hash: str
    placeholder: Any
    payload: bytes
    uri: str


@dataclass(frozen=True)
class Rendered:
    """A prompt before and after expansion, with its items."""

    token_ids: list[int]
    expanded: list[int]
    items: tuple[RenderedItem, ...]

    def renamed(self) -> Rendered:
        """The same under identities that nobody has seen, so that nothing of it is cached."""
        names: dict[str, str] = {}
        return self.named(
            [names.setdefault(item.mm_hash, secrets.token_hex(32)) for item in self.items]
        )

    def named(self, hashes: Sequence[str]) -> Rendered:
        """The same under these identities."""
        return replace(
            self,
            items=tuple(
                replace(item, mm_hash=mm_hash)
                for item, mm_hash in zip(self.items, hashes, strict=True)
            ),
        )

    @property
    def hashes(self) -> list[str]:
        return [item.mm_hash for item in self.items]


class FrontendDouble:
    """Renders prompts for one model, as the vLLM-processor frontend of Dynamo 1.6.1 does.

    Args:
        model: the model's folder.
    """

    def __init__(self, model: Path) -> None:
        from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig
        from vllm.v1.engine.input_processor import InputProcessor

        config = ModelConfig(model=str(model), max_model_len=8192, dtype="bfloat16")
        assert config.multimodal_config is not None
        config.multimodal_config.mm_processor_cache_type = "processor_only"
        self._processor = InputProcessor(
            VllmConfig(
                model_config=config,
                load_config=LoadConfig(load_format="dummy"),
                cache_config=CacheConfig(),
            )
        )
        self._tokenizer = self._processor.get_tokenizer()

    def render(self, images: Sequence[Image.Image], text: str = "Describe the image") -> Rendered:
        """Images first, then the text."""
        uris = [data_uri(image) for image in images]
        return self._render("image", IMAGE * len(images) + text, list(images), uris)

    def render_video(self, frames: Any) -> Rendered:
        """One video: an array of shape [frames, height, width, 3]."""
        count = len(frames)
        metadata = {
            "total_num_frames": count,
            "fps": 2.0,
            "duration": count / 2,
            "frames_indices": list(range(count)),
            "video_backend": "opencv",
            "do_sample_frames": False,
        }
        return self._render("video", VIDEO, [(frames, metadata)], [""])

    def _render(self, modality: str, text: str, media: list[Any], uris: Sequence[str]) -> Rendered:
        from dynamo.common.multimodal.mm_kwargs_transfer import encode_mm_kwargs_item

        tokens = self._tokenizer.encode(
            f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
        )
        result = self._processor.renderer.process_for_engine(
            {"prompt_token_ids": list(tokens), "multi_modal_data": {modality: media}},
            time.time(),
        )
        items = zip(
            result["mm_hashes"][modality],
            result["mm_placeholders"][modality],
            result["mm_kwargs"][modality],
            uris,
            strict=True,
        )
        return Rendered(
            list(tokens),
            list(result["prompt_token_ids"]),
            tuple(
                RenderedItem(mm_hash, _placeholder(where), encode_mm_kwargs_item(data), uri)
                for mm_hash, where, data, uri in items
            ),
        )

    def close(self) -> None:
        self._processor.renderer.shutdown()


def _placeholder(where: Any) -> Any:
    if where.is_embed is None:
        return [where.offset, where.length]
    mask = [bool(value) for value in where.is_embed.tolist()]
    return {"offset": where.offset, "length": where.length, "is_embed": mask}


class Segments:
    """Shared-memory segments of one test; use it as a context manager."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def put(self, payload: bytes) -> dict[str, Any]:
        """Write one segment; what a transfer's metadata says about it."""
        path = Path("/dev/shm", f"dwe_test_{os.getpid()}_{secrets.token_hex(6)}")
        self._paths.append(path)
        path.write_bytes(payload)
        return {"name": path.name, "size": len(payload)}


def request(
    rendered: Rendered,
    *,
    shm: Sequence[Mapping[str, Any]] | None = None,
    raw: bool = False,
    max_tokens: int = 8,
    **sampling: Any,
) -> dict[str, Any]:
    """A preprocessed request as it leaves the vLLM-processor frontend.

    Args:
        rendered: the prompt.
        shm: references to the items' segments; None for a request without transfer.
        raw: whether it carries the pictures' URIs, as it does where nothing is transferred.
        sampling: more sampling options.
    """
    hashes = rendered.hashes
    placeholders = [item.placeholder for item in rendered.items]
    extra: dict[str, Any] = {
        "mm_hashes": hashes,
        "mm_hashes_by_modality": {"image": hashes},
        "mm_placeholders": placeholders,
        "mm_placeholders_by_modality": {"image": placeholders},
        "expanded_token_ids": rendered.expanded,
    }
    if shm is not None:
        extra["mm_kwargs_shm"] = {
            "modality": "image",
            "items": [dict(ref) for ref in shm],
            "mm_hashes": hashes,
        }
    result: dict[str, Any] = {
        "model": "tiny",
        "token_ids": rendered.token_ids,
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0, **sampling},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
        "extra_args": extra,
    }
    if raw:
        result["multi_modal_data"] = {"image_url": [{"Url": item.uri} for item in rendered.items]}
    # A request of its own: a test may change any part of it.
    copy: dict[str, Any] = json.loads(json.dumps(result))
    return copy


@dataclass(frozen=True)
class Reply:
    """What came back: tokens, or the error that ended it; of a prefill worker also the handoff, of
    an encode worker the handle."""

    tokens: list[int]
    error: str | None
    usage: Mapping[str, Any]
    handoff: Mapping[str, Any] | None = None
    handle: Mapping[str, Any] | None = None

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def reply_of(chunks: Sequence[Mapping[str, Any]], error: str | None = None) -> Reply:
    """Put the chunks of one request together."""
    tokens: list[int] = []
    usage: Mapping[str, Any] = {}
    handoff = handle = None
    for chunk in chunks:
        handle = chunk.get("encoder_result") or handle
        handoff = chunk.get("disaggregated_params") or handoff
        tokens += chunk.get("token_ids") or []
        usage = chunk.get("completion_usage") or usage
    return Reply(tokens, error, usage, handoff, handle)


class DirectClient:
    """Sends requests to the workers of a stack; use it as a context manager. Not thread-safe.

    Args:
        env: the stack's environment.
        log: where the client process writes what it has to say.
        component: that the workers are registered under.
    """

    def __init__(self, env: Mapping[str, str], log: Path, component: str = "backend") -> None:
        self._env, self._log, self._component = env, log, component
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.direct", self._component],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def send(self, body: Mapping[str, Any], instance_id: str, timeout: float = 60.0) -> Reply:
        """Send one request to one worker and wait for all of its answer."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = json.dumps({"request": body, "instance": int(instance_id, 16)})
        process.stdin.write(line + "\n")
        process.stdin.flush()
        # A client that hangs must not hang the test.
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            answer = process.stdout.readline()
        finally:
            timer.cancel()
        assert answer, f"no answer within {timeout:g} s:\n{self._log.read_text()[-2000:]}"
        decoded = json.loads(answer)
        return reply_of(decoded["chunks"], decoded["error"])


async def _serve() -> None:
    """The client process: requests as lines on stdin, answers as lines on stdout."""
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp")
    client = await runtime.endpoint(f"dynamo.{sys.argv[1]}.generate").client()
    await client.wait_for_instances()
    out = os.fdopen(os.dup(1), "w")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        message = json.loads(line)
        chunks, error = [], None
        try:
            stream = await client.direct(message["request"], message["instance"])
            async for one in stream:
                if one.is_error():
                    error = "; ".join(one.comments() or []) or "an error without a text"
                elif (data := one.data()) is not None:
                    chunks.append(data)
        except Exception as raised:  # the boundary: whatever it is, the test has to see it
            error = f"{type(raised).__name__}: {raised}"
        out.write(json.dumps({"chunks": chunks, "error": error}) + "\n")
        out.flush()
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(_serve())
