"""What an SGLang engine does with identities that a frontend gives to media.

A signature does not tell: 0.5.14 takes hashes and ignores them for processed media, 0.5.21 applies
them after it has built the padded ids that its scheduler prefers, which then dies, and 0.5.23
writes other pads. So a known image goes through the engine's own tokenizer manager, and what comes
out is looked at before a request may carry a hash.
"""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

from PIL import Image
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)

from dynamo_worker_ext.hashing import pad_value, wide_pad_values
from dynamo_worker_ext.kv_events import WidePads

log = logging.getLogger(__name__)

#: Its pads differ from those of any content hash, near enough to surely.
_KNOWN_HASH: Final = "5eed0000000000ab"


class PadScheme(StrEnum):
    """What the engine writes in the place of media tokens."""

    PAD_30_BIT = "30-bit"
    WIDE = "wide"


@dataclass(frozen=True, slots=True)
class HashSupport:
    """What the probe found.

    Attributes:
        accepted: ``async_generate`` has the argument.
        raw, processed: whether the engine applies hashes to raw and to processed media, and to all
            that its scheduler looks at.
        scheme: the pads that it then writes; None if it never does.
        rebuilt: the padded ids are rebuilt by this worker, because the engine would crash.
    """

    accepted: bool
    raw: bool = False
    processed: bool = False
    scheme: PadScheme | None = None
    rebuilt: bool = False

    @property
    def exact(self) -> bool:
        """Whether a router can know which media a worker holds."""
        return self.raw and self.processed

    def teach(self, pads: WidePads, mm_hashes: Iterable[str]) -> None:
        """Have `pads` know these items, if the engine writes wide ones for them."""
        if self.scheme is PadScheme.WIDE:
            for mm_hash in mm_hashes:
                pads.learn(mm_hash)

    def describe(self) -> str:
        """One line for a log and the card."""
        if not self.accepted:
            return "not accepted"
        ways = [name for name, works in (("raw", self.raw), ("processed", self.processed)) if works]
        if not ways:
            return "accepted, but not applied"
        rebuilt = ", padded ids rebuilt" if self.rebuilt else ""
        return f"applied to {' and '.join(ways)} media, {self.scheme} pads{rebuilt}"


async def probe(
    engine: Any, known: Mapping[str, Any] | None, processed: Mapping[str, Any] | None
) -> HashSupport:
    """Find out, and make the engine safe where that cures it.

    Args:
        engine: the running ``sglang.Engine``.
        known: arguments of ``async_generate`` for a known raw image; None for a text model.
        processed: the same image, processed; None where this worker cannot.
    """
    if "mm_hashes" not in inspect.signature(engine.async_generate).parameters:
        return HashSupport(accepted=False)
    if known is None:
        return HashSupport(accepted=True)
    manager = engine.tokenizer_manager
    found = [await _look(manager, one) for one in (known, processed)]
    rebuilt = False
    if any(one is _Padding.STALE for one in found):
        rebuild_padded_ids(manager)
        rebuilt = True
        found = [await _look(manager, one) for one in (known, processed)]
    schemes = {one for one in found if isinstance(one, PadScheme)}
    return HashSupport(
        accepted=True,
        raw=isinstance(found[0], PadScheme),
        processed=isinstance(found[1], PadScheme),
        scheme=schemes.pop() if len(schemes) == 1 else None,
        rebuilt=rebuilt,
    )


class _Padding(StrEnum):
    """What else a look may find."""

    IGNORED = "the hash was not applied"
    STALE = "the padded ids are of another hash"


async def _look(manager: Any, arguments: Mapping[str, Any] | None) -> PadScheme | _Padding:
    if arguments is None:
        return _Padding.IGNORED
    mm_inputs = (await tokenize(manager, {**arguments, "mm_hashes": [_KNOWN_HASH]})).mm_inputs
    (item,) = mm_inputs.mm_items
    if item.hash is None or int(item.hash) != int(_KNOWN_HASH, 16):
        return _Padding.IGNORED
    padded = mm_inputs.padded_input_ids
    if padded is None:  # the scheduler pads by the item then
        padded = MultimodalProcessorOutput.build_padded_input_ids(
            arguments["input_ids"], mm_inputs.mm_items
        )
    if padded is None:
        return PadScheme.PAD_30_BIT if item.pad_value == pad_value(_KNOWN_HASH) else _Padding.STALE
    first, last = item.offsets[0]
    pads = set(padded[first : last + 1])
    if pads == {pad_value(_KNOWN_HASH)}:
        return PadScheme.PAD_30_BIT
    return PadScheme.WIDE if pads <= {*wide_pad_values(_KNOWN_HASH)} else _Padding.STALE


async def tokenize(manager: Any, arguments: Mapping[str, Any]) -> Any:
    """What the scheduler would be sent for a request. Nothing is sent."""
    request = GenerateReqInput(
        sampling_params={"max_new_tokens": 1}, rid=uuid.uuid4().hex, **arguments
    )
    request.normalize_batch_and_arguments()
    manager._init_req_state(request, None)
    try:
        return await manager._tokenize_one_request(request)
    finally:
        manager.rid_to_state.pop(request.rid, None)


def rebuild_padded_ids(manager: Any) -> None:
    """Have padded ids follow the hashes that the caller gave.

    SGLang 0.5.21 and 0.5.23 build them before they apply caller hashes; the scheduler then finds
    no position of the item and ends the engine. Upstream: sgl-project/sglang#40225.
    """
    tokenize_one = manager._tokenize_one_request

    async def consistent(request: Any) -> Any:
        tokenized = await tokenize_one(request)
        mm_inputs = tokenized.mm_inputs
        if mm_inputs is not None and request.mm_hashes:
            padded = MultimodalProcessorOutput.build_padded_input_ids(
                tokenized.input_ids, mm_inputs.mm_items
            )
            if padded is not None:
                mm_inputs.padded_input_ids = padded
        return tokenized

    manager._tokenize_one_request = consistent


def provisional_identity(mm_hashes: Sequence[str]) -> dict[str, int]:
    """What keeps SGLang from hashing all bytes of processed media, 0.7 ms a MB, before it gives
    each item the caller's hash: one identity for all that comes in one dict.

    Where it does not take the dict apart it keeps this, so that it stands for just these items.

    Args:
        mm_hashes: of all items of the request, 16 hex characters each.

    Returns:
        Entries of the dict.
    """
    identity = mm_hashes[0]
    if len(mm_hashes) > 1:
        identity = blake2b("".join(mm_hashes).encode(), digest_size=8).hexdigest()
    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_hash(int(identity, 16))
    return {"hash": item.hash, "pad_value": item.pad_value}


def known_image() -> Image.Image:
    """A small picture that is the same on every worker."""
    ramp = bytes(range(256)) * 3
    return Image.frombytes("RGB", (16, 16), ramp).resize((112, 112), Image.Resampling.NEAREST)
