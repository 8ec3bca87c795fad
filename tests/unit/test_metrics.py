"""What an operator sees."""

from __future__ import annotations

import logging

import pytest

from dynamo_worker_ext.metrics import STAGES, Metrics, WarnOnceAMinute


def test_a_stage_is_measured_also_when_it_fails(metrics: Metrics) -> None:
    with pytest.raises(RuntimeError), metrics.stage("receive"):
        raise RuntimeError
    count = metrics.registry.get_sample_value(
        "dynamo_worker_ext_mm_stage_seconds_count", {"stage": "receive"}
    )
    assert count == 1


def test_every_stage_is_there_before_it_happened(metrics: Metrics) -> None:
    for stage in STAGES:
        count = metrics.registry.get_sample_value(
            "dynamo_worker_ext_mm_stage_seconds_count", {"stage": stage}
        )
        assert count == 0


def test_two_workers_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.resends.inc()
    assert other.registry.get_sample_value("dynamo_worker_ext_mm_resends_total") == 0


def test_a_reason_is_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warn = WarnOnceAMinute(logging.getLogger("test"), clock=lambda: now)
    for _ in range(5):
        warn("timeout", "late by %d", 3)
    warn("other", "also")
    assert [r.getMessage() for r in caplog.records] == ["late by 3", "also"]
    now = 61.0
    warn("timeout", "late by %d", 4)
    assert caplog.records[-1].getMessage() == (
        "late by 4 (4 more like this since the last warning)"
    )
