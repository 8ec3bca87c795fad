"""The payload of one media item: named tensors as bytes, and back. Without an engine, or pickle.

The form is the one that Dynamo 1.6.1's frontends write with vLLM's serialiser, so that it can be
read where vLLM is not installed::

    payload   <I count> then, count times, <Q length><bytes>          (little-endian, no padding)
    buffer 0  msgpack {field name: {"data": nested, "field": [kind, options]}}
    nested    tensor | [nested, ...] | int | float, or null in place of a whole field
    tensor    [dtype, shape, data]; data is the index of a buffer, or the bytes in extension type 3
    kind      "batched" | "flat" | "shared"; a slice in options is [start, stop, step]

A payload comes from another process and is not trusted. Whatever the bytes, `decode` either gives
a `KwargsItem` or raises `InvalidTransferError`; no environment variable makes it read a pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.transfer.kwargs import (
    MAX_DIMS,
    KwargsField,
    KwargsItem,
    as_dict,
    invalid_type,
    read_kind,
    short,
    write_kind,
    write_slice,
)

if TYPE_CHECKING:
    import torch

    from dynamo_worker_ext.transfer.kwargs import Nested

#: One piece of a payload. Pieces are laid one behind the other.
Piece: TypeAlias = memoryview | bytes

#: Bytes at the start of a payload that `alignment_lead` needs.
HEAD_BYTES: Final = 12

#: Element size in bytes by the name that torch gives to a dtype.
ITEM_SIZE: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}

#: What numpy has instead of the others.
_NUMPY: Final = {"bfloat16": "uint16"}

#: Tensors below this many bytes travel inside buffer 0, as vLLM's default has it.
INLINE_BELOW: Final = 256

#: Real metadata is some hundred bytes. msgpack can blow up to 64 times its size as objects.
MAX_METADATA_BYTES: Final = 4 << 20
MAX_DEPTH: Final = 16

#: Real items have a few, or one for each slice of a picture or frame of a video. Views of as many
#: take some milliseconds to make; the size of a payload alone would allow one for every 8 bytes.
MAX_BUFFERS: Final = 4096

ALIGNMENT: Final = 64
_COUNT: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<IQ")
_EXT_PICKLES: Final = (1, 2)
_EXT_RAW: Final = 3


def alignment_lead(head: bytes | memoryview) -> int:
    """How many bytes to leave before a payload so that its tensors need no copy.

    Buffers stand at whatever offset the metadata before them leaves, but a tensor of wide
    elements wants an aligned address. A receiver that puts the payload this far behind a 64-byte
    boundary aligns the first buffer, and those after it as far as their sizes allow.

    Args:
        head: the first `HEAD_BYTES` of the payload, not trusted; less gives 0.

    Returns:
        From 0 to 63.
    """
    if len(head) < HEAD_BYTES:
        return 0
    _, metadata_bytes = _HEAD.unpack_from(head)
    return -int(_HEAD.size + metadata_bytes + _LENGTH.size) % ALIGNMENT


def pieces_lead(pieces: Sequence[Piece]) -> int:
    """`alignment_lead` of a payload that is not laid out yet."""
    return alignment_lead(memoryview(pieces[0]).cast("B")[:HEAD_BYTES]) if pieces else 0


def decode(payload: memoryview) -> KwargsItem:
    """Read one payload.

    Tensors of a buffer of their own are views: they share the memory of `payload` and keep its
    owner alive, so writing to one changes the payload. Small tensors, misaligned ones, and all of
    a read-only payload (torch takes none) are copies.

    Args:
        payload: all bytes of the payload and no others; C-contiguous.

    Raises:
        InvalidTransferError: ``invalid_frame`` (truncated, over-long, or not msgpack),
            ``invalid_pickle``, or ``invalid_type`` (anything that is not of the form above).
    """
    payload = memoryview(bytearray(payload)) if payload.readonly else payload.cast("B")
    metadata, *buffers = _split(payload)
    if metadata.nbytes > MAX_METADATA_BYTES:
        raise _frame(f"{metadata.nbytes} bytes of metadata; at most {MAX_METADATA_BYTES} are read")
    try:
        fields = _DECODER.decode(metadata)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        # Wider than msgspec's own errors, which are ValueErrors: text that is not UTF-8 and keys
        # that cannot be hashed come as Python raises them.
        raise _frame(f"the metadata is not msgpack: {error}") from None
    return _Reader(buffers).item(fields)


def encode(item: KwargsItem) -> list[Piece]:
    """Write one item as the pieces of a payload, byte for byte as Dynamo's frontends would.

    Large contiguous CPU tensors are not copied: their piece is a view, which must not be written
    to until the pieces are sent.

    Raises:
        InvalidTransferError: `item` holds a type that `decode` would not take.
    """
    buffers: list[memoryview] = []

    def pack(value: object) -> object:
        if isinstance(value, list):
            return [pack(entry) for entry in value]
        if isinstance(value, int | float):
            return value
        return _pack_tensor(value, buffers)

    fields: dict[str, object] = {}
    for name, field in item.fields.items():
        data = None if field.data is None else pack(field.data)
        fields[name] = {"data": data, "field": write_kind(field)}
    return frame([_ENCODER.encode(fields), *buffers])


def frame(buffers: Sequence[Piece]) -> list[Piece]:
    """The pieces of a payload from its buffers, the metadata first; copies only that one."""
    metadata, *tensors = buffers
    head = _HEAD.pack(len(buffers), memoryview(metadata).nbytes)
    pieces: list[Piece] = [head + bytes(metadata)]
    for tensor in tensors:
        pieces += (_LENGTH.pack(memoryview(tensor).nbytes), tensor)
    return pieces


def payload_size(pieces: Sequence[Piece]) -> int:
    """Bytes of the payload that `pieces` make."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def _split(payload: memoryview) -> list[memoryview]:
    """The buffers of a frame, at least one, which together fill it exactly."""
    end = payload.nbytes
    if end < HEAD_BYTES:
        raise _frame(f"a payload of {end} bytes is too short for a frame")
    (count,) = _COUNT.unpack_from(payload)
    at = _COUNT.size
    if count > MAX_BUFFERS:
        raise _frame(f"{count} buffers; at most {MAX_BUFFERS} are read")
    # Each buffer has a length before it, which bounds the loop by what really came.
    if not 1 <= count <= (end - at) // _LENGTH.size:
        raise _frame(f"{count} buffers cannot be in a payload of {end} bytes")
    buffers = []
    for index in range(count):
        if end - at < _LENGTH.size:
            raise _frame(f"the payload ends before buffer {index} of {count}")
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        if length > end - at:
            raise _frame(f"buffer {index} claims {length} bytes where {end - at} are left")
        buffers.append(payload[at : at + length])
        at += length
    if at != end:
        raise _frame(f"{end - at} bytes behind the last buffer")
    return buffers


class _Reader:
    """Turns the decoded metadata of one payload into fields.

    Args:
        buffers: buffers 1 and up of the frame.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers: list[memoryview | None] = list(buffers)

    def item(self, fields: object) -> KwargsItem:
        result = {}
        for name, field in as_dict(fields, "the payload").items():
            if not isinstance(field, dict) or field.keys() != {"data", "field"}:
                got = list(field) if isinstance(field, dict) else field
                raise invalid_type(f"field {short(name)} has data and field, got {short(got)}")
            data = None if field["data"] is None else self._nested(field["data"], 0)
            result[name] = KwargsField(data, *read_kind(field["field"]))
        # A sender writes each buffer for one tensor. More uses of one would multiply memory.
        if any(buffer is not None for buffer in self._buffers):
            raise _frame("a buffer belongs to no tensor")
        return KwargsItem(result)

    def _nested(self, value: object, depth: int) -> Nested:
        if isinstance(value, int | float):
            return value
        if not isinstance(value, list):
            raise invalid_type(f"a tensor, a list or a number was expected, got {short(value)}")
        if value and isinstance(value[0], str):
            return self._tensor(value)
        if depth == MAX_DEPTH:
            raise invalid_type(f"lists of tensors are nested more than {MAX_DEPTH} deep")
        return [self._nested(entry, depth + 1) for entry in value]

    def _tensor(self, value: list[Any]) -> torch.Tensor:
        import torch

        if len(value) != 3:
            raise invalid_type(f"a tensor is [dtype, shape, data], got {len(value)} entries")
        dtype, shape, data = value
        if dtype not in ITEM_SIZE:
            raise invalid_type(f"dtype {short(dtype)} is none of {', '.join(ITEM_SIZE)}")
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_DIMS
            or not all(type(dim) is int and dim >= 0 for dim in shape)
            # Empty tensors too: strides are computed from the other dimensions.
            or prod(max(dim, 1) for dim in shape) * ITEM_SIZE[dtype] >= 2**63
        ):
            raise invalid_type(f"a shape is at most {MAX_DIMS} sizes, got {short(shape)}")
        inline = isinstance(data, memoryview)
        buffer = data if inline else self._take(data)
        if prod(shape) * ITEM_SIZE[dtype] != buffer.nbytes:
            raise invalid_type(
                f"a {dtype} tensor of shape {shape} does not fill {buffer.nbytes} bytes"
            )

        # By way of numpy: the first operators of torch's own that a request finds cold cost 0.1 ms.
        array = np.ndarray(shape, _NUMPY.get(dtype, dtype), bytearray(data) if inline else buffer)
        if not array.flags.aligned:
            array = array.copy()
        if dtype == "bool" and array.size and int(array.view(np.uint8).max()) > 1:
            raise invalid_type("a bool tensor holds bytes other than 0 and 1")
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor

    def _take(self, index: object) -> memoryview:
        if type(index) is not int or not 1 <= index <= len(self._buffers):
            raise invalid_type(
                f"tensor data is inline or a buffer from 1 to {len(self._buffers)}, "
                f"got {short(index)}"
            )
        buffer = self._buffers[index - 1]
        if buffer is None:
            raise invalid_type(f"two tensors claim buffer {index}")
        self._buffers[index - 1] = None
        return buffer


def _pack_tensor(value: object, buffers: list[memoryview]) -> tuple[str, tuple[int, ...], object]:
    import torch

    if not isinstance(value, torch.Tensor):
        raise invalid_type(f"a field holds tensors, lists and numbers, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise invalid_type(f"dtype {dtype} is none of {', '.join(ITEM_SIZE)}")
    # By way of numpy, as in `_Reader._tensor`.
    same = value.view(torch.uint16) if dtype == "bfloat16" else value
    data = np.ascontiguousarray(same.numpy(force=True)).reshape(-1).view(np.uint8).data
    if data.nbytes < INLINE_BELOW:
        return dtype, tuple(value.shape), msgspec.msgpack.Ext(_EXT_RAW, data)
    buffers.append(data)
    return dtype, tuple(value.shape), len(buffers)


def _read_extension(code: int, data: memoryview) -> memoryview:
    if code == _EXT_RAW:
        return data
    if code in _EXT_PICKLES:
        raise InvalidTransferError(
            "the payload holds a pickle, which is never read", reason="invalid_pickle"
        )
    raise invalid_type(f"msgpack extension type {code} is not known")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=write_slice)
_DECODER: Final = msgspec.msgpack.Decoder(ext_hook=_read_extension)


def _frame(message: str) -> InvalidTransferError:
    return InvalidTransferError(message, reason="invalid_frame")
