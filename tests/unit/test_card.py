"""The worker's card: what it says, and what a frontend makes of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_worker_ext import card as card_module
from dynamo_worker_ext.card import EXT_KEY, WorkerCard, disagreements, host_identity
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode

CARD = WorkerCard(
    backend_framework="sglang",
    package_version="0.1.0",
    engine_version="0.5.21",
    mm_hash_mode=HashMode.PAD_VALUE,
    mm_hash_hex_chars=16,
    transports=("shm", "nixl"),
    host_id="0123456789abcdef",
    modalities=("image", "video"),
    patches=("padded-input-ids",),
)


def test_a_card_survives_the_way_through_json() -> None:
    data = json.loads(json.dumps(CARD.to_runtime_data()))
    assert WorkerCard.from_runtime_data(data) == CARD


def test_both_hash_modes_survive() -> None:
    card = replace(CARD, backend_framework="vllm", mm_hash_mode=HashMode.BLOCK_MM_INFOS)
    card = replace(card, mm_hash_hex_chars=64)
    assert WorkerCard.from_runtime_data(card.to_runtime_data()) == card


def test_our_part_is_under_one_key_beside_the_framework() -> None:
    data = CARD.to_runtime_data()
    assert set(data) == {"backend_framework", EXT_KEY}
    assert data["backend_framework"] == "sglang"


def test_a_framework_is_never_assumed() -> None:
    data = CARD.to_runtime_data()
    del data["backend_framework"]
    with pytest.raises(StartupError, match=r"worker w-7 does not say backend_framework"):
        WorkerCard.from_runtime_data(data, worker="w-7")


@pytest.mark.parametrize("framework", ["", "trtllm", "VLLM", 1, ["vllm"]])
def test_a_framework_must_be_one_of_two(framework: object) -> None:
    with pytest.raises(StartupError, match="'vllm' or 'sglang'"):
        WorkerCard.from_runtime_data({"backend_framework": framework})


def test_a_plain_dynamo_worker_can_be_read() -> None:
    card = WorkerCard.from_runtime_data({"backend_framework": "vllm", "stream_interval": 1})
    assert not card.is_ours
    assert card.transports == ()
    assert card.mm_hash_mode is HashMode.PAD_VALUE
    assert card.to_runtime_data() == {"backend_framework": "vllm"}


def test_keys_of_a_later_version_are_left_alone() -> None:
    data = CARD.to_runtime_data()
    data[EXT_KEY]["from_the_future"] = {"a": 1}
    data["token_budget"] = {}
    assert WorkerCard.from_runtime_data(data) == CARD


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mm_hash_mode", "rolling"),
        ("mm_hash_hex_chars", 32),
        ("transports", "shm"),
        ("transports", [1]),
        ("host_id", "x" * 65),
        ("package_version", None),
    ],
)
def test_a_malformed_card_is_named_with_its_field(key: str, value: object) -> None:
    data = CARD.to_runtime_data()
    data[EXT_KEY][key] = value
    with pytest.raises(StartupError, match=rf"worker w-7 is malformed: {EXT_KEY}\.{key}"):
        WorkerCard.from_runtime_data(data, worker="w-7")


def test_our_part_must_be_an_object() -> None:
    with pytest.raises(StartupError, match="malformed"):
        WorkerCard.from_runtime_data({"backend_framework": "vllm", EXT_KEY: "yes"})


def test_a_card_describes_itself_in_a_line() -> None:
    assert CARD.describe() == (
        "sglang 0.5.21, dynamo-worker-ext 0.1.0, pad_value with 16 hex, transports shm+nixl, "
        "modalities image+video, host 0123456789abcdef, patches padded-input-ids"
    )
    assert "without dynamo-worker-ext" in WorkerCard("vllm").describe()


def test_the_hash_mode_for_a_backend_comes_from_its_card() -> None:
    assert HashMode.for_backend(CARD) is HashMode.PAD_VALUE
    old_vllm = WorkerCard("vllm", mm_hash_mode=HashMode.BLOCK_MM_INFOS, mm_hash_hex_chars=64)
    assert HashMode.for_backend(old_vllm) is HashMode.BLOCK_MM_INFOS
    with pytest.raises(StartupError, match="SGLang"):
        HashMode.for_backend(replace(CARD, mm_hash_mode=HashMode.BLOCK_MM_INFOS))


def test_memory_is_shared_by_equal_identities_only() -> None:
    assert CARD.shares_memory_with("0123456789abcdef")
    assert not CARD.shares_memory_with("0123456789abcdee")
    assert not replace(CARD, host_id="").shares_memory_with("")


def test_the_host_identity_is_stable_within_a_process() -> None:
    assert host_identity() == host_identity()
    assert len(host_identity()) == 16
    int(host_identity(), 16)


def test_the_host_identity_tells_users_machines_and_mounts_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = host_identity()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        another_user = host_identity()
    with monkeypatch.context() as patch:
        boot_id = tmp_path / "boot_id"
        boot_id.write_text("another boot\n")
        patch.setattr(card_module, "_BOOT_ID", boot_id)
        another_machine = host_identity()
    with monkeypatch.context() as patch:
        patch.setattr(card_module, "_SHM", tmp_path)
        another_mount = host_identity()
    assert len({here, another_user, another_machine, another_mount}) == 4


def test_the_host_identity_is_empty_where_there_is_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(card_module, "_SHM", tmp_path / "nowhere")
    assert host_identity() == ""


def test_workers_that_agree_have_no_disagreements() -> None:
    card = WorkerCard("vllm", package_version="0", modalities=("image",))
    assert disagreements({"a": card, "b": replace(card, engine_version="1")}) == []
    assert disagreements({"a": card}) == disagreements({}) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mm_hash_mode": HashMode.BLOCK_MM_INFOS},
         "mm_hash_mode: a, c says pad_value; b says block_mm_infos"),
        ({"mm_hash_hex_chars": 64}, "mm_hash_hex_chars: a, c says 16; b says 64"),
        ({"backend_framework": "sglang"}, "backend_framework: a, c says vllm; b says sglang"),
        ({"mm_routing": "text_prefix"}, "mm_routing: a, c says exact; b says text_prefix"),
        ({"modalities": ()}, "modalities: a, c says image; b says none"),
    ],
)  # fmt: skip
def test_a_disagreement_names_every_worker_and_what_it_says(
    changes: dict[str, Any], says: str
) -> None:
    card = WorkerCard("vllm", package_version="0", modalities=("image",))
    (found,) = disagreements({"a": card, "b": replace(card, **changes), "c": card})
    assert str(found) == f"workers of one model disagree on {says}"


def test_a_plain_worker_does_not_say_what_it_takes() -> None:
    card = WorkerCard("vllm", package_version="0", modalities=("image",))
    assert disagreements({"a": card, "b": WorkerCard("vllm")}) == []
