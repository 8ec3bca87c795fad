"""What tests of vLLM's roles start, and what they ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.direct import DirectClient, FrontendDouble, Segments, request
from tests.pictures import data_uri, part, picture, video, video_part
from tests.stack import Answer, FrontendSpec, Process, Seen, Stack

ROLE = "--disaggregation-mode"
RUST = FrontendSpec("rust", "off")

ONE, OTHER = part(data_uri(picture(201))), part(data_uri(picture(202)))
VIDEO = video_part(video())

#: What one aggregated worker answers to these is the measure; see `conftest`.
PROMPTS: Mapping[str, list[Any]] = {
    "text": ["one two three four five six seven eight " * 8],
    "one image": [ONE, "Describe the image"],
    "two images": [ONE, OTHER, "Compare the images"],
    "two images swapped": [OTHER, ONE, "Compare the images"],
    "one image twice": [OTHER, OTHER, "Compare the images"],
    "image at the end": ["What is in this image?", ONE],
    "a video": [VIDEO, "Describe the video"],
    "a video before an image": [VIDEO, ONE, "Compare them"],
}

#: Tests may run on machines that are busy with others.
START_TIMEOUT_S = 500.0


class Deployment(Stack):
    """A stack that waits for longer."""

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        super().wait_ready(timeout)


def the(stack: Stack, role: str) -> Process:
    """The one live worker of a role."""
    (worker,) = [one for one in stack.worker if one.role == role and one.alive]
    return worker


def ask(stack: Stack, *content: Any, **options: Any) -> Seen:
    """One request that is answered."""
    seen = stack.ask("rust", list(content), **options)
    assert seen.answer.status == 200, seen.answer.body
    return seen


def check_processed_image_is_encoded(stack: Stack, model: Path, segments: Segments) -> None:
    """Have the encode worker encode what a frontend has processed, and its neighbour take it.

    Straight to the workers: Dynamo's frontends (1.6.1) leave the encode worker out where they have
    sent processed media.
    """
    front = FrontendDouble(model)
    try:
        rendered = front.render([picture(), picture()], "Compare the images")
    finally:
        front.close()
    encoder, consumer = the(stack, "encode"), the(stack, "agg")
    body = request(rendered, shm=[segments.put(item.payload) for item in rendered.items])
    with (
        DirectClient(stack.env, stack.folder / "to_encode.log", "encode") as to_encode,
        DirectClient(stack.env, stack.folder / "to_agg.log") as to_agg,
    ):
        plain = to_agg.send(request(rendered.renamed(), raw=True), stack.instance_id(consumer))
        assert (len(plain.tokens), plain.error) == (8, None)
        for items in ({"encoded": 2}, {"cached": 2}):
            before = encoder.metrics(), consumer.metrics()
            encoded = to_encode.send(body, stack.instance_id(encoder))
            assert encoded.error is None
            assert encoded.handle is not None
            reply = to_agg.send(
                {**body, "encoder_result": encoded.handle}, stack.instance_id(consumer)
            )
            assert (reply.tokens, reply.error) == (plain.tokens, None)
            change = encoder.metrics() - before[0], consumer.metrics() - before[1]
            assert change[0].by("source", "dynamo_worker_ext_mm_items_total") == items
            read = change[0].total("dynamo_worker_ext_mm_received_bytes_total", transport="shm")
            sent = sum(len(item.payload) for item in rendered.items)
            assert read == (sent if "encoded" in items else 0)
            seen = Seen(Answer(200, {}, 0.0), change[0], change)
            assert seen.processed_images == 0
        # Spoilt for the encode worker, so that it is for the next one to say what is wrong.
        spoilt = request(rendered.renamed(), shm=[{"name": "dwe_none", "size": 99}] * 2)
        handle = to_encode.send(spoilt, stack.instance_id(encoder)).handle
        assert handle == {"version": 1, "items": []}
        lost = to_agg.send({**spoilt, "encoder_result": handle}, stack.instance_id(consumer))
        assert lost.tokens == []
        assert "segment_missing" in str(lost.error)
