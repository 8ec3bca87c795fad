"""The policy table, row by row, with the shipped fake transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import (
    InvalidTransferError,
    LimitExceededError,
    MediaLostError,
)
from dynamo_worker_ext.ingest import Ingest, Outcome, Unread
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, Received
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem

A, B, C = "a" * 64, "b" * 64, "c" * 64
PLACES = [wire.Placeholder(i * 4, 2) for i in range(3)]


class Engine:
    """An engine that holds some hashes and takes up to three images."""

    limits: Mapping[wire.Modality, int] = {"image": 3}

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.refuse = False

    mixes_raw_and_held = True
    misread = False

    def holds(self, mm_hash: str, scope: str = "") -> bool:
        return mm_hash in self.held

    def check(self, transfer: Any) -> None:
        if self.misread:
            raise InvalidTransferError("two images meet", reason="invalid_placeholder")

    def convert(self, item: wire.MediaItem, payload: KwargsItem) -> Any:
        if self.refuse:
            raise InvalidTransferError("does not fit", reason="invalid_type")
        return (item.mm_hash, payload.fields["x"].data.item())


class Segments(MmKwargsReceiver[wire.ShmRef]):
    """Payloads by name; a name without one fails."""

    transport = "shm"

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(Limits(1000), metrics)
        self.payloads: dict[str, bytes] = {}
        self.read: list[str] = []

    def put(self, name: str, number: int) -> wire.ShmRef:
        data = torch.tensor(number)
        item = KwargsItem({"x": KwargsField(data, "batched", {})})
        self.payloads[name] = b"".join(bytes(piece) for piece in codec.encode(item))
        return wire.ShmRef(name, len(self.payloads[name]))

    def _size(self, ref: wire.ShmRef) -> int:
        return ref.size

    async def _receive(self, refs: Sequence[wire.ShmRef]) -> list[Received]:
        self.read += [ref.name for ref in refs]
        missing = [ref.name for ref in refs if ref.name not in self.payloads]
        if missing:
            raise InvalidTransferError(f"{missing} missing", reason="segment_missing")
        return [Received(memoryview(bytearray(self.payloads[ref.name]))) for ref in refs]

    async def close(self) -> None:
        pass


class Source:
    def __init__(self) -> None:
        self.loaded: list[Any] = []

    async def load(
        self,
        modality: wire.Modality,
        items: Sequence[Mapping[str, Any]],
        *,
        io_kwargs: Mapping[str, Any] | None = None,
        cache_scope: str | None = None,
    ) -> list[Any]:
        self.loaded += items
        return [f"pixels of {item['Url']}" for item in items]


class House:
    """An ingest and everything around it."""

    def __init__(self, *held: str) -> None:
        self.metrics = Metrics()
        self.engine = Engine(*held)
        self.segments = Segments(self.metrics)
        self.source = Source()
        self.receivers: dict[str, Any] = {"shm": self.segments}
        self.ingest = Ingest(self.engine, self.receivers, self.source, self.metrics)

    def transfer(self, *hashes: str) -> wire.Transfer:
        items = tuple(wire.MediaItem("image", h, p) for h, p in zip(hashes, PLACES, strict=False))
        refs = {i: self.segments.put(f"seg_{h[0]}_{i}", i) for i, h in enumerate(hashes)}
        return wire.Transfer(list(range(20)), items, {"shm": refs})

    def failures(self, reason: str, transport: str = "shm") -> float:
        value = self.metrics.registry.get_sample_value(
            "dynamo_worker_ext_mm_transfer_failures_total",
            {"transport": transport, "reason": reason},
        )
        return value or 0.0


def raw(*urls: str) -> dict[wire.Modality, Any]:
    return {"image": [{"Url": url} for url in urls]}


RAW = raw("one")
BROKEN = InvalidTransferError("malformed", reason="invalid_hash")


async def test_everything_cached_is_a_hit_and_nothing_is_read() -> None:
    house = House(A, B)
    request = wire.MediaRequest([1], transfer=house.transfer(A, B), raw=raw("one", "two"))
    result = await house.ingest.resolve(request)
    assert result.outcome is Outcome.HIT
    assert result.payloads == (None, None)
    assert house.segments.read == []
    assert house.source.loaded == []


async def test_only_what_is_missing_is_read_and_order_is_kept() -> None:
    house = House(B)
    result = await house.ingest.resolve(
        wire.MediaRequest([1], transfer=house.transfer(A, B, C), raw=raw("one", "two", "three"))
    )
    assert result.outcome is Outcome.RECEIVED
    assert result.transport == "shm"
    assert result.payloads == ((A, 0), None, (C, 2))
    assert house.segments.read == ["seg_a_0", "seg_c_2"]
    assert house.source.loaded == []


async def test_senders_hear_of_what_is_not_read() -> None:
    house = House(B)
    declined: list[str] = []
    house.segments.decline = lambda refs: declined.extend(r.name for r in refs)  # type: ignore[method-assign]
    transfer = house.transfer(A, B, C)
    with Unread(transfer, house.receivers):
        pass
    assert declined == []  # nobody waits for that with segments
    house.segments.declines = True  # type: ignore[misc]
    with Unread(transfer, house.receivers) as unread:
        await house.ingest.resolve(wire.MediaRequest([1], transfer=transfer), unread=unread)
        assert declined == []
        unread.decline()
        assert declined == ["seg_b_1"]
    assert declined == ["seg_b_1"]
    with Unread(transfer, house.receivers) as unread:
        unread.clear()
    with Unread(None, house.receivers):
        pass
    assert declined == ["seg_b_1"]


async def test_a_transfer_of_fewer_items_than_there_are_raw_ones_is_not_believed() -> None:
    house = House(A)
    request = wire.MediaRequest([1], transfer=house.transfer(A), raw=raw("one", "two"))
    result = await house.ingest.resolve(request)
    assert result.outcome is Outcome.REPROCESSED
    assert result.reason == "invalid_count"
    assert result.raw == {"image": ["pixels of one", "pixels of two"]}


async def test_a_failed_read_is_processed_from_raw_media_and_counted() -> None:
    house = House()
    transfer = house.transfer(A)
    house.segments.payloads.clear()
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer=transfer, raw=RAW))
    assert result.outcome is Outcome.REPROCESSED
    assert result.raw == {"image": ["pixels of one"]}
    assert result.reason == "segment_missing"
    assert house.failures("segment_missing") == 1


async def test_a_failed_read_without_raw_media_is_lost() -> None:
    house = House()
    transfer = house.transfer(A)
    house.segments.payloads.clear()
    with pytest.raises(MediaLostError) as caught:
        await house.ingest.resolve(wire.MediaRequest([1], transfer=transfer))
    assert caught.value.reason == "segment_missing"


async def test_malformed_metadata_is_reprocessed_or_lost() -> None:
    house = House()
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer_error=BROKEN, raw=RAW))
    assert (result.outcome, result.reason) == (Outcome.REPROCESSED, "invalid_hash")
    with pytest.raises(MediaLostError):
        await house.ingest.resolve(wire.MediaRequest([1], transfer_error=BROKEN))
    assert house.failures("invalid_hash", "none") == 2


async def test_a_prompt_that_the_engine_would_misread_is_reprocessed_or_lost() -> None:
    house = House()
    house.engine.misread = True
    transfer = house.transfer(A)
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer=transfer, raw=RAW))
    assert (result.outcome, result.reason) == (Outcome.REPROCESSED, "invalid_placeholder")
    with pytest.raises(MediaLostError):
        await house.ingest.resolve(wire.MediaRequest([1], transfer=transfer))
    assert house.failures("invalid_placeholder", "none") == 2
    assert house.segments.read == []


async def test_raw_media_alone_is_raw() -> None:
    house = House()
    result = await house.ingest.resolve(wire.MediaRequest([1], raw=RAW))
    assert result.outcome is Outcome.RAW
    assert result.raw == {"image": ["pixels of one"]}


async def test_raw_media_that_the_engine_holds_is_a_hit_and_nothing_is_loaded() -> None:
    house = House(A)
    request = wire.MediaRequest([1], raw=RAW, mm_hashes={"image": (A,)})
    result = await house.ingest.resolve(request)
    assert result.outcome is Outcome.HIT
    assert result.raw == {"image": [None]}
    assert house.source.loaded == []


async def test_processor_options_make_a_held_item_another_item() -> None:
    house = House(A)
    request = wire.MediaRequest(
        [1], raw=RAW, mm_hashes={"image": (A,)}, mm_processor_kwargs={"max_pixels": 1}
    )
    assert (await house.ingest.resolve(request)).outcome is Outcome.RAW


async def test_no_media_is_text() -> None:
    assert (await House().ingest.resolve(wire.MediaRequest([1]))).outcome is Outcome.TEXT


async def test_a_payload_that_does_not_fit_the_model_never_reaches_the_engine() -> None:
    house = House()
    house.engine.refuse = True
    request = wire.MediaRequest([1], transfer=house.transfer(A))
    with pytest.raises(MediaLostError) as caught:
        await house.ingest.resolve(request)
    assert caught.value.reason == "invalid_type"


@pytest.mark.parametrize("way", ["transfer", "raw"])
async def test_the_limit_holds_on_every_way_in(way: str) -> None:
    house = House(A)
    if way == "transfer":
        items = tuple(wire.MediaItem("image", A, wire.Placeholder(i * 2, 1)) for i in range(4))
        request = wire.MediaRequest([1], transfer=wire.Transfer([0] * 20, items, {"shm": {}}))
    else:
        request = wire.MediaRequest([1], raw={"image": [{"Url": "x"}] * 4})
    with pytest.raises(LimitExceededError, match=r"4 image.*at most 3"):
        await house.ingest.resolve(request)


async def test_a_modality_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(LimitExceededError, match="video"):
        await House().ingest.resolve(wire.MediaRequest([1], raw={"video": [{"Url": "x"}]}))


async def test_a_partial_transfer_that_does_not_say_of_what_is_not_guessed_at() -> None:
    house = House(A)
    transfer = house.transfer(A, B)
    partial = wire.Transfer(transfer.expanded_token_ids, transfer.items, {"shm": {}})
    result = await house.ingest.resolve(
        wire.MediaRequest([1], transfer=partial, raw=raw("one", "two"))
    )
    assert (result.outcome, result.reason) == (Outcome.REPROCESSED, "invalid_count")
    assert house.segments.read == []


async def test_a_partial_transfer_of_items_that_are_all_cached_is_a_hit() -> None:
    house = House(A, B)
    transfer = house.transfer(A, B)
    partial = wire.Transfer(transfer.expanded_token_ids, transfer.items, {"shm": {}})
    assert (await house.ingest.resolve(wire.MediaRequest([1], transfer=partial))).payloads == (
        None,
        None,
    )


async def test_a_transport_that_is_switched_off_is_not_used() -> None:
    house = House()
    house.receivers.clear()
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer=house.transfer(A), raw=RAW))
    assert (result.outcome, result.reason) == (Outcome.REPROCESSED, "unavailable")


async def test_a_resend_reads_what_the_engine_seemed_to_hold() -> None:
    house = House(A)
    request = wire.MediaRequest([1], transfer=house.transfer(A))
    result = await house.ingest.resolve(request, fresh=True)
    assert result.payloads == ((A, 0),)
    raw = wire.MediaRequest([1], raw=RAW, mm_hashes={"image": (A,)})
    assert (await house.ingest.resolve(raw, fresh=True)).raw == {"image": ["pixels of one"]}


async def test_resolving_leaves_the_request_as_it_was() -> None:
    house = House()
    raw: dict[wire.Modality, Any] = {"image": [{"Url": "one"}]}
    request = wire.MediaRequest([1], transfer=house.transfer(A), raw=raw)
    await house.ingest.resolve(request)
    assert raw == {"image": [{"Url": "one"}]}


# Transfers that hold a part of the items, and say which


async def test_a_partial_transfer_of_all_that_is_missing_is_enough() -> None:
    house = House(B)
    whole = house.transfer(A, B, C)
    refs = {at: whole.offers["shm"][at] for at in (0, 2)}
    partial = wire.Transfer(whole.expanded_token_ids, whole.items, {"shm": refs})
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer=partial))
    assert result.outcome is Outcome.RECEIVED
    assert result.payloads == ((A, 0), None, (C, 2))


async def test_a_partial_transfer_that_lacks_a_missing_item_is_not_read() -> None:
    house = House()
    whole = house.transfer(A, B)
    refs = {0: whole.offers["shm"][0]}
    partial = wire.Transfer(whole.expanded_token_ids, whole.items, {"shm": refs})
    result = await house.ingest.resolve(
        wire.MediaRequest([1], transfer=partial, raw=raw("one", "two"))
    )
    assert (result.outcome, result.reason) == (Outcome.REPROCESSED, "invalid_count")
    assert house.failures("invalid_count") == 1
    assert house.segments.read == []


async def test_a_transport_that_has_what_is_missing_is_taken_after_one_that_has_not() -> None:
    house = House()
    house.receivers = {"arena": house.segments, "shm": house.segments}
    house.ingest = Ingest(house.engine, house.receivers, house.source, house.metrics)
    whole = house.transfer(A, B)
    both: Any = {"arena": {1: whole.offers["shm"][1]}, "shm": whole.offers["shm"]}
    transfer = wire.Transfer(whole.expanded_token_ids, whole.items, both)
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer=transfer))
    assert (result.outcome, result.transport) == (Outcome.RECEIVED, "shm")
    assert house.failures("invalid_count", "arena") == 1


async def test_several_modalities_in_one_transfer_are_received() -> None:
    house = House()
    house.engine.limits = {"image": 1, "audio": 1}
    whole = house.transfer(A, B)
    items = (whole.items[0], wire.MediaItem("audio", B, PLACES[1]))
    mixed = wire.Transfer(whole.expanded_token_ids, items, whole.offers)
    result = await house.ingest.resolve(wire.MediaRequest([1], transfer=mixed))
    assert result.payloads == ((A, 0), (B, 1))
