"""One image on its way through an encode worker: what it is known by, and what is said of it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from dynamo_worker_ext import wire
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.wire import EncodedItem
from dynamo_worker_ext.worker.encoder import Encoded, ProcessedImage
from dynamo_worker_ext.worker.routing import cache_salt

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(slots=True)
class ImageToEncode:
    """One image of a request.

    Attributes:
        raw: as Dynamo's loaders take it.
        identity: 16 or 64 hex; None until it was loaded, where no frontend gave one.
        scope: keeps it apart from the same image of others.
        cache_scope: the client's, for the loaders.
        processor_kwargs, io_kwargs: options that change what it becomes.
        options: the same as JSON; empty if there are none.
    """

    raw: Mapping[str, Any]
    identity: str | None
    scope: str
    cache_scope: str | None
    processor_kwargs: Mapping[str, Any] | None
    io_kwargs: Mapping[str, Any] | None
    options: str


def images_of(request: Mapping[str, Any], media: wire.MediaRequest) -> list[ImageToEncode]:
    """The images of a request, by the identities that the router knows them by.

    With processor or decoding options an image becomes something else, which is not to be taken
    for what it is without them.
    """
    raw, options = media.raw["image"], options_of(media)
    hashes: Sequence[str | None] = media.mm_hashes.get("image", ())
    if len(hashes) != len(raw):
        hashes = [None] * len(raw)
    elif options:
        hashes = [hashlib.sha256(f"{one} {options}".encode()).hexdigest() for one in hashes]
    cache_scope = request.get("image_cache_scope")
    scope = scope_of(request)
    of_processor, of_loader = media.mm_processor_kwargs, media.media_io_kwargs
    return [
        ImageToEncode(one, mm_hash, scope, cache_scope, of_processor, of_loader, options)
        for one, mm_hash in zip(raw, hashes, strict=True)
    ]


def scope_of(request: Mapping[str, Any]) -> str:
    """What keeps a request's images apart from the same ones of others."""
    return json.dumps([cache_salt(request), request.get("image_cache_scope")])


def options_of(media: wire.MediaRequest) -> str:
    """Processor and decoding options as JSON; empty if there are none."""
    if not media.mm_processor_kwargs and not media.media_io_kwargs:
        return ""
    return json.dumps([media.mm_processor_kwargs, media.media_io_kwargs], sort_keys=True)


def processed(
    transfer: wire.Transfer, payloads: Sequence[KwargsItem | None] | None
) -> list[ProcessedImage | None]:
    """What was read of a transfer's images, aligned with them; None for one that was not."""
    tokens = transfer.expanded_token_ids
    found: list[ProcessedImage | None] = []
    for item, payload in zip(transfer.items, payloads or (), strict=True):
        where = item.placeholder
        runs = tuple(
            (token, len(list(run))) for token, run in groupby(tokens[where.offset : where.end])
        )
        found.append(None if payload is None else ProcessedImage(item, payload, runs))
    return found


def known_picture() -> str:
    """A picture of 64 x 64 pixels, as a data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    ramp = bytes(range(256)) * 3
    Image.frombytes("RGB", (16, 16), ramp).resize((64, 64)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def content_hash(image: Image, options: str) -> str:
    """An identity of 64 hex for an image that no frontend gave one to."""
    digest = hashlib.sha256(f"{image.mode} {image.size} {options} ".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def encoded_item(encoded: Encoded, mm_hash: str) -> EncodedItem:
    """What a handle says of an encoded item."""
    return EncodedItem(
        modality=encoded.modality,
        mm_hash=mm_hash,
        target=encoded.expansion.target,
        runs=encoded.expansion.runs,
        shape=tuple(encoded.embeddings.shape),
        dtype=cast(Any, str(encoded.embeddings.dtype).removeprefix("torch.")),
        grid=None if encoded.grid is None else cast(Any, tuple(encoded.grid.tolist())),
    )


def payload_of(encoded: Encoded) -> KwargsItem:
    """What is sent: the fields that vLLM's Qwen-VL models call so, for whoever reads them."""
    count = encoded.embeddings.shape[0]
    fields = {
        f"{encoded.modality}_embeds": KwargsField(
            encoded.embeddings, "flat", {"slices": [slice(0, count)], "dim": 0}
        )
    }
    if encoded.grid is not None:
        fields[f"{encoded.modality}_grid_thw"] = KwargsField(
            encoded.grid, "batched", {"keep_on_cpu": True}
        )
    return KwargsItem(fields)
