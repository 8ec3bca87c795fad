"""What both engines' workers share: options, errors, drain and watchdog, on a worker whose engine
is a few lines of Python."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from dynamo.llm import exceptions as dynamo_errors

from dynamo_worker_ext import transfer
from dynamo_worker_ext.errors import (
    EngineDeadError,
    EngineError,
    HandoffError,
    MediaLoadError,
    MediaLostError,
    RequestError,
    StartupError,
    TransportUnavailableError,
)
from dynamo_worker_ext.worker import (
    Worker,
    WorkerOptions,
    add_worker_arguments,
    check_system_port,
    to_dynamo_error,
    worker_options,
)
from dynamo_worker_ext.worker import base as worker_module
from tests.stack import free_port


def options(*argv: str) -> WorkerOptions:
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    return worker_options(parser.parse_args(argv))


class Context:
    def __init__(self) -> None:
        self.stopped = False

    def id(self) -> str:
        return "request"

    def is_stopped(self) -> bool:
        return self.stopped


class ScriptedWorker(Worker):
    """Each request runs `script`, which may wait, yield and raise."""

    engine_prefix = "scripted:"

    def __init__(self, drain: float = 60.0) -> None:
        super().__init__(options("--drain-timeout", str(drain)))
        self.dead = False
        self.stopped = 0
        self.left = False
        self.unregistering: Exception | None = None
        self.release = asyncio.Event()
        self.error: Exception | None = None
        self.kv = False

    def holds_kv(self) -> bool:
        return self.kv

    async def _start(self, worker_id: int) -> Any:
        raise StartupError("cannot")

    def engine_is_dead(self) -> bool:
        return self.dead

    async def _stream(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        yield {"token_ids": [1], "index": 0}
        await self.release.wait()
        if self.error is not None:
            raise self.error
        yield {"token_ids": [2], "index": 0, "finish_reason": "stop"}

    async def _leave_discovery(self) -> None:
        self.left = True
        if self.unregistering is not None:
            raise self.unregistering

    async def _stop(self) -> None:
        self.stopped += 1

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError


async def collect(worker: Worker, request: Mapping[str, Any] | None = None) -> list[Any]:
    return [chunk async for chunk in worker.generate(request or {}, Context())]


@pytest.fixture
def no_signal(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []
    monkeypatch.setattr(worker_module.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "5")
    return sent


# Options.


def test_transports_are_all_none_or_named() -> None:
    assert options().transports == options("--mm-transfer", "auto").transports
    assert "shm" in options().transports
    assert options("--mm-transfer", "off").transports == ()
    assert options("--mm-transfer", " shm , shm").transports == ("shm",)


@pytest.mark.parametrize(
    "argv",
    [
        ("--mm-transfer", "pigeon"),
        ("--mm-transfer", ","),
        ("--mm-max-item-mb", "0"),
        ("--mm-transfer-timeout", "-1"),
        ("--mm-transfer-timeout", "nan"),
        ("--mm-media-cache-mb", "-1"),
        ("--drain-timeout", "-1"),
    ],
)
def test_an_option_out_of_range_names_its_flag(argv: tuple[str, str]) -> None:
    with pytest.raises(StartupError, match=argv[0]):
        options(*argv)


def test_options_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_MM_MAX_ITEM_MB", "3")
    monkeypatch.setenv("DYN_MM_TRANSFER", "off")
    assert options().max_item_bytes == 3 * 1024 * 1024
    assert options().transports == ()


# The system port.


def test_a_taken_system_port_is_fatal_with_its_number() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(StartupError, match=str(port)):
            check_system_port({"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"})


@pytest.mark.parametrize("port", ["32768", "70000", "http", "-5"])
def test_a_system_port_that_dynamo_cannot_take_is_fatal(port: str) -> None:
    with pytest.raises(StartupError, match=port):
        check_system_port({"DYN_SYSTEM_PORT": port, "DYN_SYSTEM_HOST": "127.0.0.1"})


@pytest.mark.parametrize("port", ["", "0", "-1"])
def test_no_system_port_is_no_error(port: str) -> None:
    check_system_port({"DYN_SYSTEM_PORT": port})


def test_a_process_ends_with_what_was_registered_and_an_interpreter_in_place() -> None:
    """What is torn down under threads of a native runtime ends the process with SIGSEGV."""
    program = """if True:
        import atexit
        from dynamo_worker_ext.worker.main import _leave
        class Last:
            def __del__(self):
                print("torn down")
        last = Last()
        atexit.register(print, "registered")
        print("served")
        _leave(3)"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout.split()) == (3, ["served", "registered"]), ended.stderr


# Errors.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("x"), dynamo_errors.InvalidArgument),
        (MediaLostError("x", reason="segment_missing"), dynamo_errors.CannotConnect),
        (EngineError("x"), dynamo_errors.StreamIncomplete),
        (EngineDeadError("x"), dynamo_errors.EngineShutdown),
    ],
)
@pytest.mark.parametrize("chat_processor", [True, False])
def test_an_error_becomes_the_one_that_a_frontend_acts_on(
    error: Any, kind: type[Exception], chat_processor: bool
) -> None:
    assert type(to_dynamo_error(error, chat_processor=chat_processor)) is kind


def test_a_chat_processor_gets_the_status_in_the_text() -> None:
    lost = to_dynamo_error(MediaLostError("gone", reason="timeout"), chat_processor=True)
    assert '"code": 503' in str(lost)
    assert "gone" in str(lost)
    shown = to_dynamo_error(RequestError("too many"), chat_processor=False)
    assert str(shown) == "too many"


def test_a_status_of_its_own_survives_on_both_frontends() -> None:
    error = MediaLoadError("no picture", status=415)
    assert '"code": 415' in str(to_dynamo_error(error, chat_processor=True))
    plain = to_dynamo_error(error, chat_processor=False)
    assert isinstance(plain, dynamo_errors.HttpError)
    assert plain.code == 415


@pytest.mark.parametrize("reason", ["missing", "invalid"])
def test_a_handoff_that_is_of_no_use_anywhere_does_not_cost_the_worker_its_place(
    reason: str,
) -> None:
    error = HandoffError("nothing was handed over", reason=reason)
    plain = to_dynamo_error(error, chat_processor=False)
    assert isinstance(plain, dynamo_errors.HttpError)
    assert plain.code == 503
    assert '"code": 503' in str(to_dynamo_error(error, chat_processor=True))
    retried = to_dynamo_error(HandoffError("it broke", reason="kv"), chat_processor=False)
    assert isinstance(retried, dynamo_errors.CannotConnect)


async def test_a_refused_request_is_counted_and_raised_as_dynamos() -> None:
    worker = ScriptedWorker()
    worker.error = RequestError("no")
    worker.release.set()
    with pytest.raises(dynamo_errors.InvalidArgument):
        await collect(worker, {"mdc_sum": "1"})
    refused = worker.metrics.registry.get_sample_value(
        "dynamo_worker_ext_requests_refused_total", {"reason": "RequestError"}
    )
    assert refused == 1


async def test_an_error_at_start_is_kept_for_the_entry_point() -> None:
    worker = ScriptedWorker()
    with pytest.raises(StartupError):
        await worker.start(1)
    assert worker.startup_error is not None


# Lifecycle.


async def test_cleanup_waits_for_requests_in_flight() -> None:
    worker = ScriptedWorker()
    request = asyncio.create_task(collect(worker))
    await asyncio.sleep(0)
    cleanup = asyncio.create_task(worker.cleanup())
    await asyncio.sleep(0.05)
    assert not cleanup.done()
    assert worker.stopped == 0
    worker.release.set()
    await cleanup
    assert len(await request) == 2
    assert worker.stopped == 1


async def test_the_drain_ends_at_its_timeout() -> None:
    worker = ScriptedWorker(drain=0.2)
    request = asyncio.create_task(collect(worker))
    await asyncio.sleep(0)
    start = time.monotonic()
    await worker.cleanup()
    assert time.monotonic() - start < 5
    assert worker.stopped == 1
    request.cancel()


async def test_kv_that_decode_is_to_take_is_waited_for() -> None:
    worker = ScriptedWorker()
    assert await worker.is_quiescent()
    worker.kv = True
    assert not await worker.is_quiescent()
    cleanup = asyncio.create_task(worker.cleanup())
    await asyncio.sleep(0.1)
    assert worker.stopped == 0
    worker.kv = False
    await asyncio.wait_for(cleanup, 5)
    assert worker.stopped == 1


async def test_a_worker_with_requests_in_flight_is_not_quiescent() -> None:
    worker = ScriptedWorker()
    request = asyncio.create_task(collect(worker))
    await asyncio.sleep(0)
    assert not await worker.is_quiescent()
    worker.release.set()
    await request
    assert await worker.is_quiescent()


async def test_kv_that_nobody_takes_is_given_up_in_time() -> None:
    worker = ScriptedWorker(drain=0.2)
    worker.kv = True
    await asyncio.wait_for(worker.cleanup(), 5)
    assert worker.stopped == 1


async def test_a_dead_engine_never_holds_up_the_drain() -> None:
    worker = ScriptedWorker(drain=600)
    request = asyncio.create_task(collect(worker))
    await asyncio.sleep(0)
    worker.dead = True
    await asyncio.wait_for(worker.cleanup(), 5)
    assert worker.stopped == 1
    request.cancel()


async def test_an_engine_that_dies_in_the_drain_is_a_failure(
    no_signal: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker(drain=600)
    worker.start_watchdog()
    request = asyncio.create_task(collect(worker))
    await asyncio.sleep(0)
    cleanup = asyncio.create_task(worker.cleanup())
    await asyncio.sleep(0.05)
    worker.dead = True
    await asyncio.wait_for(cleanup, 5)
    assert worker.engine_failed
    assert "the engine died" in caplog.text
    assert no_signal == []  # it leaves already
    request.cancel()


@pytest.mark.parametrize("error", [None, ConnectionError("no store")])
async def test_all_cards_leave_discovery_before_the_drain(error: Exception | None) -> None:
    worker = ScriptedWorker()
    worker.unregistering = error
    request = asyncio.create_task(collect(worker))
    await asyncio.sleep(0)
    cleanup = asyncio.create_task(worker.cleanup())
    await asyncio.sleep(0.05)
    assert worker.left
    assert worker.stopped == 0
    worker.release.set()
    await asyncio.wait_for(cleanup, 5)
    assert len(await request) == 2
    assert worker.stopped == 1


async def test_a_second_cleanup_is_harmless() -> None:
    worker = ScriptedWorker()
    await worker.cleanup()
    await worker.cleanup()


async def test_an_idle_worker_notices_that_its_engine_died(no_signal: list[int]) -> None:
    worker = ScriptedWorker()
    worker.start_watchdog()
    worker.dead = True
    async with asyncio.timeout(2):
        while not no_signal:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert no_signal == [signal.SIGTERM]
    assert worker.engine_failed
    # Nothing can be served any more, so the SDK is not to wait either.
    assert os.environ["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] == "0"
    await worker.cleanup()


async def test_an_engine_that_ends_in_an_orderly_stop_is_no_failure(no_signal: list[int]) -> None:
    worker = ScriptedWorker()
    worker.start_watchdog()
    await worker.cleanup()
    worker.fail("too late")
    assert no_signal == []
    assert not worker.engine_failed


async def test_the_sdk_is_given_time_for_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", raising=False)
    ScriptedWorker(drain=100)
    assert int(os.environ["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"]) > 100
    monkeypatch.delenv("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT")


# Transports that cannot be had.


@pytest.mark.parametrize("how", ["auto", "arena,shm"])
async def test_a_transport_that_cannot_be_had(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of all is done without; one that was asked for by name is an error."""
    opened = transfer.open_receiver

    def open_receiver(name: str, *args: Any) -> Any:
        if name == "arena":
            raise TransportUnavailableError("no memory that can be shared")
        return opened(name, *args)

    monkeypatch.setattr(transfer, "usable", lambda: ("arena", "shm"))
    monkeypatch.setattr(transfer, "open_receiver", open_receiver)
    worker = ScriptedWorker()
    worker.options = options("--mm-transfer", how)
    if how != "auto":
        with pytest.raises(StartupError, match="--mm-transfer arena: no memory"):
            worker.open_receivers()
        return
    receivers = worker.open_receivers()
    assert list(receivers) == ["shm"]
    assert "not taken over arena: no memory" in caplog.text
    await receivers["shm"].close()
