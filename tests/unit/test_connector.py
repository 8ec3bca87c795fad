"""The KV connector of prefill and decode engines: filled in, respected, refused."""

from __future__ import annotations

import os
import socket

import pytest

pytest.importorskip("vllm")

from dynamo.common.constants import DisaggregationMode
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.vllm.connector import prepare, uses_nixl

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOST, PORT, "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")


def prepared(role: DisaggregationMode, **given: object) -> AsyncEngineArgs:
    args = AsyncEngineArgs(model="some/model", **given)  # type: ignore[arg-type]
    prepare(args, role)
    return args


def env(name: str) -> str:
    return os.environ[name]


def test_an_aggregated_engine_is_left_alone() -> None:
    assert prepared(DisaggregationMode.AGGREGATED).kv_transfer_config is None
    assert (env(HOST), env(PORT)) == ("", "")


@pytest.mark.parametrize(("role", "does"), [(PREFILL, "kv_producer"), (DECODE, "kv_consumer")])
def test_nixl_unless_something_else_is_asked_for(role: DisaggregationMode, does: str) -> None:
    config = prepared(role).kv_transfer_config
    assert config is not None
    assert (config.kv_connector, config.kv_role) == ("NixlConnector", does)
    assert config.kv_load_failure_policy == "fail"
    assert env(HOST) == "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((env(HOST), int(env(PORT))))


def test_what_is_given_stays() -> None:
    given = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert prepared(DECODE, kv_transfer_config=given).kv_transfer_config is given


def test_the_side_channel_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST, "10.1.2.3")
    monkeypatch.setenv(PORT, "5600")
    prepared(PREFILL)
    assert (env(HOST), env(PORT)) == ("10.1.2.3", "5600")


def test_the_side_channel_follows_vllms_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    prepared(PREFILL)
    assert env(HOST) == "127.0.0.2"


def test_another_connector_needs_no_side_channel() -> None:
    other = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    prepared(PREFILL, kv_transfer_config=other)
    assert env(PORT) == ""
    assert not uses_nixl(other)


def test_nixl_among_several() -> None:
    several = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{"kv_connector": "NixlConnector"}]},
    )
    assert uses_nixl(several)
    prepared(PREFILL, kv_transfer_config=several)
    assert env(PORT)


@pytest.mark.parametrize(("role", "kv_role"), [(PREFILL, "kv_consumer"), (DECODE, "kv_producer")])
def test_a_connector_told_to_do_the_other_roles_work(
    role: DisaggregationMode, kv_role: str
) -> None:
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role=kv_role)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=kv_role):
        prepared(role, kv_transfer_config=config)


def test_decode_must_not_compute_prompts_anew() -> None:
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
    )
    with pytest.raises(StartupError, match="kv_load_failure_policy"):
        prepared(DECODE, kv_transfer_config=config)


def test_caches_of_processed_media() -> None:
    assert prepared(DECODE).mm_processor_cache_gb == 0
    assert prepared(PREFILL).mm_processor_cache_gb > 0
    with pytest.raises(StartupError, match="mm-processor-cache-type"):
        prepared(PREFILL, mm_processor_cache_type="shm")
