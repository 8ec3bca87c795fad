"""Runs in a process of its own: a real vLLM engine, our pump behind it, a router's view.

    python tests/vllm/kv_events_engine.py MODEL OUT

Before each request the router is asked how many leading blocks it expects this worker to have;
the engine says afterwards how many it had. OUT gets both, with what was captured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from PIL import Image

from dynamo_worker_ext.hashing import HashMode, routing_tokens
from dynamo_worker_ext.kv_events import (
    CACHE_SALT_PREFIX,
    KvEventPump,
    engine_endpoint,
    private_endpoint,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.wire import Placeholder
from tests.router_view import RouterView

BLOCK = 32
BLOCKS = 40  # 32 hold the longest prompt: little enough that blocks are evicted
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class Tap:
    """Writes down what the engine sent, for the fixtures of the unit tests."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def drain(self) -> list[list[bytes]]:
        frames = []
        while self._socket.poll(0):
            frames.append(self._socket.recv_multipart())
        return frames


class Bench:
    """One engine, and what was asked of it.

    Args:
        model: folder of it.
        adapter: folder of one, if it is to have one.
        blocks: of its cache.
    """

    def __init__(self, model: str, adapter: Path | None = None, blocks: int = BLOCKS) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        from dynamo_worker_ext.vllm.kv_layout import KvLayout

        config = json.loads(Path(model, "config.json").read_text())
        events, replay = private_endpoint(), private_endpoint()
        self.cleanups = [events.cleanup, replay.cleanup]
        self.metrics = Metrics()
        self.failures: list[BaseException] = []
        self.view = RouterView(BLOCK)
        self.llm = LLM(
            model=model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=128,  # several steps, several events a prompt
            max_num_seqs=4,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            limit_mm_per_prompt={"image": 3, "video": 0},
            skip_mm_profiling=True,
            seed=0,
            enable_prefix_caching=True,
            enable_lora=adapter is not None,
            max_lora_rank=8,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events.endpoint,
                "replay_endpoint": replay.endpoint,
            },
        )
        self.adapter = adapter and LoRARequest("tiny-adapter", 1, str(adapter))
        self.features: list[Any] = []
        core = self.llm.llm_engine.engine_core
        layout = KvLayout.from_groups(
            core.engine_core.get_kv_cache_group_metadata(), self.llm.llm_engine.vllm_config
        )
        self.normalizer = layout.normalizer(
            HashMode.PAD_VALUE, frozenset((config["image_token_id"], config["video_token_id"]))
        )
        self.pump = KvEventPump(
            engine_endpoint(events.endpoint),
            self.view,
            self.normalizer,
            self.metrics,
            on_failure=self.failures.append,
            replay_endpoint=engine_endpoint(replay.endpoint),
            dp_rank=0,
            max_blocks=blocks,
        )
        add_request = core.add_request

        def recording(request: Any) -> None:
            self.features.append(request.mm_features or [])
            add_request(request)

        core.add_request = recording
        self.requests: list[dict[str, Any]] = []
        self.tap = Tap(events.endpoint)
        self.pump.start()
        assert self.pump.wait_connected(10)
        time.sleep(0.2)  # the tap has no way to tell

    def run(
        self,
        name: str,
        text: str | list[int],
        images: Sequence[Image.Image] = (),
        *,
        salt: str | None = None,
        lora: bool = False,
        copies: int = 1,
        max_tokens: int = 2,
    ) -> list[int]:
        """Serve a prompt; what stands in `requests` then. Returns its tokens, and the answer's."""
        from dynamo.common.multimodal.routing_utils import build_mm_routing_info_from_features
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt" if isinstance(text, str) else "prompt_token_ids": text}
        if images:
            prompt["multi_modal_data"] = {"image": list(images)}
        if salt is not None:
            prompt["cache_salt"] = salt
        self.settle()
        known = len(self.view.batches)
        self.features.clear()
        outputs = self.llm.generate(
            [prompt] * copies,
            SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            use_tqdm=False,
            lora_request=self.adapter if lora else None,
        )
        tokens = list(outputs[0].prompt_token_ids)
        media = [_media(feature) for feature in self.features[0]]
        routing = routing_tokens(tokens, media)
        upstream = build_mm_routing_info_from_features(self.features[0], tokens)
        options = {
            "lora_name": self.adapter.lora_name if lora else None,
            "cache_namespace": salt and salt.removeprefix(CACHE_SALT_PREFIX),
        }
        self.settle()
        # The prompt is known expanded only now, so ask a router that knows no more than then.
        before = RouterView(BLOCK)
        for batch in self.view.batches[:known]:
            before.publish_batch(batch)
        self.requests.append(
            {
                "name": name,
                "tokens": tokens,
                "media": [(mm_hash, at.offset, at.length) for mm_hash, at in media],
                "lora_name": options["lora_name"],
                "cache_namespace": options["cache_namespace"],
                # An engine always computes the last token, so a full prompt is never all cached.
                "expected": min(before.overlap(routing, **options), (len(tokens) - 1) // BLOCK),
                "cached": outputs[0].num_cached_tokens // BLOCK,
                "overlap_after": self.view.overlap(routing, **options),
                "full_blocks": len(tokens) // BLOCK,
                "equals_upstream": upstream is None or upstream["routing_token_ids"] == routing,
            }
        )
        return [*tokens, *outputs[0].outputs[0].token_ids]

    def settle(self) -> None:
        """Wait until no event has come for a while."""
        count = -1
        while count != len(self.view.batches):
            count = len(self.view.batches)
            time.sleep(0.15)

    def close(self) -> None:
        self.pump.stop()
        self.llm.llm_engine.engine_core.shutdown()
        for cleanup in self.cleanups:
            cleanup()


def _media(feature: Any) -> tuple[str, Placeholder]:
    where = feature.mm_position
    mask = None if where.is_embed is None else tuple(map(bool, where.is_embed.tolist()))
    return feature.mm_hash, Placeholder(where.offset, where.length, mask)


def picture(seed: int, size: tuple[int, int] = (168, 168)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_adapter(folder: Path, model: str) -> Path:
    """An adapter with small random weights for one projection of the first layer."""
    import torch
    from safetensors.torch import save_file

    hidden = json.loads(Path(model, "config.json").read_text())["hidden_size"]
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["o_proj"],
        "base_model_name_or_path": model,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    weights = {
        f"{name}.lora_A.weight": torch.randn(8, hidden) * 0.02,
        f"{name}.lora_B.weight": torch.randn(hidden, 8) * 0.02,
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="directory")
    args = parser.parse_args()
    bench = Bench(args.model, make_adapter(args.out / "adapter", args.model))
    words = "Describe both pictures in detail, please, and then compare them. "
    a, b, c = picture(1), picture(2, (224, 112)), picture(3)
    two = words + IMAGE + " and " + IMAGE + words
    close = words + IMAGE * 2 + words
    adjacent = words + "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>" + words

    bench.run("text", words * 6)
    bench.run("text, repeated", words * 6)
    bench.run("one image", words + IMAGE + words, [a])
    bench.run("one image, repeated", words + IMAGE + words, [a])
    bench.run("another image", words + IMAGE + words, [c])
    bench.run("two images", two, [a, b])
    bench.run("two images, repeated", two, [a, b])
    bench.run("two images, swapped", two, [b, a])
    bench.run("two images, the second another", two, [a, c])
    bench.run("two small images in one block", close, [picture(4, (56, 56)), picture(5, (56, 56))])
    bench.run("two small images, repeated", close, [picture(4, (56, 56)), picture(5, (56, 56))])
    bench.run("two small images, swapped", close, [picture(5, (56, 56)), picture(4, (56, 56))])
    bench.run("adjacent images", adjacent, [a, b])
    bench.run("adjacent images, repeated", adjacent, [a, b])
    bench.run("adjacent images, the second another", adjacent, [a, c])
    bench.run("a large image", words + IMAGE + words, [picture(6, (336, 336))])
    bench.run("a large image, repeated", words + IMAGE + words, [picture(6, (336, 336))])
    bench.run("long answer", words + IMAGE + words, [a], max_tokens=80)
    bench.run("salted", words + IMAGE + words, [a], salt="tenant-a")
    bench.run("salted, repeated", words + IMAGE + words, [a], salt="tenant-a")
    bench.run("salted as Dynamo does", words, [], salt=CACHE_SALT_PREFIX + "tenant-b")
    bench.run("adapter", words + IMAGE + words, [a], lora=True)
    bench.run("adapter, repeated", words + IMAGE + words, [a], lora=True)
    bench.run("adapter and salt", words * 4, [], lora=True, salt="tiny-adapter")
    bench.run("adapter and salt, repeated", words * 4, [], lora=True, salt="tiny-adapter")
    bench.settle()
    frames = bench.tap.drain()
    captured = len(bench.requests)
    # vLLM sends what became of its blocks with the next step, so a step has to follow.
    bench.llm.reset_prefix_cache()
    bench.run("step", "x")
    bench.run("after the cache was cleared", words + IMAGE + words, [a])
    bench.run("the same four times at once", two, [c, b], copies=4)
    for i in range(12):
        bench.run(f"pressure {i}", f"{i} " + words * 9)
    for name, images in (("a", [a]), ("c", [c])):
        bench.run(f"evicted, {name}", words + IMAGE + words, images)
    bench.run("evicted copies", two, [c, b])

    report = {
        "requests": bench.requests,
        "failures": [repr(error) for error in bench.failures],
        "gaps": bench.metrics.kv_event_gaps._value.get(),
        "kinds": {
            kind: bench.metrics.kv_events.labels(kind)._value.get()
            for kind in ("stored", "removed", "cleared", "ignored", "malformed")
        },
        "dropped": bench.normalizer.statistics().dropped,
        "blocks": bench.normalizer.statistics().blocks,
    }
    bench.close()
    (args.out / "report.json").write_text(json.dumps(report))
    capture = {"requests": bench.requests[:captured], "frames": frames}
    (args.out / "capture.msgpack").write_bytes(msgspec.msgpack.encode(capture))


if __name__ == "__main__":
    main()
