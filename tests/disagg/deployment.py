"""What tests of vLLM's roles start, and what they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.direct import DirectClient, FrontendDouble, Segments, request
from tests.embeddings import data_uri_of, data_uri_of_file, tensors_of
from tests.pictures import PictureServer, data_uri, part, picture, video, video_part
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


def check_embeddings_of_a_client(stack: Stack) -> None:
    """Send what the model's own tower makes of pictures in place of these, through the frontend and
    past the encode worker: the answers are those to the pictures."""
    uris = [data_uri(picture(203)), data_uri(picture(204))]
    pictures = [part(uri) for uri in uris]
    assert len({ask(stack, one, "Compare the images").text for one in pictures}) == 2
    tensors = [_embeddings(stack, uri) for uri in uris]
    first, second = (part(data_uri_of(one)) for one in tensors)
    for sent, shown, new in (
        ([first], pictures[:1], {"received": 1}),
        ([first], pictures[:1], {"hit": 1}),
        ([second, first], pictures[::-1], {"hit": 1, "received": 1}),
        ([first, first], [pictures[0]] * 2, {"hit": 2}),
    ):
        text = ask(stack, *shown, "Compare the images").text
        seen = ask(stack, *sent, "Compare the images")
        assert seen.text == text
        assert seen.of("encode").outcomes == {"passed_on": 1}
        taken = _first(seen)
        assert taken.items == new
        assert taken.outcome == ("received" if "received" in new else "hit")
        assert seen.processed_images == 0
        assert bool(seen.received_bytes) == ("received" in new)
        again = ask(stack, *sent, "Compare the images")
        assert again.text == text
        assert (_first(again).outcome, again.received_bytes) == ("hit", 0)
        assert again.answer.cached_tokens == again.answer.reusable_tokens > 0
    with PictureServer() as server:
        url = server.file(save(tensors[0]), ".safetensors?signed=1")
        seen = ask(stack, part(url), "Compare the images")
        assert _first(seen).items == {"hit": 1}
        assert seen.text == ask(stack, pictures[0], "Compare the images").text


def check_wrong_embeddings_are_refused(stack: Stack) -> None:
    """Send what the model does not take; the engine answers afterwards as it did before."""
    uri = data_uri(picture(205))
    good = _embeddings(stack, uri)
    right, shown = part(data_uri_of(good)), part(uri)
    known = ask(stack, right, "Describe the image").text
    embeds, grid = good["image_embeds"], good["image_grid_thw"]
    time, height, width = grid.flatten().tolist()
    wrong = (
        {"image_embeds": embeds[:, :-1].contiguous()},
        {"image_embeds": embeds[:-1].contiguous()},
        {"image_embeds": embeds.float()},
        {"image_embeds": torch.full_like(embeds, float("nan"))},
        {"image_grid_thw": grid.int()},
        {"image_grid_thw": torch.tensor([time, 1, height * width])},
        {"image_grid_thw": torch.tensor([height, time, width])},
        {"pixel_values": torch.zeros(1)},
        # More than any prompt has room for.
        {
            "image_embeds": embeds[:1].repeat(10_000, 1),
            "image_grid_thw": torch.tensor([1, 200, 200]),
        },
    )
    parts = [[part(data_uri_of({**good, **one}))] for one in wrong]
    torn = part(data_uri_of_file(save(dict(good))[:-1]))
    for sent in (*parts, [torn], [right, shown], [right] * 4):
        answer = stack.chat("rust", [*sent, "Describe the image"])
        assert answer.status == 400, answer.body
    assert ask(stack, right, "Describe the image").text == known


def _first(seen: Seen) -> Seen:
    """Of the worker that takes a request's media."""
    return seen.of("prefill" if "prefill" in seen.roles else "agg")


def _embeddings(stack: Stack, uri: str) -> dict[str, torch.Tensor]:
    """What the encode worker makes of a picture, as a client sends it."""
    body = {
        "model": "tiny",
        "token_ids": [1],
        "multi_modal_data": {"image_url": [{"Url": uri}]},
        "sampling_options": {},
        "stop_conditions": {},
        "output_options": {},
    }
    encoder = the(stack, "encode")
    with DirectClient(stack.env, stack.folder / "to_encode.log", "encode") as client:
        handle = client.send(body, stack.instance_id(encoder)).handle
    assert handle is not None
    return asyncio.run(tensors_of(handle))
