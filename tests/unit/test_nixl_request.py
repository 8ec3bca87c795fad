"""References over NIXL: what is refused before NIXL sees it, and what a stamp notices."""

from __future__ import annotations

import base64
import copy
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.errors import InvalidTransferError, PeerError, TransferError
from dynamo_worker_ext.transfer import codec, nixl_request
from dynamo_worker_ext.transfer.buffers import BufferPool
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem
from dynamo_worker_ext.transfer.nixl_request import HEADER_BYTES, Bytes, Offer, Stamp
from dynamo_worker_ext.wire import NixlRef

METADATA = b"nixlSerDes|Agent" + (6).to_bytes(8, "little") + b"sender|Conns and more"
STAMP = Stamp(0xABC, "0" * 32)
Change = Callable[[dict[str, Any]], object]


def request(metadata: bytes = METADATA, size: int = 1000) -> dict[str, Any]:
    ref = nixl_request.compose(4096, size, nixl_request.pack(metadata), STAMP)
    return copy.deepcopy(dict(ref.descriptor))


def reason_of(descriptor: Any, size: int = 1000) -> str:
    with pytest.raises(InvalidTransferError) as caught:
        nixl_request.parse(NixlRef(size, descriptor))
    return caught.value.reason


def test_a_reference_of_ours_is_read_as_it_was_written() -> None:
    offer = nixl_request.parse(NixlRef(1000, request()))
    assert (offer.ptr, offer.size, offer.agent, offer.metadata) == (4096, 1000, "sender", METADATA)
    assert offer.stamp == STAMP
    assert offer.key == STAMP.key
    assert offer.lead == HEADER_BYTES


@pytest.mark.parametrize(
    "key", ["aa6f4c5e-d2cc-4b7d-8fd0-5e4ad76e0f06", "dwe1.1.2", STAMP.key + "0", STAMP.key.upper()]
)
def test_a_key_that_is_not_ours_promises_nothing(key: str) -> None:
    offer = nixl_request.parse(NixlRef(1000, request() | {"notification_key": key}))
    assert (offer.stamp, offer.lead, offer.key) == (None, 0, key)


def bomb() -> str:
    return "b64:" + base64.b64encode(zlib.compress(METADATA + bytes(100 << 20))).decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.clear(),
        lambda r: r.update(operation_kind=2),
        lambda r: r.update(operation_kind=True),
        lambda r: r.update(notification_key=""),
        lambda r: r.update(notification_key="k" * 513),
        lambda r: r.update(notification_key=None),
        lambda r: r.update(descriptors=[]),
        lambda r: r.update(descriptors=r["descriptors"] * 2),
        lambda r: r.update(descriptors={}),
        lambda r: r["descriptors"][0].update(device="cuda:0"),
        lambda r: r["descriptors"][0].update(ptr=0),
        lambda r: r["descriptors"][0].update(ptr=-4096),
        lambda r: r["descriptors"][0].update(ptr=HEADER_BYTES),
        lambda r: r["descriptors"][0].update(ptr=2**64),
        lambda r: r["descriptors"][0].update(ptr=4096.0),
        lambda r: r["descriptors"][0].update(size=0),
        lambda r: r["descriptors"][0].update(size=-1),
        lambda r: r["descriptors"][0].update(size=2**70),
        lambda r: r["descriptors"][0].pop("size"),
        lambda r: r.update(nixl_metadata=""),
        lambda r: r.update(nixl_metadata="b64:"),
        lambda r: r.update(nixl_metadata="b64:!!!!"),
        lambda r: r.update(nixl_metadata="b64:\xe9\xe9\xe9\xe9"),
        lambda r: r.update(nixl_metadata="b64:eJwDAAAAAAE="),
        lambda r: r.update(nixl_metadata=r["nixl_metadata"][:40]),
        lambda r: r.update(nixl_metadata=r["nixl_metadata"].removeprefix("b64:")),
        lambda r: r.update(nixl_metadata=METADATA.hex()),
        lambda r: r.update(nixl_metadata="b64:" + "A" * (3 << 20)),
        lambda r: r.update(nixl_metadata=bomb()),
        lambda r: r.update(nixl_metadata=7),
    ],
)
def test_a_request_that_is_not_one_is_malformed(change: Change) -> None:
    descriptor = request()
    change(descriptor)
    assert reason_of(descriptor) == "invalid_metadata"


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"nixlSerDes|Agent",
        b"nixlSerDes|Conns" + METADATA[16:],
        METADATA.replace(b"sender|", b"sender"),
        METADATA.replace(b"sender", b"sen er"),
        METADATA.replace(b"sender", b"sen\0er"),
        METADATA.replace(b"sender", b"sen\xe9er"),
        METADATA.replace(b"\x06", b"\0"),
        METADATA.replace(b"\x06", b"\xff"),
        METADATA.replace((6).to_bytes(8, "little"), b"\xff" * 8),
        b"nixlSerDes|Agent" + (257).to_bytes(8, "little") + b"x" * 257 + b"|",
    ],
)
def test_an_agent_without_a_proper_name_is_malformed(metadata: bytes) -> None:
    assert reason_of(request(metadata)) == "invalid_metadata"


def test_sizes_that_differ_are_an_invalid_size() -> None:
    assert reason_of(request(), size=999) == "invalid_size"


@given(seed=st.integers(0, 2**32))
def test_whatever_was_changed_is_our_error_or_a_checked_offer(seed: int) -> None:
    dice = random.Random(seed)
    descriptor = request()
    metadata = bytearray(METADATA)
    for _ in range(dice.choice([0, 1, 3])):
        metadata[dice.randrange(len(metadata))] = dice.randrange(256)
    text = bytearray(nixl_request.pack(bytes(metadata)).encode())
    for _ in range(dice.choice([0, 0, 1, 5])):
        text[dice.randrange(len(text))] = dice.randrange(256)
    descriptor["nixl_metadata"] = text.decode("latin-1")[: dice.choice([9999, 50])]
    odd = [None, -1, 0, 2**64, 1e300, "", [], {}, True, "x" * 9999]
    if dice.random() < 0.3:
        descriptor[dice.choice(list(descriptor))] = dice.choice(odd)
    elif dice.random() < 0.3:
        descriptor["descriptors"][0][dice.choice(["ptr", "size", "device"])] = dice.choice(odd)
    try:
        offer = nixl_request.parse(NixlRef(1000, descriptor))
    except InvalidTransferError as error:
        reason = error.reason
        assert reason.startswith("invalid_")
    else:
        assert offer.size == 1000
        assert HEADER_BYTES < offer.ptr < 2**56
        assert offer.agent.isascii()
        assert offer.agent


# The stamp


def offered(data: bytes, generation: int = 5) -> tuple[Bytes, Offer]:
    slot = np.frombuffer(bytearray(b"\xee" * (HEADER_BYTES + len(data))), np.uint8)
    stamp = nixl_request.write(slot, [data[:3], b"", memoryview(data)[3:]], generation)
    return slot, Offer(4096, len(data), stamp.key, "sender", b"", b"", stamp)


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(1 << 20)


def refused(offer: Offer, slot: Bytes, pool: BufferPool) -> str:
    with pytest.raises(TransferError) as caught:
        nixl_request.take(offer, slot, pool)
    assert isinstance(caught.value, PeerError)
    return caught.value.reason


@pytest.mark.parametrize("size", [4, 4095, 4096, 4097, (256 << 10) + 5, 1 << 20])
def test_what_was_written_is_taken(size: int, pool: BufferPool) -> None:
    data = random.Random(size).randbytes(size)
    slot, offer = offered(data)
    payload = nixl_request.take(offer, slot, pool)
    assert payload == data
    payload[0] ^= 1
    assert slot[HEADER_BYTES:].tobytes() == data


@pytest.mark.parametrize(("off", "stays"), [(0, True), (1, False), (8, False)])
def test_a_payload_stays_where_its_tensors_lie_well(
    off: int, stays: bool, pool: BufferPool
) -> None:
    pieces = codec.encode(KwargsItem({"x": KwargsField(torch.arange(5000), "batched", {})}))
    data = b"".join(bytes(piece) for piece in pieces)
    lead = codec.pieces_lead(pieces)
    # As an arena gives it: the payload is as far behind a boundary as its sender had it.
    room = np.empty(len(data) + 3 * codec.ALIGNMENT, np.uint8)
    at = -room.ctypes.data % codec.ALIGNMENT + lead + off
    slot = room[at : at + HEADER_BYTES + len(data)]
    stamp = nixl_request.write(slot, pieces, 5)
    offer = Offer(4096, len(data), stamp.key, "sender", b"", b"", stamp)
    payload = nixl_request.take(offer, slot, pool, keep=True)
    assert payload == data
    assert np.shares_memory(np.frombuffer(payload, np.uint8), slot) == stays
    assert torch.equal(codec.decode(payload).fields["x"].data, torch.arange(5000))
    slot[-1] ^= 1
    with pytest.raises(PeerError, match="changed while it was read"):
        nixl_request.take(offer, slot, pool, keep=True)


def test_a_revoked_slot_is_stale(pool: BufferPool) -> None:
    slot, offer = offered(b"x" * 5000)
    nixl_request.revoke(slot)
    assert refused(offer, slot, pool) == "peer_stale"


def test_a_slot_that_was_used_again_is_stale(pool: BufferPool) -> None:
    slot, offer = offered(b"x" * 5000)
    nixl_request.write(slot, [b"x" * 5000], 6)
    assert refused(offer, slot, pool) == "peer_stale"


def test_a_slot_of_another_size_is_stale(pool: BufferPool) -> None:
    slot, offer = offered(b"x" * 5000)
    shorter = Offer(4096, 4000, offer.key, "sender", b"", b"", offer.stamp)
    assert refused(shorter, slot[: HEADER_BYTES + 4000], pool) == "peer_stale"


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 99_999])
def test_one_changed_bit_is_corruption(at: int, pool: BufferPool) -> None:
    slot, offer = offered(random.Random(1).randbytes(100_000))
    slot[HEADER_BYTES + at] ^= 0x80
    assert refused(offer, slot, pool) == "peer_corrupt"


def test_two_pages_out_of_place_are_corruption(pool: BufferPool) -> None:
    slot, offer = offered(random.Random(1).randbytes(100_000))
    pages = slot[HEADER_BYTES : HEADER_BYTES + 8192].reshape(2, 4096)
    pages[:] = pages[::-1].copy()
    assert refused(offer, slot, pool) == "peer_corrupt"
