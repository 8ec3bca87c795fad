"""What tests of SGLang's roles start, and what they ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.engines import SGLANG_ROLES
from tests.pictures import data_uri, part, picture, video, video_part
from tests.stack import FrontendSpec, free_port

DOORS: Final = {
    "rust": FrontendSpec("rust", "off"),
    "vllm-shm": FrontendSpec("vllm", "shm"),
}


def prefill_args() -> Sequence[str]:
    """Of one prefill worker of a host; each has a bootstrap port of its own."""
    port = str(free_port())
    return (
        "--disaggregation-mode", "prefill", *SGLANG_ROLES["prefill"],
        "--disaggregation-bootstrap-port", port,
    )  # fmt: skip


DECODE_ARGS: Final = ("--disaggregation-mode", "decode", *SGLANG_ROLES["decode"])


def questions(door: str) -> dict[str, Any]:
    """What is asked at one door, with pictures that no other door has seen."""
    one, other = picture(), picture()
    first, second = part(data_uri(one)), part(data_uri(other))
    asked: dict[str, Any] = {
        "text": f"{door} says " + "one two three four five six seven eight " * 8,
        "one image": [first, "Describe the image"],
        "two images": [first, second, "Describe the image"],
        "two images swapped": [second, first, "Describe the image"],
    }
    if door == "rust":  # where SGLang itself processes videos, which it does unlike vLLM
        asked["a video"] = [video_part(video()), "Describe the video"]
    return asked
