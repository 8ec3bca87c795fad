"""By whose card is decided what a request's media is offered over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_worker_ext.card import WorkerCard
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.frontend.__main__ import PROVEN, check_dynamo
from dynamo_worker_ext.frontend.plan import Plan, check_mode, plan
from dynamo_worker_ext.wire import ShmRef, write_offer

HERE = "a" * 16


def worker(*transports: str, host_id: str = HERE) -> WorkerCard:
    return WorkerCard("vllm", package_version="1", transports=transports, host_id=host_id)


ALL = ("arena", "shm", "nixl")
NEAR, FAR = worker(*ALL), worker(*ALL, host_id="b" * 16)
FAR_WITHOUT_NIXL = worker("arena", "shm", host_id="b" * 16)
UPSTREAM = WorkerCard("vllm")


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([NEAR], Plan(("arena",), True)),
        ([FAR], Plan(("nixl",), True)),
        ([NEAR, FAR], Plan(("arena", "nixl"), True)),
        ([worker("shm")], Plan(("shm",), True)),
        ([NEAR, worker("shm")], Plan(("arena", "shm"), True)),
        ([FAR_WITHOUT_NIXL], Plan((), False)),
        ([NEAR, FAR_WITHOUT_NIXL], Plan(("arena",), False)),
        ([UPSTREAM], Plan((), False)),
        ([NEAR, UPSTREAM], Plan(("arena",), False)),
        ([], Plan((), False)),
    ],
)
def test_auto_offers_what_the_workers_can_read(cards: list[WorkerCard], expected: Plan) -> None:
    assert plan("auto", cards, HERE) == expected


@pytest.mark.parametrize(
    ("mode", "cards", "expected"),
    [
        ("shm", [NEAR, NEAR], Plan(("shm",), True)),
        ("shm", [NEAR, FAR], Plan(("shm",), False)),
        ("shm", [UPSTREAM], Plan(("shm",), False)),
        ("nixl", [NEAR, FAR], Plan(("nixl",), True)),
        ("arena", [FAR], Plan(("arena",), False)),
        ("arena", [], Plan((), False)),
        ("off", [NEAR], Plan((), False)),
    ],
)
def test_a_transport_that_was_asked_for_is_used_alone(
    mode: str, cards: list[WorkerCard], expected: Plan
) -> None:
    assert plan(mode, cards, HERE) == expected


def test_only_what_can_be_sent_over_is_offered() -> None:
    assert plan("auto", [NEAR], HERE, usable=("shm",)) == Plan(("shm",), True)
    assert plan("arena", [NEAR], HERE, usable=("shm",)) == Plan((), False)


def test_what_is_too_large_for_a_worker_is_not_certain_to_be_read() -> None:
    small = replace(NEAR, max_item_bytes=10)
    assert plan("auto", [NEAR, small], HERE, item_bytes=10) == Plan(("arena",), True)
    assert plan("auto", [NEAR, small], HERE, item_bytes=11) == Plan(("arena",), False)
    assert plan("auto", [small], HERE, item_bytes=11) == Plan((), False)


def test_without_a_host_identity_no_memory_is_shared() -> None:
    assert plan("auto", [worker(*ALL, host_id="")], "") == Plan(("nixl",), True)


def test_a_mode_that_does_not_exist_is_named_with_those_that_do() -> None:
    assert check_mode(" Auto ") == "auto"
    with pytest.raises(StartupError, match=r"'rdma'; it is one of auto, arena, shm, nixl, off"):
        check_mode("rdma")


def test_another_dynamo_is_refused() -> None:
    check_dynamo(PROVEN[0])
    with pytest.raises(StartupError, match=r"ai-dynamo 1\.7\.0 is installed; .* 1\.6\.1"):
        check_dynamo("1.7.0")


def test_shm_metadata_is_dynamos() -> None:
    assert write_offer("shm", ["image"], ["a" * 64], {0: ShmRef("dwe_1", 7)}) == {
        "mm_kwargs_shm": {
            "modality": "image",
            "items": [{"name": "dwe_1", "size": 7}],
            "mm_hashes": ["a" * 64],
        }
    }


@pytest.mark.parametrize(
    ("modalities", "sent"), [(["image", "video"], [0, 1]), (["image", "image"], [1])]
)
def test_what_dynamos_metadata_cannot_say_is_not_written(
    modalities: list[str], sent: list[int]
) -> None:
    with pytest.raises(ValueError, match="takes all items of a request, of one modality"):
        write_offer("shm", modalities, ["a" * 64] * 2, {i: ShmRef("dwe_1", 7) for i in sent})
