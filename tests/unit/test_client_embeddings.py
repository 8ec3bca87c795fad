"""Embeddings that a client sends in place of an image: what is taken, what is refused and why, and
that nothing is read twice."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import (
    InvalidTransferError,
    MediaLoadError,
    RequestError,
    UnsupportedOptionError,
)
from dynamo_worker_ext.ingest import Outcome
from dynamo_worker_ext.media import MediaLoader
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.worker.client_embeddings import ClientEmbeddings, are_in
from dynamo_worker_ext.worker.embeddings_file import EmbeddingsForm, read_embeddings
from tests.embeddings import data_uri_of_file
from tests.pictures import PictureServer, data_uri, picture

PAD, WIDTH = 90, 8
FORM = EmbeddingsForm(PAD, WIDTH, "bfloat16", 2)
GRIDLESS = EmbeddingsForm(PAD, WIDTH, "float16", None, 3)


def tensors(tokens: int = 4, **more: Any) -> dict[str, torch.Tensor]:
    given = {
        "image_embeds": torch.rand(tokens, WIDTH).to(torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, 2, 2 * tokens]]),
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def file(tokens: int = 4, **more: Any) -> bytes:
    data: bytes = save(tensors(tokens, **more))
    return data


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# The file.


@pytest.mark.parametrize("flat", [False, True])
def test_a_good_file_is_read_as_it_is(flat: bool) -> None:
    given = tensors()
    if flat:
        given["image_grid_thw"] = given["image_grid_thw"].flatten()
    told, item = read_embeddings(save(given, metadata={"made by": "a test"}), FORM)
    assert told == wire.Embeddings((4, WIDTH), "bfloat16", (1, 2, 8))
    assert torch.equal(item.fields["image_embeds"].data, given["image_embeds"])
    grid = item.fields["image_grid_thw"].data
    assert isinstance(grid, torch.Tensor)
    assert (grid.dtype, grid.tolist()) == (torch.int64, [1, 2, 8])


def test_a_model_without_grids_takes_none() -> None:
    embeds = torch.rand(3, WIDTH).half()
    told, item = read_embeddings(save({"image_embeds": embeds}), GRIDLESS)
    assert told == wire.Embeddings((3, WIDTH), "float16", None)
    assert list(item.fields) == ["image_embeds"]
    with pytest.raises(RequestError, match=r"got .*image_grid_thw"):
        read_embeddings(file(3), GRIDLESS)
    with pytest.raises(RequestError, match="3 tokens for this model, got 4"):
        read_embeddings(save({"image_embeds": torch.rand(4, WIDTH).half()}), GRIDLESS)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"image_embeds": None}, "holds"),
        ({"image_grid_thw": None}, "holds"),
        ({"pixel_values": torch.zeros(1)}, "holds"),
        ({"image_embeds": torch.zeros(4, WIDTH)}, "bfloat16 for this model, got F32"),
        ({"image_embeds": torch.zeros(4, WIDTH, dtype=torch.float8_e4m3fn)}, "got F8"),
        ({"image_embeds": torch.zeros(4, WIDTH + 1).bfloat16()}, "shape"),
        ({"image_embeds": torch.zeros(1, 4, WIDTH).bfloat16()}, "shape"),
        ({"image_embeds": torch.zeros(0, WIDTH).bfloat16()}, "shape"),
        ({"image_embeds": torch.tensor(1.0).bfloat16()}, "shape"),
        ({"image_embeds": torch.full((4, WIDTH), float("nan")).bfloat16()}, "finite"),
        ({"image_embeds": torch.full((4, WIDTH), float("inf")).bfloat16()}, "finite"),
        ({"image_grid_thw": torch.tensor([1, 2, 8], dtype=torch.int32)}, "I64"),
        ({"image_grid_thw": torch.tensor([2, 8])}, "I64 of shape"),
        ({"image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]])}, "I64 of shape"),
        ({"image_grid_thw": torch.tensor([1, 2, 4])}, "makes 2 embeddings, got 4"),
        ({"image_grid_thw": torch.tensor([1, 1, 16])}, "multiples of 2"),
        ({"image_grid_thw": torch.tensor([2, 2, 4])}, "multiples of 2"),
        ({"image_grid_thw": torch.tensor([1, -2, -8])}, "multiples of 2"),
        ({"image_grid_thw": torch.tensor([1, 0, 8])}, "multiples of 2"),
        ({"image_grid_thw": torch.tensor([1, 2**62, 2**62])}, "makes"),
    ],
)
def test_what_the_model_does_not_take_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        read_embeddings(file(**more), FORM)
    assert caught.value.status == 400


def pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors(), buffer)
    return buffer.getvalue()


_ENTRY = {"dtype": "BF16", "shape": [2**62, WIDTH], "data_offsets": [0, 2**62]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        file()[:-1],
        file()[:40],
        file() + b"\0",
        b"\xff" * 8 + file()[8:],
        (2**40).to_bytes(8, "little") + file()[8:],
        with_header({"__metadata__": {"x": "y" * 20_000}}),
        with_header({"image_embeds": _ENTRY, "image_grid_thw": _ENTRY}, b"\0" * 64),
        with_header([]),
        pickle.dumps(tensors()),
        pickled(),
    ],
    ids=[
        "empty", "short", "truncated", "cut in the header", "more behind", "header of 2**64",
        "header of 2**40", "long header", "offsets outside", "no object", "pickle", "torch.save",
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        read_embeddings(data, FORM)


_GOOD = file()


@given(st.integers(0, len(_GOOD) - 1), st.integers(0, 255))
def test_a_byte_that_is_wrong_anywhere_is_taken_as_a_number_or_refused(at: int, byte: int) -> None:
    spoilt = bytearray(_GOOD)
    spoilt[at] = byte
    try:
        told, _ = read_embeddings(bytes(spoilt), FORM)
    except RequestError:
        return
    assert told.shape == (4, WIDTH)


# The request.


class Engine:
    """An engine that holds what a test has it hold."""

    mixes_raw_and_held = True
    limits: Mapping[wire.Modality, int] = {"image": 3}

    def __init__(self) -> None:
        self.embeddings_form: EmbeddingsForm | None = FORM
        self.held: set[tuple[str, str]] = set()
        self.converted = 0
        self.misread = self.refuses = False

    def holds(self, mm_hash: str, scope: str = "") -> bool:
        return (scope, mm_hash) in self.held

    def check(self, transfer: wire.Transfer) -> None:
        if self.misread:
            raise InvalidTransferError("two images meet", reason="invalid_placeholder")

    def convert(self, item: wire.MediaItem, payload: KwargsItem) -> Any:
        if self.refuses:
            raise InvalidTransferError("does not fit", reason="invalid_type")
        self.converted += 1
        return payload.fields["image_embeds"].data


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def client(engine: Engine, metrics: Metrics) -> ClientEmbeddings:
    loader = MediaLoader(frontend_decoding=False, cache_mb=1)
    return ClientEmbeddings(engine, loader, 4096, metrics)


def request(*urls: str, tokens: list[int] | None = None, **more: Any) -> wire.MediaRequest:
    prompt = [1, *[t for _ in urls for t in (PAD, 2)]] if tokens is None else tokens
    return wire.MediaRequest(prompt, raw={"image": [{"Url": url} for url in urls]}, **more)


def in_uri(tokens: int = 4, **more: Any) -> str:
    return data_uri_of_file(file(tokens, **more))


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        (in_uri(), True),
        ("data:application/safetensors,x", True),
        ("http://host/a.safetensors", True),
        ("https://host/a.safetensors?signed=1#x", True),
        ("data:application/safetensors2;base64,", False),
        ("data:image/png;base64,a.safetensors", False),
        ("http://host/a.png?name=a.safetensors", False),
        ("file:///a.safetensors", False),
        ("http://[/a.safetensors", False),
    ],
)
def test_what_stands_for_embeddings(url: str, is_one: bool) -> None:
    assert are_in(request(url)) is is_one


def test_media_that_was_processed_or_is_none_is_not_looked_at() -> None:
    assert not are_in(wire.MediaRequest([1]))
    assert not are_in(request(in_uri(), transfer=wire.Transfer([1], (), {})))
    decoded = wire.MediaRequest([PAD], raw={"image": [{"Decoded": {}}]})
    assert not are_in(decoded)


async def test_a_placeholder_becomes_as_many_tokens_as_there_are_embeddings(
    client: ClientEmbeddings, metrics: Metrics
) -> None:
    before = request(in_uri(4), in_uri(1))
    media, resolution = await client.resolve(before, scope="", fresh=False)
    transfer = media.transfer
    assert transfer is not None
    assert resolution.transfer is transfer
    assert media.raw == {}
    assert transfer.expanded_token_ids == [1, PAD, PAD, PAD, PAD, 2, PAD, 2]
    assert [item.placeholder for item in transfer.items] == [
        wire.Placeholder(1, 4),
        wire.Placeholder(6, 1),
    ]
    assert [item.embeddings for item in transfer.items] == [
        wire.Embeddings((4, WIDTH), "bfloat16", (1, 2, 8)),
        wire.Embeddings((1, WIDTH), "bfloat16", (1, 2, 2)),
    ]
    assert (resolution.outcome, resolution.transport) == (Outcome.RECEIVED, "client")
    assert resolution.payloads is not None
    assert [payload.shape for payload in resolution.payloads] == [(4, WIDTH), (1, WIDTH)]
    assert before.token_ids == [1, PAD, 2, PAD, 2]
    counted = metrics.registry.get_sample_value(
        "dynamo_worker_ext_mm_received_bytes_total", {"transport": "client"}
    )
    assert counted == len(file(4)) + len(file(1))


async def test_what_the_engine_holds_is_not_read_again(
    client: ClientEmbeddings, engine: Engine
) -> None:
    uri = in_uri()
    media, _ = await client.resolve(request(uri), scope="s", fresh=False)
    assert media.transfer is not None
    (item,) = media.transfer.items
    engine.held.add(("s", item.mm_hash))
    again, resolution = await client.resolve(request(uri), scope="s", fresh=False)
    assert again == media
    assert (resolution.outcome, resolution.payloads) == (Outcome.HIT, (None,))
    assert engine.converted == 1
    for scope, fresh in (("s", True), ("other", False)):
        _, resolution = await client.resolve(request(uri), scope=scope, fresh=fresh)
        assert resolution.outcome is Outcome.RECEIVED
    _, resolution = await client.resolve(request(uri, in_uri(2)), scope="s", fresh=False)
    assert resolution.outcome is Outcome.RECEIVED
    assert resolution.payloads is not None
    assert [payload is None for payload in resolution.payloads] == [True, False]


async def test_identity_is_of_the_content_and_cannot_be_foreseen(
    client: ClientEmbeddings, engine: Engine, metrics: Metrics
) -> None:
    async def identity(of: ClientEmbeddings, media: wire.MediaRequest) -> str:
        done, _ = await of.resolve(media, scope="", fresh=False)
        assert done.transfer is not None
        return done.transfer.items[0].mm_hash

    uri, other = in_uri(), in_uri()
    name = await identity(client, request(uri, mm_hashes={"image": ("ab" * 8,)}))
    assert len(name) == 64
    assert name == await identity(client, request(uri))
    assert name != await identity(client, request(other, mm_hashes={"image": ("ab" * 8,)}))
    loader = MediaLoader(frontend_decoding=False, cache_mb=1)
    assert name != await identity(ClientEmbeddings(engine, loader, 4096, metrics), request(uri))


@pytest.mark.parametrize(
    ("media", "says"),
    [
        (request(in_uri(), data_uri(picture())), "1 image.s. and 1 other"),
        (
            wire.MediaRequest(
                [PAD], raw={"image": [{"Url": in_uri()}], "video": [{"Url": "http://x/v.mp4"}]}
            ),
            "1 image.s. and 1 other",
        ),
        (request(in_uri(), tokens=[1, 2]), "0 placeholder"),
        (request(in_uri(), tokens=[PAD, PAD]), "2 placeholder"),
        (request(in_uri(image_grid_thw=None)), "holds"),
        (request("data:application/safetensors;base64,????"), "base64"),
        (request("data:application/safetensors,abc"), "base64"),
        (request("http://127.0.0.1:1/a.safetensors"), "not allowed"),
        (request(in_uri(), mm_processor_kwargs={"a": 1}), "no effect"),
        (request(in_uri(), media_io_kwargs={"image": {}}), "no effect"),
    ],
)
async def test_what_is_the_clients_to_mend(
    client: ClientEmbeddings, engine: Engine, media: wire.MediaRequest, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        await client.resolve(media, scope="", fresh=False)
    assert caught.value.status == 400
    assert engine.converted == 0
    if media.mm_processor_kwargs:
        assert isinstance(caught.value, UnsupportedOptionError)


@pytest.mark.parametrize("fault", ["misread", "refuses"])
async def test_what_the_engine_refuses_is_the_clients_too(
    client: ClientEmbeddings, engine: Engine, fault: str
) -> None:
    setattr(engine, fault, True)
    with pytest.raises(RequestError, match="do not fit"):
        await client.resolve(request(in_uri()), scope="", fresh=False)


async def test_a_model_that_takes_none(client: ClientEmbeddings, engine: Engine) -> None:
    engine.embeddings_form = None
    with pytest.raises(RequestError, match="takes no embeddings"):
        await client.resolve(request(in_uri()), scope="", fresh=False)


async def test_a_file_that_is_too_large(
    client: ClientEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = in_uri(400)  # of 6400 bytes and a header; the limit is 4096
    with pytest.raises(MediaLoadError, match=r"maximum allowed size .4096 bytes"):
        await client.resolve(request(uri), scope="", fresh=False)
    monkeypatch.setenv("DYN_MM_MAX_FILE_SIZE_MB", "1")
    with pytest.raises(MediaLoadError, match="DYN_MM_MAX_FILE_SIZE_MB") as caught:
        await client.resolve(request(in_uri(100_000)), scope="", fresh=False)
    assert caught.value.status == 413


async def test_a_url_is_fetched_within_the_limits(
    engine: Engine, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "1")
    loader = MediaLoader(frontend_decoding=False, cache_mb=1)
    client = ClientEmbeddings(engine, loader, 4096, metrics)
    with PictureServer() as server:
        url = server.file(file(4), ".safetensors")
        media, _ = await client.resolve(request(url), scope="", fresh=False)
        assert media.transfer is not None
        for data, says in ((file(400), "4096 byte"), (b"x", "safetensors")):
            wrong = server.file(data, ".safetensors")
            with pytest.raises(RequestError, match=says):
                await client.resolve(request(wrong), scope="", fresh=False)
        missing = url.replace(".safetensors", "0.safetensors")
        with pytest.raises(MediaLoadError) as caught:
            await client.resolve(request(missing), scope="", fresh=False)
        assert caught.value.status == 404
