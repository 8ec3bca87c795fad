"""Items of ours as vLLM's ``MultiModalKwargsItem``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from dynamo_worker_ext.transfer.kwargs import FieldKind, KwargsItem

#: vLLM's classes; their arguments are the options of a `KwargsField`.
_FIELDS: Final[Mapping[FieldKind, Callable[..., BaseMultiModalField]]] = {
    "batched": MultiModalBatchedField,
    "flat": MultiModalFlatField,
    "shared": MultiModalSharedField,
}


def kwargs_item(item: KwargsItem) -> MultiModalKwargsItem:
    """The same item in vLLM's form; tensors are not copied."""
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=field.data, field=_FIELDS[field.kind](**field.options))
            for name, field in item.fields.items()
        }
    )
