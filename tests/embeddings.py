"""What an encode worker makes of a picture, in the hands of a client."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save

from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer import codec, open_receiver
from dynamo_worker_ext.transfer.base import Limits
from dynamo_worker_ext.wire import encoded


async def tensors_of(handle: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a handle's one item, by name."""
    (item,) = handle["items"]
    read = encoded.read(handle, item["target"], 1 << 28)
    assert read is not None
    async with open_receiver("arena", Limits(1 << 28), Metrics()) as receiver:
        (received,) = await receiver.receive([read.offers["arena"][0]])
        payload = memoryview(bytearray(received.payload))
    found: dict[str, torch.Tensor] = {}
    for name, field in codec.decode(payload).fields.items():
        assert isinstance(field.data, torch.Tensor)
        found[name] = field.data
    return found


def data_uri_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Tensors as a client sends them."""
    return data_uri_of_file(save(dict(tensors)))


def data_uri_of_file(data: bytes) -> str:
    return "data:application/safetensors;base64," + base64.b64encode(data).decode()
