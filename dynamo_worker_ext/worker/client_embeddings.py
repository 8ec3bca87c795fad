"""Embeddings that a client sends in place of an image, on their way to the engine's input.

Dynamo's chat API (1.6.1) has no part for them. They come as an ``image_url``: a data URI of
`MEDIA_TYPE`, or an http(s) URL whose path ends with `SUFFIX`, fetched as a picture is. What such a
file holds, `dynamo_worker_ext.worker.embeddings_file` says. Once it is checked the engine takes it
as it takes what an encode worker made. Lives in the worker process.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from dynamo_worker_ext.errors import InvalidTransferError, RequestError, UnsupportedOptionError
from dynamo_worker_ext.ingest import EngineMedia, Outcome, Resolution
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.wire import Embeddings, MediaItem, MediaRequest, Placeholder, Transfer
from dynamo_worker_ext.wire.encoded import MAX_TOKENS
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm, read_embeddings

MEDIA_TYPE: Final = "application/safetensors"
SUFFIX: Final = ".safetensors"

#: What the metrics call their way here.
TRANSPORT: Final = "client"

#: Of checked files what they hold is remembered: some hundred bytes each.
_KNOWN: Final = 4096

_DATA: Final = (f"data:{MEDIA_TYPE};", f"data:{MEDIA_TYPE},")


class TakesEmbeddings(EngineMedia, Protocol):
    """An engine's media, as it is seen here."""

    @property
    def embeddings_form(self) -> EmbeddingsForm | None:
        """What embeddings clients may send; None if none."""


class Files(Protocol):
    """Loads files; see `dynamo_worker_ext.media.MediaLoader`."""

    async def fetch(self, url: str, max_bytes: int) -> bytes: ...


class _Sent(NamedTuple):
    """One image's embeddings: identity, what they are, and the tensors unless the engine has them;
    `size` is that of the file."""

    identity: str
    told: Embeddings
    payload: KwargsItem | None
    size: int


def are_in(media: MediaRequest) -> bool:
    """Whether any image of a request is its embeddings."""
    return media.transfer is None and any(map(_is_embeddings, media.raw.get("image", ())))


class ClientEmbeddings:
    """Embeddings that clients of one engine send.

    Args:
        engine: the engine's side.
        files: loads what a URL names.
        max_item_bytes: of one file (``--mm-max-item-mb``).
        metrics: where bytes and stages are counted.
    """

    def __init__(
        self, engine: TakesEmbeddings, files: Files, max_item_bytes: int, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._files = files
        self._max_item_bytes = max_item_bytes
        self._metrics = metrics
        self._known: OrderedDict[str, Embeddings] = OrderedDict()
        self._key = secrets.token_bytes(32)

    async def resolve(
        self, media: MediaRequest, *, scope: str, fresh: bool
    ) -> tuple[MediaRequest, Resolution]:
        """Load and check a request's embeddings. The limit of items was checked before.

        Args:
            media: a request that has some; see `are_in`.
            scope: of the request; see `EngineMedia.holds`.
            fresh: read everything, whatever the engine seems to hold.

        Returns:
            The request with its embeddings in the place of raw media, and what the engine is to be
            given.

        Raises:
            RequestError: they cannot be had, or are not what this model takes.
        """
        form = self._form(media)
        found = await asyncio.gather(
            *(self._take(str(one["Url"]), form, scope, fresh) for one in media.raw["image"])
        )
        transfer = _transfer(media.token_ids, found, form)
        try:
            self._engine.check(transfer)
            payloads = tuple(
                None if sent.payload is None else self._engine.convert(item, sent.payload)
                for item, sent in zip(transfer.items, found, strict=True)
            )
        except InvalidTransferError as error:
            raise RequestError(f"embeddings of an image do not fit: {error}") from error
        if all(payload is None for payload in payloads):
            resolution = Resolution(Outcome.HIT, payloads=payloads, transfer=transfer)
        else:
            self._metrics.bytes.labels(TRANSPORT).inc(
                sum(sent.size for sent in found if sent.payload is not None)
            )
            resolution = Resolution(Outcome.RECEIVED, TRANSPORT, payloads, transfer=transfer)
        return msgspec.structs.replace(media, transfer=transfer, raw={}), resolution

    def _form(self, media: MediaRequest) -> EmbeddingsForm:
        """What is taken, of a request whose media is embeddings and nothing else."""
        form = self._engine.embeddings_form
        if form is None:
            raise RequestError("this model takes no embeddings in place of an image")
        images = media.raw["image"]
        sent = sum(map(_is_embeddings, images))
        others = sum(map(len, media.raw.values())) - sent
        if others:
            raise RequestError(
                f"the request carries embeddings of {sent} image(s) and {others} other media "
                "item(s); send embeddings of all of them or of none"
            )
        if media.mm_processor_kwargs or media.media_io_kwargs:
            raise UnsupportedOptionError(
                "mm_processor_kwargs and media_io_kwargs have no effect on embeddings; leave them "
                "out"
            )
        if (places := media.token_ids.count(form.token)) != len(images):
            raise RequestError(
                f"the request carries embeddings of {len(images)} image(s), but its prompt has "
                f"{places} placeholder(s) for them"
            )
        return form

    async def _take(self, url: str, form: EmbeddingsForm, scope: str, fresh: bool) -> _Sent:
        """One file: checked, or known and held by the engine."""
        with self._metrics.stage("load"):
            data = await self._files.fetch(url, self._max_item_bytes)
            identity = await asyncio.to_thread(self._identity, data)
        told = self._known.get(identity)
        if told is not None and not fresh and self._engine.holds(identity, scope):
            self._known.move_to_end(identity)
            return _Sent(identity, told, None, len(data))
        with self._metrics.stage("decode"):
            read, payload = await asyncio.to_thread(read_embeddings, data, form)
        self._known[identity] = read
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return _Sent(identity, read, payload, len(data))

    def _identity(self, data: bytes) -> str:
        """The mm_hash of a file, 64 hex.

        Frontends (1.6.1) give these images none, and one that did might have hashed the URL. The
        key keeps it from being foreseen: a client may name a picture as it likes, and one of this
        name would be taken for the embeddings.
        """
        return hashlib.blake2b(data, key=self._key, digest_size=32).hexdigest()


def _is_embeddings(image: Mapping[str, Any]) -> bool:
    url = image.get("Url")
    if not isinstance(url, str):
        return False
    if url.startswith("data:"):
        return url.startswith(_DATA)
    try:
        parts = urlsplit(url)
    except ValueError:  # the loader of pictures says what is wrong with it
        return False
    return parts.scheme in ("http", "https") and parts.path.endswith(SUFFIX)


def _transfer(before: Sequence[int], found: Sequence[_Sent], form: EmbeddingsForm) -> Transfer:
    """The prompt with room for all embeddings, which are as many as its placeholders."""
    total = len(before) + sum(sent.told.shape[0] for sent in found)
    if total > MAX_TOKENS:
        raise RequestError(f"embeddings make a prompt of {total} tokens; {MAX_TOKENS} are taken")
    tokens: list[int] = []
    items: list[MediaItem] = []
    for token in before:
        if token != form.token:
            tokens.append(token)
            continue
        sent = found[len(items)]
        where = Placeholder(len(tokens), sent.told.shape[0])
        items.append(MediaItem("image", sent.identity, where, sent.told))
        tokens += [token] * where.length
    return Transfer(tokens, tuple(items), {})
