"""One item on its way through an encode worker: what it is known by, and what is said of it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dynamo_worker_ext import wire
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.wire import MODALITIES, EncodedItem, Modality
from dynamo_worker_ext.worker.embeddings import Key
from dynamo_worker_ext.worker.encoder import Encoded, Encoder, ProcessedMedia, Video, runs_of
from dynamo_worker_ext.worker.routing import cache_salt

if TYPE_CHECKING:
    from PIL.Image import Image


class ProcessedReading:
    """What the policy of ingest has to know to read processed media for an encode worker."""

    mixes_raw_and_held = True

    def __init__(
        self,
        holds: Callable[[Key], bool],
        encoder: Encoder,
        limits: Mapping[wire.Modality, int],
    ) -> None:
        self._holds = holds
        self._encoder = encoder
        self.limits = limits

    def holds(self, mm_hash: str, scope: str = "") -> bool:
        return self._holds((scope, mm_hash))

    def check(self, transfer: wire.Transfer) -> None:
        """Who takes the embeddings looks at the prompt."""

    def convert(self, item: wire.MediaItem, payload: KwargsItem) -> KwargsItem:
        self._encoder.check(item, payload)
        return payload


@dataclass(slots=True)
class MediaToEncode:
    """One image or video of a request.

    Attributes:
        modality: its kind.
        raw: as Dynamo's loaders take it.
        identity: 16 or 64 hex; None until it was loaded, where no frontend gave one.
        scope: keeps it apart from the same item of others.
        cache_scope: the client's, for the loaders.
        processor_kwargs, io_kwargs: options that change what it becomes.
        options: the same as JSON; empty if there are none.
    """

    modality: Modality
    raw: Mapping[str, Any]
    identity: str | None
    scope: str
    cache_scope: str | None
    processor_kwargs: Mapping[str, Any] | None
    io_kwargs: Mapping[str, Any] | None
    options: str


def media_of(request: Mapping[str, Any], media: wire.MediaRequest) -> list[MediaToEncode]:
    """The raw media of a request, by the identities that the router knows it by.

    One modality after the other, in the order of the prompt within each. With processor or decoding
    options an item becomes something else, which is not to be taken for what it is without them.
    """
    options, scope = options_of(media), scope_of(request)
    found = []
    for modality in MODALITIES:
        raw = media.raw.get(modality, ())
        hashes: Sequence[str | None] = media.mm_hashes.get(modality, ())
        if len(hashes) != len(raw):
            hashes = [None] * len(raw)
        elif options:
            hashes = [hashlib.sha256(f"{one} {options}".encode()).hexdigest() for one in hashes]
        found += [
            MediaToEncode(
                modality,
                one,
                mm_hash,
                scope,
                request.get("image_cache_scope"),
                media.mm_processor_kwargs,
                media.media_io_kwargs,
                options,
            )
            for one, mm_hash in zip(raw, hashes, strict=True)
        ]
    return found


def scope_of(request: Mapping[str, Any]) -> str:
    """What keeps a request's media apart from the same of others."""
    return json.dumps([cache_salt(request), request.get("image_cache_scope")])


def options_of(media: wire.MediaRequest) -> str:
    """Processor and decoding options as JSON; empty if there are none."""
    if not media.mm_processor_kwargs and not media.media_io_kwargs:
        return ""
    return json.dumps([media.mm_processor_kwargs, media.media_io_kwargs], sort_keys=True)


def processed(
    transfer: wire.Transfer, payloads: Sequence[KwargsItem | None] | None
) -> list[ProcessedMedia | None]:
    """What was read of a transfer's items, aligned with them; None for one that was not."""
    tokens = transfer.expanded_token_ids
    found: list[ProcessedMedia | None] = []
    for item, payload in zip(transfer.items, payloads or (), strict=True):
        where = item.placeholder
        runs = runs_of(tokens[where.offset : where.end])
        found.append(None if payload is None else ProcessedMedia(item, payload, runs))
    return found


def known_picture() -> str:
    """A picture of 64 x 64 pixels, as a data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    ramp = bytes(range(256)) * 3
    Image.frombytes("RGB", (16, 16), ramp).resize((64, 64)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def content_hash(loaded: Image | Video, options: str) -> str:
    """An identity of 64 hex for an item that no frontend gave one to."""
    if isinstance(loaded, bytes):
        digest = hashlib.sha256(f"{options} ".encode())
        digest.update(loaded)
    elif isinstance(loaded, tuple):
        frames, metadata = loaded
        # What a video becomes also depends on when its frames are shown.
        about = json.dumps([frames.shape, metadata], sort_keys=True, default=str)
        digest = hashlib.sha256(f"{about} {options} ".encode())
        digest.update(np.ascontiguousarray(frames).data)
    else:
        digest = hashlib.sha256(f"{loaded.mode} {loaded.size} {options} ".encode())
        digest.update(loaded.tobytes())
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
        seconds_per_grid=encoded.seconds_per_grid,
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
