"""Both directions, in both modes, against Dynamo's own block hashes and radix tree.

Request side: what a frontend hashes. Event side: what an engine's events become. Equal for every
kind of prompt, under adapters and cache salts, and for every size of block.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("dynamo.llm", reason="needs Dynamo's bindings")

from dynamo.llm import compute_block_hash_for_seq

from dynamo_worker_ext.hashing import HashMode, block_mm_infos
from tests.kv_simulation import PROMPTS, A, B, C, Prompt, Router, stored_events

MATRIX = {
    **PROMPTS,
    "images that end and begin at the border of a block": Prompt()
    .text(16).image(A, 16).image(B, 32).text(20),
    "three images, swapped": Prompt()
    .text(3).image(B, 20).text(4).image(A, 30).text(9).image(C, 9).text(30),
}  # fmt: skip

NAMES = {
    "plain": {},
    "adapter": {"lora": "adapter"},
    "salt": {"salt": "tenant"},
    "adapter and salt": {"lora": "adapter", "salt": "tenant"},
}


def asked(prompt: Prompt, mode: HashMode, block_size: int, names: dict[str, str]) -> dict[str, Any]:
    """A frontend's side: what it gives to Dynamo's hash function."""
    tokens = prompt.routing() if mode is HashMode.PAD_VALUE else prompt.tokens
    infos = None
    if mode is HashMode.BLOCK_MM_INFOS:
        infos = block_mm_infos(len(prompt.tokens), prompt.media, block_size)
    return {
        "tokens": tokens,
        "block_mm_infos": infos,
        "lora_name": names.get("lora"),
        "cache_namespace": names.get("salt"),
    }


@pytest.mark.parametrize("mode", HashMode)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", MATRIX)
def test_what_is_asked_for_is_what_was_published(
    name: str, names: str, block_size: int, mode: HashMode
) -> None:
    prompt, given = MATRIX[name], NAMES[names]
    router = Router(block_size, mode)
    router.store(prompt, steps=(2,), **given)
    wanted = asked(prompt, mode, block_size, given)
    full = len(prompt.tokens) // block_size
    # Hash by hash, not only as far as the tree goes.
    published: list[int] = []
    for event in router.view.events:
        published += compute_block_hash_for_seq(
            event["token_ids"],
            block_size,
            event["block_mm_infos"],
            lora_name=event["lora_name"],
            cache_namespace=event["cache_salt"],
        )
    tokens = wanted.pop("tokens")
    assert compute_block_hash_for_seq(tokens, block_size, **wanted)[:full] == published
    assert router.view.overlap(tokens, **wanted) == full
    assert router.dropped() == {}


@pytest.mark.parametrize("mode", HashMode)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("name", [name for name in MATRIX if name != "no image"])
def test_other_images_and_other_names_are_not_found(
    name: str, block_size: int, mode: HashMode
) -> None:
    """Each of the prompt's items under another hash, at the same places."""
    prompt = MATRIX[name]
    router = Router(block_size, mode)
    router.store(prompt)
    first = min(where.offset for _, where in prompt.media)
    if mode is HashMode.PAD_VALUE:
        # What is not embedded is no part of the routing tokens.
        first = next(
            i for i, (a, b) in enumerate(zip(prompt.routing(), prompt.tokens, strict=True))
            if a != b
        )  # fmt: skip
    others = {mm_hash: mm_hash[::-1] for mm_hash, _ in prompt.media}
    other = Prompt(prompt.tokens, [(others[mm_hash], where) for mm_hash, where in prompt.media])
    wanted = asked(other, mode, block_size, {})
    assert router.view.overlap(wanted.pop("tokens"), **wanted) == first // block_size
    for names in ("adapter", "salt", "adapter and salt"):
        wanted = asked(prompt, mode, block_size, NAMES[names])
        assert router.view.overlap(wanted.pop("tokens"), **wanted) == 0


@pytest.mark.parametrize("mode", HashMode)
def test_swapped_images_are_told_apart(mode: HashMode) -> None:
    router = Router(16, mode)
    router.store(MATRIX["three images"])
    wanted = asked(MATRIX["three images, swapped"], mode, 16, {})
    assert router.view.overlap(wanted.pop("tokens"), **wanted) == 0


def test_the_modes_do_not_find_each_other() -> None:
    """What the doctor reports: a worker in another mode has no hits, and nobody sees an error."""
    prompt = MATRIX["one image"]
    for mine, theirs in (tuple(HashMode), tuple(HashMode)[::-1]):
        router = Router(16, mine)
        router.store(prompt)
        wanted = asked(prompt, theirs, 16, {})
        assert router.view.overlap(wanted.pop("tokens"), **wanted) == 1  # text before the image


def test_events_of_this_matrix_are_what_vllm_sends() -> None:
    """One key an item and block, also for a block of one token."""
    (event,) = stored_events(Prompt().text(2).image(A, 2).text(1), 1)
    assert event.extra_keys == [None, None, [[A, 0]], [[A, -1]], None]
