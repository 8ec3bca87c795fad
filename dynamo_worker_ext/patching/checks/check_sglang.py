"""What the patches of SGLang are for, checked against the installed SGLang; see `checks`.

Runs the tokenizer manager's own handling of one request between doubles: what would process
media in front of it, what would send it to a scheduler behind it. Imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HASHES = ["00000000000000ab", "fedcba9876543210"]
NOT_HASHES: list[Any] = [
    "FEDCBA9876543210",
    "-0x1_0",
    "0xdcba9876543210",
    "ab" * 32,
    "00000000000000ab" + "0" * 48,
    "fedcba987654321",
    " edcba987654321 ",
    "",
    None,
    7,
]


def mm_hashes() -> None:
    """Callers can name media, and the engine uses the names."""
    from sglang.srt.entrypoints.engine import Engine

    for method in (Engine.generate, Engine.async_generate):
        require("mm_hashes" in inspect.signature(method).parameters, f"{method} has no mm_hashes")
    items = tokenize(HASHES, precomputed=False).mm_items
    found = [item.hash for item in items]
    require(found == [int(h, 16) for h in HASHES], f"hashes are {found}, expected {HASHES}")


def mm_hashes_batch() -> None:
    """Each request of a batch, and each of its samples, has its own names."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    def batch(mm_hashes: Any, n: int) -> Any:
        made = GenerateReqInput(
            text=["a", "b"],
            image_data=[["x"], ["y"]],
            mm_hashes=mm_hashes,
            sampling_params={"n": n},
        )
        made.normalize_batch_and_arguments()
        return made

    for n in (1, 2):
        for form in (HASHES, [[h] for h in HASHES]):
            made = batch(list(form), n)
            found = [made[i].mm_hashes for i in range(2 * n)]
            require(found == [[h] for h in HASHES] * n, f"with n={n} the requests have {found}")
    try:
        batch(HASHES[:1], 1)
    except ValueError:
        return
    raise AssertionError("one entry for two requests is not refused")


def padded_input_ids() -> None:
    """The padded prompt has the names' pad values, and what is no name changes nothing."""
    own = tokenize(None, precomputed=True)
    for precomputed in (True, False):
        expect(tokenize(HASHES, precomputed=precomputed), [int(h, 16) for h in HASHES])
    for bad in NOT_HASHES:
        for precomputed in (True, False):
            made = tokenize([bad, HASHES[1]], precomputed=precomputed)
            made.mm_items[0].set_pad_value()
            expect(made, [own.mm_items[0].hash, int(HASHES[1], 16)], f" with {bad!r}")
    expect(tokenize(HASHES[:1], precomputed=True), [item.hash for item in own.mm_items], " with 1")


def expect(made: Any, hashes: list[int], where: str = "") -> None:
    """Compare with items that never had other hashes."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    wanted = []
    for value, item in zip(hashes, made.mm_items, strict=True):
        fresh = MultimodalDataItem(modality=Modality.IMAGE, hash=value, offsets=item.offsets)
        fresh.set_pad_value()
        item.set_pad_value()
        require(item.hash == value, f"the hash is {item.hash:#x}, expected {value:#x}{where}")
        require(
            item.pad_value == fresh.pad_value,
            f"the pad value is {item.pad_value}, expected {fresh.pad_value}{where}",
        )
        wanted.append(fresh)
    padded = getattr(made, "padded_input_ids", None)
    if padded is not None:
        expected = type(made).build_padded_input_ids(made.input_ids, wanted)
        require(padded == expected, f"padded_input_ids are {padded}, expected {expected}{where}")


def tokenize(mm_hashes: list[Any] | None, *, precomputed: bool) -> Any:
    """Have the tokenizer manager handle one request with two images.

    Args:
        mm_hashes: of the request.
        precomputed: whether the processor has hashed and padded the images already.
    """
    import torch
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )

    items = [
        MultimodalDataItem(modality=Modality.IMAGE, feature=torch.full((2, 2), n), offsets=[where])
        for n, where in ((1.0, (1, 5)), (2.0, (7, 8)))
    ]
    made = MultimodalProcessorOutput(mm_items=items, input_ids=list(range(10)))
    if precomputed:
        for item in items:
            item.set_pad_value()
        if hasattr(made, "padded_input_ids"):
            made.padded_input_ids = made.build_padded_input_ids(made.input_ids, items)

    async def process(**_request: Any) -> Any:
        return made

    async def set_pad_values(of: list[Any]) -> None:
        for item in of:
            item.set_pad_value()

    settings = SimpleNamespace(
        language_only=False, language_model_only=False, encoder_transfer_backend=""
    )
    manager = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[])),
        server_args=settings,
        max_req_input_len=1024,
        mm_processor=SimpleNamespace(
            prefer_tokenized_input=False,
            process_mm_data_async=process,
            hash_executor=SimpleNamespace(set_pad_values=set_pad_values),
        ),
        _validate_mm_limits=lambda _request: None,
        _normalize_mm_content_hashes=lambda _request: None,
        _validate_one_request=lambda _request, _ids: None,
        _create_tokenized_object=lambda *arguments: arguments[4],
    )
    module: Any = tokenizer_manager
    if hasattr(module, "get_disagg"):
        module.get_disagg = lambda: settings
    request = GenerateReqInput(input_ids=[1, 2], image_data=["x", "y"])
    request.mm_hashes = mm_hashes
    return asyncio.run(module.TokenizerManager._tokenize_one_request(manager, request))


def require(good: bool, fault: str) -> None:
    """Raise if something is not as it should be."""
    if not good:
        raise AssertionError(fault)


CHECKS = {
    "mm-hashes": mm_hashes,
    "mm-hashes-batch": mm_hashes_batch,
    "padded-input-ids": padded_input_ids,
}


def main(report: str, *checks: str) -> None:
    """Run checks and write what they found."""
    faults = {}
    for name in checks:
        try:
            CHECKS[name]()
            faults[name] = ""
        except Exception as error:  # the boundary: whatever it is, it is what was found
            faults[name] = f"{type(error).__name__}: {error}"
    Path(report).write_text(json.dumps(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
