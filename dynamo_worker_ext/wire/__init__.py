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
    encoder_result                              what an encode worker made of the raw media

`types` is what a checked request consists of, `transfer` reads transfer metadata, `write` writes
it, `encoded` and `handoff` what encode and prefill workers say, and `request` reads all of a
request. Malformed transfer metadata is no reason to refuse a request that also carries raw media,
so `parse` never raises for it: the error is handed on in `MediaRequest.transfer_error`.
"""

from dynamo_worker_ext.wire.encoded import EncodedItem
from dynamo_worker_ext.wire.encoded import write as write_encoded
from dynamo_worker_ext.wire.handoff import (
    Fact,
    HandedItem,
    Handoff,
    parse_handoff,
    write_handoff,
)
from dynamo_worker_ext.wire.request import parse
from dynamo_worker_ext.wire.types import (
    MAX_ITEMS,
    MODALITIES,
    TRANSPORTS,
    ArenaRef,
    Embeddings,
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
    "Embeddings",
    "EncodedItem",
    "Fact",
    "HandedItem",
    "Handoff",
    "ItemRef",
    "MediaItem",
    "MediaRequest",
    "Modality",
    "NixlRef",
    "Placeholder",
    "ShmRef",
    "Transfer",
    "parse",
    "parse_handoff",
    "write_encoded",
    "write_handoff",
    "write_offer",
]
