"""The payload: what is read, what is written, and what is refused."""

from __future__ import annotations

import gc
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.errors import InvalidTransferError
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.kwargs import KwargsField, KwargsItem

torch = pytest.importorskip("torch")

Ext = msgspec.msgpack.Ext
Same = Callable[[KwargsItem, KwargsItem], None]


def frame(*buffers: bytes) -> bytes:
    framed = b"".join(struct.pack("<Q", len(b)) + b for b in buffers)
    return struct.pack("<I", len(buffers)) + framed


def payload_of(fields: Any, *buffers: bytes) -> bytes:
    return frame(msgspec.msgpack.encode(fields), *buffers)


def one(data: Any, field: Any = ("batched", {"keep_on_cpu": False})) -> dict[str, Any]:
    return {"x": {"data": data, "field": field}}


def read(payload: bytes) -> KwargsItem:
    return codec.decode(memoryview(bytearray(payload)))


def reason_of(payload: bytes) -> str:
    with pytest.raises(InvalidTransferError) as caught:
        read(payload)
    return caught.value.reason


def batched(data: Any) -> KwargsItem:
    return KwargsItem({"x": KwargsField(data, "batched", {"keep_on_cpu": False})})


def written(item: KwargsItem) -> bytes:
    return b"".join(codec.encode(item))


def qwen_like() -> KwargsItem:
    return KwargsItem(
        {
            "pixel_values": KwargsField(
                torch.arange(64 * 48, dtype=torch.float32).to(torch.bfloat16).view(64, 48),
                "flat",
                {"keep_on_cpu": False, "slices": [slice(0, 64, None)], "dim": 0},
            ),
            "image_grid_thw": KwargsField(
                torch.tensor([1, 8, 8]), "batched", {"keep_on_cpu": True}
            ),
            "second_per_grid": KwargsField(0.5, "shared", {"keep_on_cpu": False, "batch_size": 2}),
        }
    )


# What is read and written


ITEMS = {
    "qwen": qwen_like,
    "scalar tensor": lambda: batched(torch.tensor(7)),
    "empty tensor": lambda: batched(torch.empty(0, 3, dtype=torch.float16)),
    "nested lists": lambda: batched([[torch.zeros(3)], [torch.ones(100), torch.ones(2)], []]),
    "numbers": lambda: batched([1, 2.5, True, float("inf"), -(2**40)]),
    "no data": lambda: batched(None),
    "no fields": lambda: KwargsItem({}),
    "not contiguous": lambda: batched(torch.arange(600.0).view(20, 30).t()),
    "no options": lambda: KwargsItem({"x": KwargsField(torch.ones(1), "batched", {})}),
    "slices of several dimensions": lambda: KwargsItem(
        {
            "x": KwargsField(
                torch.ones(2, 2),
                "flat",
                {"keep_on_cpu": False, "slices": [(slice(None), slice(0, 2, 1))], "dim": 1},
            )
        }
    ),
}


@pytest.mark.parametrize("make", ITEMS.values(), ids=ITEMS)
def test_an_item_comes_back_as_it_went(
    make: Callable[[], KwargsItem], assert_same_item: Same
) -> None:
    item = make()
    pieces = codec.encode(item)
    payload = b"".join(pieces)
    assert codec.payload_size(pieces) == len(payload)
    assert_same_item(read(payload), item)


@pytest.mark.parametrize("dtype", codec.ITEM_SIZE)
@pytest.mark.parametrize("count", [3, 500], ids=["inline", "own buffer"])
def test_every_dtype_comes_back(dtype: str, count: int, assert_same_item: Same) -> None:
    item = batched((torch.arange(count) % 2).to(getattr(torch, dtype)))
    assert_same_item(read(written(item)), item)


def test_a_large_tensor_is_a_view_of_the_payload() -> None:
    payload = memoryview(bytearray(written(batched(torch.zeros(1000, dtype=torch.uint8)))))
    tensor: Any = codec.decode(payload).fields["x"].data
    payload[-1] = 9
    assert tensor[-1] == 9


def test_a_small_tensor_is_a_copy() -> None:
    payload = memoryview(bytearray(written(batched(torch.zeros(10, dtype=torch.uint8)))))
    tensor: Any = codec.decode(payload).fields["x"].data
    payload[:] = b"\xff" * len(payload)
    assert not tensor.any()


def test_a_read_only_payload_is_copied() -> None:
    tensor: Any = codec.decode(memoryview(written(batched(torch.zeros(1000))))).fields["x"].data
    tensor += 1
    assert tensor.sum() == 1000


def test_a_tensor_keeps_the_payload_alive_when_its_view_is_released() -> None:
    payload = memoryview(bytearray(written(batched(torch.full((5000,), 3.0)))))
    tensor: Any = codec.decode(payload).fields["x"].data
    payload.release()
    gc.collect()
    assert (tensor == 3).all()


@pytest.mark.parametrize("shift", range(8))
def test_tensors_are_aligned_wherever_the_payload_lies(shift: int, assert_same_item: Same) -> None:
    item = batched([torch.arange(100.0, dtype=torch.float64), torch.arange(99)])
    payload = written(item)
    memory = bytearray(shift + len(payload))
    memory[shift:] = payload
    result = codec.decode(memoryview(memory)[shift:])
    assert_same_item(result, item)
    tensors: Any = result.fields["x"].data
    assert all(tensor.data_ptr() % 8 == 0 for tensor in tensors)


@pytest.mark.parametrize("name_length", range(1, 70, 7))
def test_the_alignment_lead_puts_the_first_buffer_on_a_boundary(name_length: int) -> None:
    item = KwargsItem({"n" * name_length: KwargsField(torch.ones(500), "batched", {})})
    payload = written(item)
    lead = codec.alignment_lead(payload[: codec.HEAD_BYTES])
    assert 0 <= lead < 64
    assert (lead + len(payload) - 2000) % 64 == 0


@pytest.mark.parametrize("head", [b"", b"\xff" * 11, b"\xff" * 12])
def test_the_alignment_lead_takes_any_head(head: bytes) -> None:
    assert 0 <= codec.alignment_lead(head) < 64


def test_large_tensors_are_not_copied_for_sending() -> None:
    tensor = torch.zeros(1000, dtype=torch.uint8)
    pieces = codec.encode(batched(tensor))
    tensor[0] = 5
    assert b"".join(pieces[2:])[0] == 5


@pytest.mark.parametrize(
    "field",
    [
        KwargsField(torch.zeros(3, dtype=torch.complex64), "batched", {}),
        KwargsField("text", "batched", {}),
        KwargsField([None], "batched", {}),
        KwargsField(1, "ragged", {}),  # type: ignore[arg-type]
        KwargsField(1, "batched", {"other": 1}),
        KwargsField(1, "flat", {"slices": [object()]}),
    ],
    ids=["dtype", "text", "nested None", "kind", "option", "option value"],
)
def test_what_cannot_be_read_is_not_written(field: KwargsField) -> None:
    with pytest.raises(InvalidTransferError) as caught:
        codec.encode(KwargsItem({"x": field}))
    assert caught.value.reason == "invalid_type"


def test_neither_torch_nor_an_engine_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, dynamo_worker_ext.transfer.codec, dynamo_worker_ext.transfer.shm\n"
        "print(*{'torch', 'vllm', 'sglang', 'dynamo'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60
    )
    assert done.stdout == "\n"


# What is refused


def test_a_payload_truncated_anywhere_is_an_invalid_frame() -> None:
    payload = written(qwen_like())
    for end in [*range(0, len(payload), 13), len(payload) - 1]:
        assert reason_of(payload[:end]) == "invalid_frame", end


GOOD = msgspec.msgpack.encode(one(None))


@pytest.mark.parametrize(
    "payload",
    [
        frame(GOOD) + b"\0",
        struct.pack("<I", 0) + b"\0" * 8,
        struct.pack("<I", 2**32 - 1) + frame(GOOD)[4:],
        frame(*[b""] * (codec.MAX_BUFFERS + 1)),
        struct.pack("<IQ", 1, 2**64 - 1) + GOOD,
        struct.pack("<IQ", 1, len(GOOD) - 1) + GOOD,
        struct.pack("<IQ", 2, len(GOOD)) + GOOD,
        frame(GOOD + b"\xc0"),
        frame(b"\xc1"),
        frame(b"\xa2\xff\xff"),
        frame(b"\x91" * 100_000 + b"\xc0"),
        frame(b"\xdd\xff\xff\xff\xff"),
        frame(b"\xd6\xff\xff\xff\xff\xff\xff"),
        frame(b"\x81\xd4\x03\x07\xc0"),
        frame(b"\x81\x80\xc0"),
        frame(b"\0" * (codec.MAX_METADATA_BYTES + 1)),
        frame(GOOD, b"nobody's"),
    ],
    ids=[
        "trailing byte",
        "no buffers",
        "more buffers than bytes",
        "too many buffers",
        "overflowing length",
        "length too short",
        "missing buffer",
        "trailing metadata",
        "not msgpack",
        "not UTF-8",
        "nested without end",
        "array without end",
        "broken timestamp",
        "tensor bytes as a name",
        "map as a name",
        "too much metadata",
        "buffer without a tensor",
    ],
)
def test_a_wrong_frame_is_refused(payload: bytes) -> None:
    assert reason_of(payload) == "invalid_frame"


def test_many_buffers_are_refused_before_any_is_looked_at() -> None:
    payload = struct.pack("<I", 1 << 17) + bytes(1 << 20)
    with pytest.raises(InvalidTransferError, match="131072 buffers; at most 4096"):
        read(payload)


def test_as_many_buffers_as_are_read_are_read() -> None:
    tensors = [["uint8", [1], at] for at in range(1, codec.MAX_BUFFERS)]
    item = read(payload_of(one(tensors), *[b"x"] * len(tensors)))
    data: Any = item.fields["x"].data
    assert len(data) == codec.MAX_BUFFERS - 1


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("insecure", ["0", "1"])
def test_a_pickle_is_refused_whatever_the_environment_says(
    code: int, insecure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", insecure)
    for payload in (
        payload_of(one(Ext(code, pickle.dumps([1])))),
        payload_of(one(["uint8", [3], Ext(code, b"abc")])),
        payload_of(Ext(code, pickle.dumps({}))),
    ):
        assert reason_of(payload) == "invalid_pickle"


NESTED: Any = []
for _ in range(codec.MAX_DEPTH + 1):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "data",
    [
        ["complex64", [1], Ext(3, b"12345678")],
        ["__class__", [1], Ext(3, b"1")],
        ["uint8", [4], Ext(3, b"123")],
        ["uint8", [2], Ext(3, b"123")],
        ["float32", [1], Ext(3, b"12345")],
        ["uint8", [-1, -3], Ext(3, b"123")],
        ["uint8", [3.0], Ext(3, b"123")],
        ["uint8", [True], Ext(3, b"1")],
        ["uint8", 3, Ext(3, b"123")],
        ["uint8", [2**63, 2], Ext(3, b"")],
        ["uint8", [2**32, 2**32, 3], Ext(3, b"123")],
        ["uint8", [0, 2**62, 4], Ext(3, b"")],
        ["uint8", [1] * 17, Ext(3, b"1")],
        ["bool", [2], Ext(3, b"\x01\x02")],
        ["uint8", [3], b"123"],
        ["uint8", [3], True],
        ["uint8", [3], 1],
        ["uint8", [3], 0],
        ["uint8", [3], -1],
        ["uint8", [3], 2**63],
        ["uint8", [3], None],
        ["uint8", [3], {"oob": 1}],
        ["uint8", [3]],
        ["uint8", [3], Ext(3, b"123"), 0],
        ["uint8", [[[[]]]], Ext(3, b"123")],
        [[1, "uint8"]],
        Ext(4, b"123"),
        Ext(-2, b"123"),
        Ext(-1, b"\0\0\0\0"),
        "text",
        b"bytes",
        [None],
        {"a": 1},
        NESTED,
    ],
    ids=repr,
)
def test_data_that_is_no_tensor_is_refused(data: Any) -> None:
    assert reason_of(payload_of(one(data))) == "invalid_type"


@pytest.mark.parametrize(
    "fields",
    [
        [],
        None,
        {1: {}},
        {"x": None},
        {"x": {}},
        {"x": {"data": 1}},
        {"x": {"data": 1, "field": ["batched", {}], "more": 1}},
        one(1, None),
        one(1, "batched"),
        one(1, ["batched"]),
        one(1, ["batched", None]),
        one(1, ["batched", {1: 1}]),
        one(1, ["batched", {"keep_on_cpu": 1}]),
        one(1, ["batched", {"dim": 0}]),
        one(1, ["flat_from_sizes", {}]),
        one(1, ["__init__", {}]),
        one(1, [["batched"], {}]),
        one(1, ["flat", {}]),
        one(1, ["flat", {"slices": None}]),
        one(1, ["flat", {"slices": [1]}]),
        one(1, ["flat", {"slices": [[0, 1]]}]),
        one(1, ["flat", {"slices": [[0, 1, 0]]}]),
        one(1, ["flat", {"slices": [[0, 2**63, 1]]}]),
        one(1, ["flat", {"slices": [[[0, 1, 1], 3]]}]),
        one(1, ["flat", {"slices": [[[[0, 1, 1]]]]}]),
        one(1, ["flat", {"slices": [], "dim": 1.0}]),
        one(1, ["flat", {"slices": [], "dim": 99}]),
        one(1, ["shared", {}]),
        one(1, ["shared", {"batch_size": -1}]),
        one(1, ["shared", {"batch_size": True}]),
        one(1, ["shared", {"batch_size": 2**40}]),
    ],
    ids=repr,
)
def test_a_field_of_another_form_is_refused(fields: Any) -> None:
    assert reason_of(payload_of(fields)) == "invalid_type"


def test_two_tensors_may_not_share_a_buffer() -> None:
    fields = one([["uint8", [3], 1], ["uint8", [3], 1]])
    assert reason_of(payload_of(fields, b"abc")) == "invalid_type"


@pytest.mark.parametrize("index", [0, 2, -1])
def test_a_buffer_that_is_not_there_is_refused(index: int) -> None:
    assert reason_of(payload_of(one(["uint8", [3], index]), b"abc")) == "invalid_type"


def test_an_error_message_shows_little_of_the_payload() -> None:
    for data in ("s" * 1_000_000, ["x" * 1_000_000, [], 1], ["uint8", ["y" * 1_000_000] * 16, 1]):
        with pytest.raises(InvalidTransferError) as caught:
            read(payload_of(one(data)))
        assert len(str(caught.value)) < 500


# Whatever the bytes


def survives(payload: bytes) -> None:
    try:
        item = read(payload)
    except InvalidTransferError as error:
        reason = error.reason
    else:
        read(written(item))  # what was read can be written
        return
    assert reason in {"invalid_frame", "invalid_pickle", "invalid_type"}


@given(
    start=st.integers(0, 400),
    cut=st.integers(0, 9),
    patch=st.binary(max_size=9),
    again=st.integers(0, 400),
    flip=st.integers(0, 255),
)
def test_mutated_bytes_are_read_or_refused(
    start: int, cut: int, patch: bytes, again: int, flip: int
) -> None:
    payload = bytearray(written(qwen_like()))
    payload[again] ^= flip
    payload[start : start + cut] = patch
    survives(bytes(payload))


@given(st.binary(max_size=200))
def test_any_metadata_is_read_or_refused(metadata: bytes) -> None:
    survives(frame(metadata, b"12345678"))


SIZES = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]))
DTYPES = st.sampled_from([*codec.ITEM_SIZE, "complex64", "Tensor", "", "uint16"])
EXTS = st.builds(Ext, st.integers(-3, 6), st.binary(max_size=24))
LEAVES = st.one_of(
    st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=5), st.binary(max_size=9), EXTS
)
TENSORS = st.tuples(DTYPES, st.lists(SIZES, max_size=4), st.one_of(SIZES, EXTS))
VALUES = st.recursive(
    st.one_of(LEAVES, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
SLICES = st.lists(st.one_of(st.lists(st.one_of(st.none(), SIZES), max_size=4), VALUES), max_size=3)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "keep_on_cpu": st.one_of(st.booleans(), VALUES),
        "slices": SLICES,
        "dim": st.one_of(SIZES, VALUES),
        "batch_size": st.one_of(SIZES, VALUES),
        "modality": VALUES,
    },
)
KINDS = st.tuples(st.sampled_from(["batched", "flat", "shared", "other"]), OPTIONS)
FIELDS = st.one_of(
    VALUES,
    st.dictionaries(
        st.text(max_size=4),
        st.one_of(
            st.fixed_dictionaries({"data": VALUES, "field": st.one_of(KINDS, VALUES)}), VALUES
        ),
        max_size=3,
    ),
)


@given(FIELDS, st.lists(st.binary(max_size=32), max_size=3))
def test_any_structure_is_read_or_refused(fields: Any, buffers: list[bytes]) -> None:
    survives(payload_of(fields, *buffers))


def replaced(node: Any, path: list[int], value: Any) -> Any:
    """`node` with `value` in place of what `path` leads to."""
    if not path or not isinstance(node, list | dict) or not node:
        return value
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = keys[path[0] % len(keys)]
    changed = node.copy()
    changed[key] = replaced(node[key], path[1:], value)
    return changed


@given(st.lists(st.integers(0, 4), max_size=7), st.one_of(VALUES, SIZES, KINDS))
def test_a_mutated_structure_is_read_or_refused(path: list[int], value: Any) -> None:
    metadata, *buffers = codec._split(memoryview(written(qwen_like())))
    fields = msgspec.msgpack.decode(metadata, ext_hook=lambda code, data: Ext(code, bytes(data)))
    survives(payload_of(replaced(fields, path, value), *map(bytes, buffers)))


# Beside the real thing


@pytest.fixture(scope="module")
def vllm_inputs() -> Any:
    pytest.importorskip("vllm")
    import vllm.multimodal.inputs

    return vllm.multimodal.inputs


@pytest.fixture(scope="module")
def upstream() -> Any:
    pytest.importorskip("vllm")
    return pytest.importorskip("dynamo.common.multimodal.mm_kwargs_transfer")


@pytest.fixture
def vllm_items(vllm_inputs: Any) -> list[Any]:
    """Items of vLLM's own, with fields of all three kinds."""
    config = vllm_inputs.MultiModalFieldConfig
    pixels = torch.arange(3 * 700.0).to(torch.bfloat16).view(-1, 7)
    fields = {
        "pixel_values": config.flat("image", [slice(0, 100), slice(100, 300)]),
        "wide": config.flat("image", [(slice(None), slice(0, 1)), (slice(None), slice(1, 3))], 1),
        "sized": config.flat_from_sizes("image", torch.tensor([10, 20]), keep_on_cpu=True),
        "image_grid_thw": config.batched("image", keep_on_cpu=True),
        "ragged": config.batched("image"),
        "shared": config.shared("image", 2),
    }
    data = {
        "pixel_values": pixels,
        "wide": torch.arange(300.0).view(100, 3),
        "sized": torch.arange(30),
        "image_grid_thw": torch.tensor([[1, 10, 10], [1, 10, 20]]),
        "ragged": [[torch.ones(2), 2.5], [torch.zeros(400, dtype=torch.bool)]],
        "shared": torch.tensor(0.5),
    }
    elems = {key: fields[key].build_elems(key, data[key]) for key in fields}
    return [
        vllm_inputs.MultiModalKwargsItem({key: elems[key][at] for key in fields}) for at in (0, 1)
    ]


def test_we_read_and_write_vllms_bytes(vllm_items: list[Any], upstream: Any) -> None:
    for item in vllm_items:
        payload = upstream.encode_mm_kwargs_item(item)
        ours = read(payload)
        assert list(ours.fields) == list(item)
        for name, elem in item.items():
            assert ours.fields[name].kind in type(elem.field).__name__.lower()
        assert written(ours) == payload


def test_vllm_reads_what_we_write(vllm_items: list[Any], upstream: Any) -> None:
    for item in vllm_items:
        ours = read(upstream.encode_mm_kwargs_item(item))
        theirs = upstream.decode_mm_kwargs_item(bytearray(written(ours)))
        assert theirs == item
        assert upstream.encode_mm_kwargs_item(theirs) == upstream.encode_mm_kwargs_item(item)


def test_kind_and_options_make_vllms_field(
    vllm_items: list[Any], vllm_inputs: Any, upstream: Any
) -> None:
    for item in vllm_items:
        payload = upstream.encode_mm_kwargs_item(item)
        made = vllm_inputs.MultiModalKwargsItem()
        for name, field in read(payload).fields.items():
            factory = getattr(vllm_inputs.MultiModalFieldConfig, field.kind)
            made[name] = vllm_inputs.MultiModalFieldElem(
                data=field.data, field=factory("", **field.options).field
            )
        assert made == item
        assert upstream.encode_mm_kwargs_item(made) == payload


def test_a_pickle_that_vllm_would_run_is_refused(
    vllm_inputs: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    shared = vllm_inputs.MultiModalSharedField(batch_size=object())
    elem = vllm_inputs.MultiModalFieldElem(data=torch.ones(1), field=shared)
    payload = upstream.encode_mm_kwargs_item(vllm_inputs.MultiModalKwargsItem({"x": elem}))
    assert reason_of(payload) == "invalid_pickle"
