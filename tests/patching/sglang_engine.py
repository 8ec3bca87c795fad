"""SGLang engines on the CPU, asked with and without names for their media.

    python sglang_engine.py OUT before|after|samples MODEL...

A script, because a failing scheduler kills the process that started its engine. SGLang is imported
once, as its checks of behaviour need it too; then each engine starts from a fork, and its own
processes from forks of that: importing takes longer than all that is asked. What is seen goes to
OUT, a directory, as it is seen: `checks.json`, and for each model one JSON object a line.
"""

from __future__ import annotations

import copy
import importlib
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# Names for two pictures. The lowest bits differ: they make the pad value.
A, A_TOO = "fedcba98765432aa", "00000000000000ab"
B, B_TOO = "0123456789abcdba", "80000000000000bb"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class Asked:
    """One engine and what it was asked.

    Args:
        model: the model's folder.
        out: where what is seen is written to.
    """

    def __init__(self, model: str, out: Path) -> None:
        import sglang
        from transformers import AutoProcessor

        self._out = out
        self._processor = AutoProcessor.from_pretrained(model)
        self._engine = sglang.Engine(
            model_path=model,
            device="cpu",
            attention_backend="torch_native",
            mm_attention_backend="sdpa",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            skip_server_warmup=True,
            grammar_backend="none",
            dtype="float32",
            enable_multimodal=True,
            max_total_tokens=4096,
            max_running_requests=4,
            context_length=1024,
            page_size=1,
            log_level="warning",
        )
        self._seen: list[Any] = []
        manager: Any = self._engine.tokenizer_manager
        tokenize = manager._tokenize_one_request

        async def watched(request: Any) -> Any:
            result = await tokenize(request)
            # Copies: the scheduler gives what has no hash yet one, from a feature that leaves.
            items = [copy.copy(item) for item in result.mm_inputs.mm_items]
            for item in items:
                item.set_pad_value()
            self._seen += items
            return result

        manager._tokenize_one_request = watched
        self.say(step="up")

    def say(self, **what: Any) -> None:
        with self._out.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def raw(self, step: str, images: list[Any], mm_hashes: Any = None, **how: Any) -> None:
        """Images as they are, in a prompt that SGLang expands."""
        text = CHAT.format("Look" + IMAGE * len(images))
        self.ask(step, mm_hashes, how, prompt=text, image_data=images)

    def processed(self, step: str, images: list[Any], mm_hashes: Any = None) -> None:
        """Images that a caller has processed, in a prompt that it has expanded.

        The prompt begins differently, so that it has no cached prefix in common with `raw`:
        SGLang 0.5.11 gives such images other positions, patched or not.
        """
        text = CHAT.format("See" + IMAGE * len(images))
        made = self._processor(images=images, text=text, return_tensors="pt")
        data = {
            "format": "processor_output",
            "pixel_values": made["pixel_values"],
            "image_grid_thw": made["image_grid_thw"],
        }
        self.ask(step, mm_hashes, {}, input_ids=made["input_ids"][0].tolist(), image_data=[data])

    def batch(self, step: str, images: list[Any], mm_hashes: Any, n: int) -> None:
        """A request an image, with n samples each."""
        text = CHAT.format("Look" + IMAGE)
        self.ask(
            step,
            mm_hashes,
            {"n": n},
            prompt=[text] * len(images),
            image_data=[[image] for image in images],
        )

    def ask(self, step: str, mm_hashes: Any, how: dict[str, Any], **request: Any) -> None:
        from sglang.srt.managers.schedule_batch import MultimodalDataItem

        self._seen.clear()
        asynchronous = how.pop("asynchronous", False)
        if mm_hashes is not None:
            request["mm_hashes"] = mm_hashes
        request["sampling_params"] = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        request["sampling_params"] |= how
        try:
            if asynchronous:
                loop: Any = self._engine.loop
                results = loop.run_until_complete(self._engine.async_generate(**request))
            else:
                results = self._engine.generate(**request)
        except (TypeError, ValueError) as error:
            self.say(step=step, error=f"{type(error).__name__}: {error}")
            return
        if not isinstance(results, list):
            results = [results]
        items = list(self._seen)
        fresh = [MultimodalDataItem(modality=item.modality, hash=item.hash) for item in items]
        for one in fresh:
            one.set_pad_value()
        self.say(
            step=step,
            tokens=[result["output_ids"] for result in results],
            cached=[result["meta_info"]["cached_tokens"] for result in results],
            prompt=[result["meta_info"]["prompt_tokens"] for result in results],
            hashes=[f"{item.hash:016x}" for item in items],
            pads=[item.pad_value for item in items] == [one.pad_value for one in fresh],
        )

    def close(self) -> None:
        self._engine.shutdown()
        self.say(step="down")


def pictures() -> list[Any]:
    """Three pictures of one size."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    return [
        Image.fromarray(draw.integers(0, 255, (112, 112, 3), dtype=numpy.uint8)) for _ in range(3)
    ]


def ask(model: str, out: Path, phase: str) -> None:
    """Ask one engine what can be asked in that phase; `samples` is after, with more samples."""
    a, b, unseen = pictures()
    asked = Asked(model, out)
    asked.raw("raw", [a])
    asked.raw("raw b", [b])
    asked.processed("processed", [a])
    asked.processed("processed b", [b])
    asked.processed("processed two", [a, b])
    if phase != "before":
        asked.raw("named", [a], [A], asynchronous=True)
        asked.raw("named again", [a], [A])
        asked.raw("renamed", [a], [A_TOO])
        asked.raw("misnamed", [b], [A])
        asked.raw("two named", [a, b], [A_TOO, B])
        asked.raw("no name", [a], [A.upper()])
        asked.raw("wide name", [b], [B + "0" * 48])
        asked.raw("too many names", [a], [A, B])
        asked.processed("processed named", [b], [B_TOO])
        asked.processed("processed two named", [a, b], [A_TOO, B_TOO])
        asked.processed("processed one named", [a, b], ["-0x1_0", B_TOO])
        asked.batch("batch", [a, b], [A_TOO, [B]], 1)
        if phase == "samples":
            asked.batch("samples", [b], [[B]], 2)
    else:
        asked.raw("named", [unseen], [A])
        asked.processed("processed named", [unseen], [B_TOO])
    asked.close()


def checks(out: Path) -> None:
    """Run the checks of behaviour."""
    from dynamo_worker_ext.patching.checks import check_sglang

    check_sglang.main(str(out / "checks.json"), *check_sglang.CHECKS)


def apart(call: Any, *arguments: Any) -> int:
    """The exit status of a call in a fork; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call(*arguments)
            status = 0
        except BaseException:  # whatever it is, it must not go on in the fork
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(directory: str, phase: str, *models: str) -> None:
    """Run the checks, then ask an engine of each model."""
    out = Path(directory)
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    for name in ("sglang.srt.entrypoints.engine", "sglang.srt.managers.detokenizer_manager"):
        importlib.import_module(name)
    apart(checks, out)
    for model in models:
        name = Path(model).name
        status = apart(ask, model, out / f"{name}.jsonl", phase)
        (out / f"{name}.status").write_text(str(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
