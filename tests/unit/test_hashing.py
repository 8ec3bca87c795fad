"""Identity of media: hashes, pad values and routing tokens, and that Dynamo agrees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.card import WorkerCard
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import (
    HashMode,
    is_mm_hash,
    pad_value,
    routing_hash,
    routing_tokens,
)
from dynamo_worker_ext.wire import Placeholder

HEX = "0123456789abcdef"
mm_hashes = st.sampled_from([16, 64]).flatmap(lambda n: st.text(HEX, min_size=n, max_size=n))


@pytest.mark.parametrize("value", ["0" * 16, "f" * 64, HEX, HEX * 4])
def test_sixteen_or_sixtyfour_lower_case_hex_characters_are_a_hash(value: str) -> None:
    assert is_mm_hash(value)


@pytest.mark.parametrize(
    "value",
    [
        "", "0" * 15, "0" * 17, "0" * 32, "0" * 63, "0" * 65, "F" * 16, "0x" + "0" * 14,
        "-0x1_0", "+" + "0" * 15, " " + "0" * 15, "0" * 16 + "\n", "_" * 16, "\uff10" * 16,
        b"0" * 16, 0, None,
    ],
)  # fmt: skip
def test_anything_else_is_not(value: object) -> None:
    assert not is_mm_hash(value)


def test_the_router_sees_the_first_sixteen_characters() -> None:
    assert routing_hash("00000000000000ff" + "e" * 48) == 0xFF
    assert routing_hash("f" * 16) == 2**64 - 1


@given(mm_hashes)
def test_a_pad_value_is_a_token_id_that_no_vocabulary_has(mm_hash: str) -> None:
    assert 1_000_000 <= pad_value(mm_hash) < 1_000_000 + 2**30
    assert pad_value(mm_hash) == pad_value(mm_hash[:16] + "0" * 48)


@given(mm_hashes)
def test_dynamo_gives_the_same_pad_value(mm_hash: str) -> None:
    upstream = pytest.importorskip("dynamo.common.multimodal.routing_utils")
    assert pad_value(mm_hash) == upstream.pad_value_for_mm_hash(routing_hash(mm_hash))


def test_routing_tokens_replace_a_placeholder_and_leave_their_input() -> None:
    tokens = [1, 9, 9, 2]
    pad = pad_value("0" * 16)
    assert routing_tokens(tokens, [("0" * 16, Placeholder(1, 2))]) == [1, pad, pad, 2]
    assert tokens == [1, 9, 9, 2]


def test_routing_tokens_respect_the_embedding_mask() -> None:
    pad = pad_value("1" * 64)
    where = Placeholder(1, 4, (True, False, False, True))
    assert routing_tokens([1, 9, 5, 6, 9, 2], [("1" * 64, where)]) == [1, pad, 5, 6, pad, 2]


def test_routing_tokens_keep_the_length_of_every_item() -> None:
    media = [("1" * 16, Placeholder(0, 2)), ("2" * 16, Placeholder(2, 3))]
    one, two = pad_value("1" * 16), pad_value("2" * 16)
    assert routing_tokens([9] * 6, media) == [one, one, two, two, two, 9]


@given(
    st.lists(st.integers(0, 150_000), min_size=1, max_size=60),
    st.lists(st.tuples(mm_hashes, st.integers(1, 8), st.booleans()), max_size=4),
    st.data(),
)
def test_dynamo_builds_the_same_routing_tokens(
    text: list[int], items: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    upstream = pytest.importorskip("dynamo.common.multimodal.routing_utils")
    tokens: list[int] = []
    media: list[tuple[str, Placeholder]] = []
    for mm_hash, length, masked in items:
        tokens += data.draw(st.lists(st.sampled_from(text), max_size=5))
        mask = tuple(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        media.append((mm_hash, Placeholder(len(tokens), length, mask if masked else None)))
        tokens += [9] * length
    tokens += text
    features = [
        SimpleNamespace(
            mm_hash=mm_hash,
            mm_position=SimpleNamespace(offset=p.offset, length=p.length, is_embed=p.is_embed),
        )
        for mm_hash, p in media
    ]
    for feature in features:
        mask = feature.mm_position.is_embed
        if mask is not None:
            feature.mm_position.is_embed = SimpleNamespace(tolist=lambda mask=mask: list(mask))
    info = upstream.build_mm_routing_info_from_features(features, tokens)
    expected = tokens if info is None else info["routing_token_ids"]
    assert routing_tokens(tokens, media) == expected


def test_a_mode_says_how_much_of_a_hash_is_forwarded() -> None:
    assert HashMode.PAD_VALUE.hex_chars == 16
    assert HashMode.BLOCK_MM_INFOS.hex_chars == 64


def test_the_mode_for_vllm_is_what_its_card_says() -> None:
    for mode in HashMode:
        assert HashMode.for_backend(WorkerCard("vllm", mm_hash_mode=mode)) is mode


def test_the_mode_for_sglang_is_pad_values_or_an_error() -> None:
    assert HashMode.for_backend(WorkerCard("sglang")) is HashMode.PAD_VALUE
    with pytest.raises(StartupError, match="knows only pad_value"):
        HashMode.for_backend(WorkerCard("sglang", mm_hash_mode=HashMode.BLOCK_MM_INFOS))
