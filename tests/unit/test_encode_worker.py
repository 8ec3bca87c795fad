"""The encode worker around an encoder that is a few lines of Python: what it encodes, what it
passes on, what it shares, and what becomes of errors."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from dynamo.common.backend.health_check import HEALTH_CHECK_KEY
from dynamo.llm import exceptions

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import (
    EngineError,
    InvalidTransferError,
    RequestError,
    StartupError,
)
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import MmKwargsReceiver, MmKwargsSender, codec
from dynamo_worker_ext.transfer.base import Limits
from dynamo_worker_ext.transfer.fake import FakeReceiver, FakeSender, Fault
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.worker import add_worker_arguments, worker_options
from dynamo_worker_ext.worker.batch import Batcher
from dynamo_worker_ext.worker.encode import EncodeWorker
from dynamo_worker_ext.worker.encoder import Encoded, EncoderInfo, Expansion
from tests.pictures import data_uri, picture

IMAGE, VIDEO = 5, 6


class SlowEncoder:
    """Encodes when it is let go; refuses images of odd width."""

    decodes_videos = True

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.called = asyncio.Event()
        self.batches: list[int] = []
        self.error: Exception | None = None
        self.closed = 0
        self.takes_processed = True
        self.images: list[Any] = []

    async def start(self) -> EncoderInfo:
        return EncoderInfo("1", {"image": 3, "video": 1}, 100, 16, (IMAGE,), self.takes_processed)

    def check(self, item: wire.MediaItem, payload: KwargsItem) -> None:
        if "pixel_values" not in payload.fields:
            raise InvalidTransferError("no pixels", reason="invalid_type")

    async def encode(
        self,
        modality: wire.Modality,
        items: Sequence[Any],
        processor_kwargs: Mapping[str, Any] | None,
    ) -> list[Encoded]:
        self.batches.append(len(items))
        self.images += items
        self.called.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        if any(getattr(item, "width", 0) % 2 for item in items):
            raise RequestError("an odd width")
        token = {"image": IMAGE, "video": VIDEO}[modality]
        return [
            Encoded(
                modality,
                torch.zeros(4, 8, dtype=torch.bfloat16),
                torch.tensor([1, 4, 4]),
                Expansion((token,), ((token, 4),)),
                0.5 if modality == "video" else None,
            )
            for _ in items
        ]

    def is_dead(self) -> bool:
        return False

    async def close(self) -> None:
        self.closed += 1


class FakeArena(FakeSender):
    """Writes references that an arena's metadata can say."""

    async def _offer(self, payloads: Sequence[Sequence[Any]]) -> list[Any]:
        from dynamo_worker_ext.wire import ArenaRef

        refs = await super()._offer(payloads)
        return [ArenaRef("dwe_fake", "0" * 16, 0, 0, 64, ref.size, 1) for ref in refs]

    async def withdraw(self, refs: Sequence[Any]) -> None:
        self.payloads.clear()


class PlainWorker(EncodeWorker):
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError


class SmallWorker(PlainWorker):
    sender: FakeArena
    receiver: FakeReceiver

    async def _open_senders(self) -> dict[str, MmKwargsSender[Any]]:
        self.sender = FakeArena()
        return {"arena": self.sender}

    def open_receivers(self) -> dict[str, MmKwargsReceiver[Any]]:
        limits = Limits(self.options.max_item_bytes, self.options.transfer_timeout_s)
        self.receiver = FakeReceiver(limits, self.metrics)
        return {"shm": self.receiver}


class Context:
    def id(self) -> str:
        return "request"

    def is_stopped(self) -> bool:
        return False


def config_of(*argv: str) -> Any:
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    return SimpleNamespace(
        options=worker_options(parser.parse_args(argv)),
        worker=SimpleNamespace(model_name="model"),
        served_names=("model",),
        frontend_decoding=False,
    )


@pytest_asyncio.fixture
async def encoder() -> SlowEncoder:
    return SlowEncoder()


@pytest_asyncio.fixture
async def worker(
    encoder: SlowEncoder, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SmallWorker]:
    from dynamo_worker_ext.worker import encode

    monkeypatch.setattr(encode, "_LAST_READS_S", 0.0)
    worker = SmallWorker(config_of("--embedding-cache-mb", "1"), encoder, "vllm")
    await worker.start(0)
    yield worker
    encoder.go.set()
    await worker.cleanup()
    assert encoder.closed == 1
    assert worker.sender.closed
    assert not encoder.takes_processed or worker.receiver.closed


def request(*uris: str, hashes: Sequence[str] | None = None, **fields: Any) -> dict[str, Any]:
    hashes = [f"{i:016x}" for i, _ in enumerate(uris)] if hashes is None else list(hashes)
    return {
        "token_ids": [1, *[IMAGE] * len(uris)],
        "multi_modal_data": {"image_url": [{"Url": uri} for uri in uris]},
        "extra_args": {"mm_hashes": hashes},
        **fields,
    }


async def handle(worker: EncodeWorker, body: Mapping[str, Any]) -> dict[str, Any]:
    (chunk,) = [chunk async for chunk in worker.generate(body, Context())]
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "stop")
    found: dict[str, Any] = chunk["encoder_result"]
    return found


def outcomes(worker: EncodeWorker) -> dict[str, float]:
    (metric,) = worker.metrics.requests.collect()
    return {
        s.labels["outcome"]: s.value for s in metric.samples if s.name.endswith("requests_total")
    }


URI = data_uri(picture(1, 32))


async def test_an_image_becomes_a_small_handle(worker: SmallWorker) -> None:
    found = await handle(worker, request(URI))
    (item,) = found["items"]
    assert (item["shape"], item["dtype"], item["grid"]) == ([4, 8], "bfloat16", [1, 4, 4])
    assert (item["target"], item["runs"]) == ([IMAGE], [[IMAGE, 4]])
    assert list(found["mm_kwargs_arena"]["mm_hashes"]) == ["image"]
    assert len(worker.sender.payloads) == 1
    assert await handle(worker, request(URI)) == found
    assert len(worker.sender.payloads) == 1
    assert outcomes(worker) == {"encoded": 1, "hit": 1}


@pytest.mark.parametrize(
    "media",
    [
        None,
        {"audio_url": [{"Url": "data:audio/wav;base64,AAAA"}]},
        {"image_url": [{"Url": URI}], "audio_url": [{"Url": "data:audio/wav;base64,AAAA"}]},
        {"image_url": [{"Url": "data:application/safetensors;base64,AAAA"}]},
    ],
)
async def test_what_is_not_encoded_is_passed_on(
    worker: SmallWorker, encoder: SlowEncoder, media: Any
) -> None:
    found = await handle(worker, request(multi_modal_data=media))
    assert found == {"version": 1, "items": []}
    assert outcomes(worker) == {"passed_on": 1}
    assert not encoder.batches


CLIP = "data:video/mp4;base64,AAAA"


async def test_a_video_becomes_a_handle_by_its_content(
    worker: SmallWorker, encoder: SlowEncoder
) -> None:
    body = {"token_ids": [VIDEO], "multi_modal_data": {"video_url": [{"Url": CLIP}]}}
    found = await handle(worker, body)
    (item,) = found["items"]
    assert (item["modality"], item["seconds_per_grid"]) == ("video", 0.5)
    assert len(item["mm_hash"]) == 64
    assert encoder.images == [b"\0\0\0"], "this encoder decodes the file itself"
    assert await handle(worker, body) == found
    assert encoder.batches == [1]
    other = {**body, "multi_modal_data": {"video_url": [{"Url": CLIP[:-1] + "B"}]}}
    assert (await handle(worker, other))["items"][0]["mm_hash"] != item["mm_hash"]
    refused = {**body, "media_io_kwargs": {"video": {"num_frames": 3}}}
    with pytest.raises(exceptions.InvalidArgument, match="media_io_kwargs"):
        await handle(worker, refused)


async def test_images_and_videos_go_together(worker: SmallWorker) -> None:
    media = {"video_url": [{"Url": CLIP}], "image_url": [{"Url": URI}]}
    body = request(URI, token_ids=[1, VIDEO, 2, IMAGE], multi_modal_data=media)
    found = await handle(worker, body)
    assert [item["modality"] for item in found["items"]] == ["image", "video"]
    read = wire.parse({**body, "encoder_result": found}, max_item_bytes=1 << 20)
    assert read.transfer is not None
    assert read.transfer.expanded_token_ids == [1, *[VIDEO] * 4, 2, *[IMAGE] * 4]
    assert [one.placeholder.offset for one in read.transfer.items] == [6, 1]
    assert [one.embeddings.seconds_per_grid for one in read.transfer.items if one.embeddings] == [
        None,
        0.5,
    ]


async def test_what_no_transport_can_say_is_passed_on(
    encoder: SlowEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the arena's metadata tells kinds apart."""
    monkeypatch.setattr(wire, "NAMES_ITEMS", frozenset())
    worker = SmallWorker(config_of(), encoder, "vllm")
    await worker.start(0)
    media = {"video_url": [{"Url": CLIP}], "image_url": [{"Url": URI}]}
    found = await handle(worker, request(URI, multi_modal_data=media))
    assert found["items"] == []
    assert not encoder.batches
    await worker.cleanup()


def pixels(value: int = 0) -> KwargsItem:
    field = KwargsField(torch.full((16, 8), value, dtype=torch.float32), "batched", {})
    return KwargsItem({"pixel_values": field})


async def processed(
    worker: SmallWorker, *items: KwargsItem, hashes: Sequence[str], **fields: Any
) -> dict[str, Any]:
    """A request whose images a frontend has processed."""
    refs = await worker.receiver.sender.offer([codec.encode(item) for item in items])
    offer = wire.write_offer("shm", ["image"] * len(items), hashes, dict(enumerate(refs)))
    places = [wire.Placeholder(1 + 4 * i, 4) for i, _ in enumerate(items)]
    extra = {
        "expanded_token_ids": [1, *[IMAGE] * 4 * len(items)],
        "mm_hashes_by_modality": {"image": list(hashes)},
        "mm_placeholders_by_modality": {
            "image": [{"offset": one.offset, "length": one.length} for one in places]
        },
        **offer,
    }
    return {"token_ids": [1, *[IMAGE] * len(items)], "extra_args": extra, **fields}


A, B = "a" * 64, "b" * 64


async def test_processed_images_are_read_and_encoded_once(
    worker: SmallWorker, encoder: SlowEncoder
) -> None:
    body = await processed(worker, pixels(1), pixels(2), hashes=[A, B])
    found = await handle(worker, body)
    assert [item["mm_hash"] for item in found["items"]] == [A, B]
    assert [image.payload.fields["pixel_values"].data[0, 0].item() for image in encoder.images] == [
        1,
        2,
    ]
    assert [image.runs for image in encoder.images] == [((IMAGE, 4),)] * 2
    # A repeat is not read, and what was processed elsewhere is the raw image's embedding too.
    again = await handle(worker, await processed(worker, pixels(1), hashes=[A]))
    raw = await handle(worker, request(URI, hashes=[B]))
    assert [*again["items"], *raw["items"]] == found["items"]
    assert len(worker.receiver.completed) == len(encoder.images) == 2
    # Who comes next puts the embeddings where the frontend has the images.
    media = wire.parse({**body, "encoder_result": found}, max_item_bytes=1 << 20)
    assert media.transfer is not None
    assert list(media.transfer.offers) == ["arena"]
    assert media.transfer.expanded_token_ids == body["extra_args"]["expanded_token_ids"]
    assert [one.placeholder.offset for one in media.transfer.items] == [1, 5]


async def test_a_processed_image_is_kept_apart_by_its_options_and_its_scope(
    worker: SmallWorker, encoder: SlowEncoder
) -> None:
    for more in ({}, {"mm_processor_kwargs": {"a": 1}}, {"image_cache_scope": "one"}):
        await handle(worker, await processed(worker, pixels(), hashes=[A], **more))
    assert encoder.batches == [1, 1, 1]


@pytest.mark.parametrize("why", ["missing", "malformed", "refused"])
async def test_what_cannot_be_read_is_passed_on(
    worker: SmallWorker, encoder: SlowEncoder, why: str
) -> None:
    item = KwargsItem({"x": pixels().fields["pixel_values"]}) if why == "refused" else pixels()
    body = await processed(worker, item, hashes=[A])
    if why == "missing":
        worker.receiver.sender.payloads.clear()
    if why == "malformed":
        worker.receiver.fault = Fault(truncate=9)
    assert (await handle(worker, body))["items"] == []
    assert outcomes(worker) == {"passed_on": 1}
    assert not encoder.images
    assert worker.receiver.in_flight == 0


async def test_an_engine_that_takes_no_processed_images_passes_them_on(
    encoder: SlowEncoder,
) -> None:
    encoder.takes_processed = False
    worker = SmallWorker(config_of(), encoder, "vllm")
    await worker.start(0)
    worker.receiver = FakeReceiver(Limits(1 << 20, 1.0), worker.metrics)
    assert (await handle(worker, await processed(worker, pixels(), hashes=[A])))["items"] == []
    assert worker.receiver.completed == []
    await worker.cleanup()


async def test_without_room_the_request_is_passed_on(worker: SmallWorker) -> None:
    worker.sender.fault = Fault(reason="segment_full")
    assert (await handle(worker, request(URI)))["items"] == []
    assert outcomes(worker) == {"passed_on": 1}
    worker.sender.fault = Fault()
    assert len((await handle(worker, request(URI)))["items"]) == 1


async def test_more_images_than_the_limit_are_refused(worker: SmallWorker) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="at most 3"):
        await handle(worker, request(*[URI] * 4))


async def test_who_gives_up_does_not_take_it_from_the_others(
    worker: SmallWorker, encoder: SlowEncoder
) -> None:
    encoder.go.clear()
    first = asyncio.create_task(handle(worker, request(URI)))
    second = asyncio.create_task(handle(worker, request(URI)))
    await asyncio.wait_for(encoder.called.wait(), 30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    encoder.go.set()
    assert len((await second)["items"]) == 1
    assert encoder.batches == [1]


async def test_the_engines_error_is_everybodys_and_nothing_is_kept(
    worker: SmallWorker, encoder: SlowEncoder
) -> None:
    encoder.error = EngineError("broken")
    for _ in range(2):
        with pytest.raises(exceptions.StreamIncomplete, match="broken"):
            await handle(worker, request(URI))
    encoder.error = None
    assert len((await handle(worker, request(URI)))["items"]) == 1


async def test_an_image_that_is_refused_fails_alone(encoder: SlowEncoder) -> None:
    batcher = Batcher(encoder, Metrics())
    encoder.go.clear()
    images = [picture(2, 32), picture(3, 33), picture(4, 32)]
    waiting = [asyncio.create_task(batcher.encode("image", picture(1, 32), None))]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(batcher.encode("image", image, None)) for image in images]
    await asyncio.sleep(0.01)
    encoder.go.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(one, RequestError) for one in found] == [False, False, True, False]
    assert encoder.batches == [1, 3, 1, 1, 1]


async def test_a_batch_is_of_one_kind_and_one_set_of_options(encoder: SlowEncoder) -> None:
    batcher = Batcher(encoder, Metrics())
    image = picture(1, 32)
    options: list[Any] = [None, None, {"a": 1}, {"a": 1}, None]
    videos = [batcher.encode("video", b"a video") for _ in range(2)]
    found = await asyncio.gather(*(batcher.encode("image", image, one) for one in options), *videos)
    assert [one.modality for one in found] == ["image"] * 5 + ["video"] * 2
    assert encoder.batches == [2, 2, 1, 2]


async def test_closing_a_batcher_ends_what_waits(encoder: SlowEncoder) -> None:
    batcher = Batcher(encoder, Metrics())
    encoder.go.clear()
    waiting = [asyncio.create_task(batcher.encode("image", picture(1, 32), None)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await batcher.close()
    await batcher.close()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, EngineError) for one in found)


async def test_the_health_check_encodes_each_time_and_is_not_counted(
    worker: SmallWorker, encoder: SlowEncoder
) -> None:
    probe = await worker.health_check_payload()
    assert probe is not None
    assert probe[HEALTH_CHECK_KEY] is True
    for _ in range(2):
        assert (await handle(worker, probe))["items"] == []
    assert encoder.batches == [1, 1]
    assert outcomes(worker) == {}
    assert not worker.sender.payloads


async def test_an_encode_worker_has_to_offer_over_something(encoder: SlowEncoder) -> None:
    worker = PlainWorker(config_of("--mm-transfer", "off"), encoder, "vllm")
    with pytest.raises(StartupError, match="off"):
        await worker.start(0)
    await worker.cleanup()


@pytest.mark.parametrize(
    "argv", [("--embedding-lease", "0"), ("--embedding-cache-mb", "-1")], ids=lambda argv: argv[0]
)
def test_options_out_of_range_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match=argv[0]):
        config_of(*argv)
