"""What is offered, over what, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

import torch

from dynamo_worker_ext import transfer
from dynamo_worker_ext.card import WorkerCard, host_identity
from dynamo_worker_ext.errors import StartupError, TransportUnavailableError
from dynamo_worker_ext.frontend.processor import Outbox
from dynamo_worker_ext.transfer.arena import ArenaSender
from dynamo_worker_ext.transfer.shm import ShmSender

Opener = Callable[..., Any]


def feature(modality: str = "image", nbytes: int = 100_000) -> SimpleNamespace:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    return SimpleNamespace(modality=modality, mm_hash="a" * 64, data=data)


def card(*transports: str) -> WorkerCard:
    return WorkerCard("vllm", package_version="1", transports=transports, host_id=host_identity())


@pytest.fixture
async def outbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Outbox]:
    """With an arena of 4 MB, and without NIXL."""
    segments = tmp_path / "shm"
    segments.mkdir()
    openers: dict[str, Opener] = {
        "arena": lambda: ArenaSender(max_bytes=4 << 20, directory=tmp_path / "arena"),
        "shm": lambda: ShmSender(directory=segments),
    }

    def open_sender(name: str) -> Any:
        if name not in openers:
            raise TransportUnavailableError(f"no {name} here")
        return openers[name]()

    monkeypatch.setattr(transfer, "open_sender", open_sender)
    outbox = Outbox("auto")
    yield outbox
    await outbox.close()
    assert os.listdir(segments) == []
    assert not (tmp_path / "arena").exists()


async def test_what_is_offered_is_in_the_request_and_can_be_withdrawn(outbox: Outbox) -> None:
    extra, offered, is_certain = await outbox.offer([feature()], [card("arena", "shm")])
    assert list(extra) == ["mm_kwargs_arena"]
    assert is_certain
    assert outbox._senders["arena"].statistics().offered == 1
    await outbox.cleanup(offered)
    assert outbox._senders["arena"].statistics().offered == 0


async def test_a_full_arena_gives_way_to_segments(outbox: Outbox) -> None:
    extra, offered, is_certain = await outbox.offer(
        [feature(nbytes=6 << 20)], [card("arena", "shm")]
    )
    assert list(extra) == ["mm_kwargs_shm"]
    assert is_certain
    await outbox.cleanup(offered)
    # And is used again where there is room.
    extra, offered, _ = await outbox.offer([feature()], [card("arena", "shm")])
    assert list(extra) == ["mm_kwargs_arena"]
    await outbox.cleanup(offered)


async def test_without_another_way_the_raw_media_stays(outbox: Outbox) -> None:
    big = [feature(nbytes=6 << 20)]
    assert await outbox.offer(big, [card("arena")]) == ({}, [], False)
    assert await outbox.offer([feature()], [card("nixl")]) == ({}, [], False)
    assert await outbox.offer([feature()], [card()]) == ({}, [], False)


async def test_modalities_are_mixed_only_where_that_can_be_said(outbox: Outbox) -> None:
    both = [feature("image"), feature("video")]
    extra, offered, is_certain = await outbox.offer(both, [card("arena", "shm")])
    assert [item["modality"] for item in extra["mm_kwargs_arena"]["items"]] == ["image", "video"]
    assert is_certain
    await outbox.cleanup(offered)
    assert await outbox.offer(both, [card("shm")]) == ({}, [], False)


async def test_an_item_without_data_is_left_to_the_worker(outbox: Outbox) -> None:
    empty = SimpleNamespace(modality="image", mm_hash="a" * 64, data=None)
    assert await outbox.offer([feature(), empty], [card("arena")]) == ({}, [], False)


async def test_a_cancelled_request_leaves_no_offer(outbox: Outbox) -> None:
    waiting = asyncio.Event()

    async def never(_: object) -> None:
        waiting.set()
        await asyncio.Event().wait()

    _, offered, _ = await outbox.offer([feature()], [card("arena"), card("shm")])
    await outbox.cleanup(offered)
    outbox._senders["shm"].offer = never  # type: ignore[method-assign,assignment]
    offering = asyncio.create_task(outbox.offer([feature()], [card("arena"), card("shm")]))
    await waiting.wait()
    assert outbox._senders["arena"].statistics().offered == 1
    offering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offering
    assert outbox._senders["arena"].statistics().offered == 0


async def test_several_requests_may_find_that_the_same_sender_cannot_be_opened(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_sender = transfer.open_sender

    def refuse(name: str) -> Any:
        opened.append(name)
        return open_sender("nixl" if name == "arena" else name)

    monkeypatch.setattr(transfer, "open_sender", refuse)
    cards = [card("arena", "shm")]
    done = await asyncio.gather(*(outbox.offer([feature()], cards) for _ in range(3)))
    for extra, offered, _ in done:
        assert list(extra) == ["mm_kwargs_shm"]
        await outbox.cleanup(offered)
    assert opened == ["arena", "shm"]
    # And by one whose plan is older than that.
    with pytest.raises(TransportUnavailableError):
        await outbox._sender("arena")


async def test_a_sender_is_kept_when_the_request_that_opened_it_is_cancelled(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go, opened = threading.Event(), threading.Event(), []
    open_sender = transfer.open_sender

    def slow(name: str) -> Any:
        opening.set()
        go.wait(30)
        opened.append(open_sender(name))
        return opened[-1]

    monkeypatch.setattr(transfer, "open_sender", slow)
    offering = asyncio.create_task(outbox.offer([feature()], [card("arena")]))
    await asyncio.to_thread(opening.wait, 30)
    offering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offering
    go.set()
    _, offered, _ = await outbox.offer([feature()], [card("arena")])
    assert opened == [outbox._senders["arena"]]
    await outbox.cleanup(offered)


async def test_closing_also_closes_a_sender_that_is_being_opened(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, closed = threading.Event(), []
    open_sender, close = transfer.open_sender, ShmSender.close

    def slow(name: str) -> Any:
        opening.set()
        time.sleep(0.1)
        return open_sender(name)

    async def watched(self: ShmSender) -> None:
        closed.append(self)
        await close(self)

    monkeypatch.setattr(transfer, "open_sender", slow)
    monkeypatch.setattr(ShmSender, "close", watched)
    offering = asyncio.create_task(outbox.offer([feature()], [card("shm")]))
    await asyncio.to_thread(opening.wait, 30)
    offering.cancel()
    await outbox.close()
    assert len(closed) == 1
    assert outbox._senders == {}


def test_a_transport_that_cannot_be_had_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "usable", lambda: ("shm",))
    with pytest.raises(StartupError, match=r"DYNAMO_MM_TRANSFER=nixl: .* there is shm"):
        Outbox("nixl")
