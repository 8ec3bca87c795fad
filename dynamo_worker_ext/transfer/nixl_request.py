"""What a NIXL sender puts into a request, checked; and what ours says besides.

Dynamo 1.6.1's ``RdmaMetadata``, which takes no further fields::

    {"descriptors": [{"device": "cpu", "ptr": address, "size": bytes}],
     "nixl_metadata": "b64:" + base64(zlib(what NIXL says of the sender's agent)),
     "notification_key": text that the reader sends back when it is done,
     "operation_kind": 1}

So what ours adds is in the text that any reader sends back as it came: the key is
``dwe1.<generation>.<checksum>``, both hex, and the 64 bytes before the payload hold its
generation again. A reader of ours fetches them with the payload and knows both a slot that was
given to something else and bytes that changed. Deregistering memory protects neither.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo_worker_ext.errors import InvalidTransferError, PeerError
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.buffers import BufferPool
from dynamo_worker_ext.wire import NixlRef

Bytes = npt.NDArray[np.uint8]

_NOTHING: Final = np.empty(0, np.uint8)

#: Bytes before a payload of ours.
HEADER_BYTES: Final = 64

#: What is copied and summed at once: it stays in a cache between the two. No smaller, because each
#: block takes the GIL from the event loop for a moment.
BLOCK_BYTES: Final = 1 << 20

#: One agent with one arena says about 500 bytes of itself; upstream's, which registers each item
#: by itself, some 100 more an item on offer.
MAX_METADATA_BYTES: Final = 1 << 20

_HEADER: Final = struct.Struct("<8sQQ")  # magic, generation, payload bytes
_MAGIC: Final = b"DWENIXL1"
_KEY: Final = re.compile(r"dwe1\.([0-9a-f]{16})\.([0-9a-f]{32})")
_PREFIX: Final = "b64:"
_SERIALIZED: Final = b"nixlSerDes|Agent"
_LENGTH: Final = struct.Struct("<Q")
_NAME: Final = re.compile(rb"[\x21-\x7e]{1,256}")
_ROW_BYTES: Final = 4096


class _Descriptor(msgspec.Struct):
    device: Literal["cpu"]
    ptr: Annotated[int, msgspec.Meta(gt=HEADER_BYTES, lt=2**56)]
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**56)]


class _Request(msgspec.Struct):
    descriptors: Annotated[list[_Descriptor], msgspec.Meta(min_length=1, max_length=1)]
    nixl_metadata: Annotated[str, msgspec.Meta(min_length=5, max_length=2 * MAX_METADATA_BYTES)]
    notification_key: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    operation_kind: Literal[1]  # READ


class Stamp(NamedTuple):
    """What our sender says of a payload: its generation and the hex of its checksum."""

    generation: int
    checksum: str

    @property
    def key(self) -> str:
        return f"dwe1.{self.generation:016x}.{self.checksum}"


@dataclass(frozen=True, slots=True)
class Offer:
    """One item that a peer offers, as far as that can be checked without the peer.

    Attributes:
        ptr: address of the payload in the peer.
        size: bytes of the payload.
        key: what the peer is notified with when the read is over.
        agent: name of the peer's agent.
        metadata: what NIXL needs to reach it. Not safe to load before it was tried elsewhere.
        digest: identity of `metadata`.
        stamp: what a sender of ours says of the payload, else None.
    """

    ptr: int
    size: int
    key: str
    agent: str
    metadata: bytes
    digest: bytes
    stamp: Stamp | None

    @property
    def lead(self) -> int:
        """Bytes before the payload that are read with it."""
        return 0 if self.stamp is None else HEADER_BYTES


def parse(ref: NixlRef) -> Offer:
    """Check a reference.

    Raises:
        InvalidTransferError: ``invalid_metadata``, or ``invalid_size`` where the two sizes differ.
    """
    try:
        request = msgspec.convert(ref.descriptor, _Request)
    except msgspec.ValidationError as error:
        raise _malformed(f"a request of one CPU buffer to READ was expected: {error}") from None
    [descriptor] = request.descriptors
    if descriptor.size != ref.size:
        raise InvalidTransferError(
            f"an item of {ref.size} bytes in a NIXL buffer of {descriptor.size}; they are equal "
            "where nobody changed them on the way",
            reason="invalid_size",
        )
    metadata, digest = _unpack(request.nixl_metadata)
    match = _KEY.fullmatch(request.notification_key)
    return Offer(
        ptr=descriptor.ptr,
        size=descriptor.size,
        key=request.notification_key,
        agent=agent_name(metadata),
        metadata=metadata,
        digest=digest,
        stamp=Stamp(int(match[1], 16), match[2]) if match else None,
    )


def compose(address: int, size: int, metadata: str, stamp: Stamp) -> NixlRef:
    """The reference to a payload of ours; `metadata` is as `pack` made it."""
    descriptor: Mapping[str, Any] = {
        "descriptors": [{"device": "cpu", "ptr": address, "size": size}],
        "nixl_metadata": metadata,
        "notification_key": stamp.key,
        "operation_kind": 1,
    }
    return NixlRef(size, descriptor)


def pack(metadata: bytes) -> str:
    """Write NIXL's metadata as it stands in a request."""
    return _PREFIX + base64.b64encode(zlib.compress(metadata)).decode()


def agent_name(metadata: bytes) -> str:
    """Name of the agent that `metadata` is about.

    NIXL says it only after it has loaded the metadata, perhaps over that of another peer.

    Raises:
        InvalidTransferError: ``invalid_metadata``.
    """
    return _split(metadata)[0].decode()


def rename(metadata: bytes, name: str) -> bytes:
    """The same metadata under another name.

    Raises:
        InvalidTransferError: ``invalid_metadata``.
    """
    new = name.encode()
    return _SERIALIZED + _LENGTH.pack(len(new)) + new + _split(metadata)[1]


def write(slot: Bytes, pieces: Sequence[codec.Piece], generation: int) -> Stamp:
    """Lay a payload into a slot of header and payload, and stamp it. Blocks for the copy."""
    revoke(slot)
    checksum = _Checksum()
    summed = at = HEADER_BYTES
    for piece in pieces:
        source = np.frombuffer(piece, np.uint8) if memoryview(piece).nbytes else _NOTHING
        while len(source):
            block = source[: summed + BLOCK_BYTES - at]
            slot[at : at + len(block)] = block
            at, source = at + len(block), source[len(block) :]
            if at == summed + BLOCK_BYTES:
                checksum.add(slot[summed:at])
                summed = at
    checksum.add(slot[summed:at])
    _HEADER.pack_into(slot.data, 0, _MAGIC, generation, at - HEADER_BYTES)
    return Stamp(generation, checksum.hexdigest())


def revoke(slot: Bytes) -> None:
    """Take the generation from a slot: whoever reads it from now on knows that it is stale."""
    slot[: _HEADER.size] = 0


def take(offer: Offer, arrived: Bytes, pool: BufferPool, *, keep: bool = False) -> memoryview:
    """Check what was read, where our sender stamped it, and make a payload of it.

    Args:
        offer: what was read.
        arrived: ``offer.lead + offer.size`` bytes.
        pool: where the payload is copied to, laid so that decoding needs no further copy.
        keep: leave it where it arrived if decoding needs no copy there either; the payload then
            keeps `arrived`.

    Raises:
        PeerError: ``peer_stale``, ``peer_corrupt``.
    """
    stamp = offer.stamp
    if stamp is not None:
        magic, generation, size = _HEADER.unpack_from(arrived.data)
        if (magic, generation, size) != (_MAGIC, stamp.generation, offer.size):
            raise PeerError(
                f"the sender has taken back what {offer.key} was, before it was read",
                reason="peer_stale",
            )
    source = arrived[offer.lead :]
    lead = codec.alignment_lead(source[: codec.HEAD_BYTES].tobytes())
    if keep and source.ctypes.data % codec.ALIGNMENT == lead:
        target, payload = source, source.data
    else:
        payload = pool.lease(offer.size, offset=lead)
        target = np.frombuffer(payload, np.uint8)
    checksum = _Checksum()
    block_bytes = BLOCK_BYTES if target is not source else offer.size  # nothing to copy: at once
    for start in range(0, offer.size, block_bytes):
        block = source[start : start + block_bytes]
        if stamp is not None:
            checksum.add(block)
        if target is not source:
            target[start : start + block_bytes] = block
    if stamp is not None and checksum.hexdigest() != stamp.checksum:
        raise PeerError(
            f"what {offer.key} names was changed while it was read, or damaged",
            reason="peer_corrupt",
        )
    return payload


class _Checksum:
    """A digest over the sums of rows of 4 KB, at the speed of memory.

    It is there to notice bytes of another item, of another time or out of place, by the page in
    which they come; CRC-32 would take ten times as long. It keeps no adversary out: who can write
    a payload can write its checksum.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, block: Bytes) -> None:
        """Continue with bytes; all blocks but the last are whole rows."""
        whole = len(block) // _ROW_BYTES * _ROW_BYTES
        if whole:
            rows = block[:whole].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
            self._hash.update(np.add.reduce(rows, axis=1).data)
        self._hash.update(block[whole:].data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _split(metadata: bytes) -> tuple[bytes, bytes]:
    """The agent's name and what comes behind it."""
    at = len(_SERIALIZED) + _LENGTH.size
    if not metadata.startswith(_SERIALIZED) or len(metadata) < at:
        raise _malformed("NIXL metadata starts with the name of its agent, and this does not")
    (length,) = _LENGTH.unpack_from(metadata, len(_SERIALIZED))
    name, rest = metadata[at : at + length], metadata[at + length :]
    if len(name) != length or not _NAME.fullmatch(name) or not rest.startswith(b"|"):
        raise _malformed("the name of a NIXL agent is 1 to 256 printable characters")
    return name, rest


@lru_cache(maxsize=16)  # a sender of ours says the same with each item
def _unpack(text: str) -> tuple[bytes, bytes]:
    """NIXL's metadata as it stands in a request, and its digest."""
    try:
        packed = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
        inflating = zlib.decompressobj()
        metadata = inflating.decompress(packed, MAX_METADATA_BYTES + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise _malformed(f"NIXL metadata is base64 of zlib: {error}") from None
    if not inflating.eof or len(metadata) > MAX_METADATA_BYTES or not text.startswith(_PREFIX):
        raise _malformed(
            f"NIXL metadata is 'b64:' and at most {MAX_METADATA_BYTES} bytes, whole; got "
            f"{len(metadata)}{'' if inflating.eof else ' and more to come'}"
        )
    return metadata, blake2b(metadata, digest_size=16).digest()


def _malformed(message: str) -> InvalidTransferError:
    return InvalidTransferError(message, reason="invalid_metadata")
