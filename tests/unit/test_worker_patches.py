"""What a worker makes of its engine's patches."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest

pytest.importorskip("dynamo.llm")

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.patching.report import PatchReport
from dynamo_worker_ext.patching.state import State
from dynamo_worker_ext.worker import MediaWorker, WorkerOptions, media

OPTIONS: dict[str, Any] = {
    "transports": (),
    "all_transports": False,
    "max_item_bytes": 1,
    "transfer_timeout_s": 1.0,
    "hash_mode": None,
    "media_cache_mb": 0,
    "drain_timeout_s": 0.0,
}


class Engine:
    limits: ClassVar = {"image": 1}


def worker(monkeypatch: pytest.MonkeyPatch, report: PatchReport, *, require: bool) -> MediaWorker:
    """One without an engine."""
    monkeypatch.setattr(media.patching, "installed", lambda engine: report)
    monkeypatch.setattr(MediaWorker, "__abstractmethods__", frozenset())
    monkeypatch.setattr(MediaWorker, "framework", "sglang", raising=False)
    options = WorkerOptions(**OPTIONS, require_patches=require)
    return MediaWorker(options, frontend_decoding=False)  # type: ignore[abstract]


def report(state: State, refusal: str = "") -> PatchReport:
    return PatchReport("sglang", "0.5.21", {"padded-input-ids": state}, refusal)


def test_a_missing_patch_is_said_and_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = worker(monkeypatch, report(State.APPLICABLE), require=False)
    with caplog.at_level(logging.INFO):
        one.report_patches()
    assert "patch padded-input-ids: applicable" in caplog.text
    assert "patching apply --engine sglang" in caplog.text
    labels = {"patch": "padded-input-ids", "state": "applicable"}
    shown = one.metrics.registry.get_sample_value("dynamo_worker_ext_engine_patch", labels)
    assert shown == 1
    assert one.make_card(Engine(), "0.5.21").patches == ()  # type: ignore[arg-type]


def test_an_applied_patch_is_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker(monkeypatch, report(State.APPLIED), require=True)
    one.report_patches()
    assert one.make_card(Engine(), "0.5.21").patches == ("padded-input-ids",)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [report(State.APPLICABLE), report(State.APPLIED, "a changed file")])
def test_require_patches_is_fatal_where_one_is_missing(
    monkeypatch: pytest.MonkeyPatch, bad: PatchReport
) -> None:
    with pytest.raises(StartupError, match="--require-patches"):
        worker(monkeypatch, bad, require=True).report_patches()
