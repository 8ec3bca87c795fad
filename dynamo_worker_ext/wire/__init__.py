"""What a frontend puts into a request, checked.

Dynamo 1.6.1 writes the fields read here (``dynamo.frontend.vllm_processor`` and the Rust
preprocessor), all but the arena's, which is ours; DESIGN calls them transfer metadata and raw
media. Every bound on what comes from the wire is checked in this package and nowhere else: a
`MediaRequest` can be trusted.

    extra_args.mm_kwargs_arena | _shm | _nixl   where the pre-processed items lie
    extra_args.mm_hashes[_by_modality]          identity of each item, 16 or 64 hex
    extra_args.mm_placeholders[_by_modality]    where each item stands in the expanded prompt
    extra_args.expanded_token_ids               the expanded prompt
    multi_modal_data                            raw media: URLs, data URIs, decoded pixels

`types` is what a checked request consists of, `transfer` reads transfer metadata, `write` writes
it, and `request` reads all of a request. Malformed transfer metadata is no reason to refuse a
request that also carries raw media, so `parse` never raises for it: the error is handed on in
`MediaRequest.transfer_error`.
"""

from dynamo_worker_ext.wire.request import parse
from dynamo_worker_ext.wire.types import (
    MAX_ITEMS,
    MODALITIES,
    TRANSPORTS,
    ArenaRef,
    ItemRef,
    MediaItem,
    MediaRequest,
    Modality,
    NixlRef,
    Placeholder,
    ShmRef,
    Transfer,
)
from dynamo_worker_ext.wire.write import NAMES_ITEMS, write_offer

__all__ = [
    "MAX_ITEMS",
    "MODALITIES",
    "NAMES_ITEMS",
    "TRANSPORTS",
    "ArenaRef",
    "ItemRef",
    "MediaItem",
    "MediaRequest",
    "Modality",
    "NixlRef",
    "Placeholder",
    "ShmRef",
    "Transfer",
    "parse",
    "write_offer",
]
