"""The command line: upstream's names where upstream has them, ours beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.vllm.args import Config, build_parsers, parse_args
from dynamo_worker_ext.worker.arguments import ROLES

MODEL = ("--model", "some/model")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "DYN_SYSTEM_PORT"):
        monkeypatch.delenv(name, raising=False)


def parse(*argv: str) -> Config:
    return parse_args([*MODEL, *argv])


def test_a_script_for_dynamo_vllm_works_with_one_word_changed() -> None:
    config = parse(
        "--served-model-name", "name", "alias", "--namespace", "prod", "--discovery-backend",
        "file", "--request-plane", "tcp", "--event-plane", "zmq", "--endpoint",
        "dyn://prod.worker.run", "--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser",
        "qwen3", "--max-model-len", "4096", "--block-size", "64", "--enforce-eager",
        "--enable-multimodal", "--limit-mm-per-prompt", '{"image": 2}', "--dtype", "bfloat16",
    )  # fmt: skip
    worker = config.worker
    assert (worker.namespace, worker.component, worker.endpoint) == ("prod", "worker", "run")
    assert (worker.discovery_backend, worker.event_plane) == ("file", "zmq")
    assert (worker.tool_call_parser, worker.reasoning_parser) == ("hermes", "qwen3")
    assert worker.metrics_labels == [("model", "name")]
    assert config.served_names == ("name", "alias")
    assert config.engine_args.max_model_len == 4096
    assert config.engine_args.block_size == 64
    assert config.engine_args.limit_mm_per_prompt == {"image": 2}


def test_environment_variables_are_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE", "from-env")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_VLLM_ENABLE_MULTIMODAL", "false")
    config = parse()
    assert config.worker.namespace == "from-env"
    assert config.worker.discovery_backend == "file"
    assert config.engine_args.language_model_only


def test_the_served_name_is_the_model_unless_one_is_given() -> None:
    assert parse().served_names == ("some/model",)


@pytest.mark.parametrize(
    ("mode", "component"),
    [
        ("agg", "backend"),
        ("pd", "backend"),
        ("prefill", "prefill"),
        ("decode", "backend"),
        ("encode", "encode"),
    ],
)
def test_a_role_registers_under_a_component_of_its_own(mode: str, component: str) -> None:
    worker = parse("--disaggregation-mode", mode).worker
    assert worker.disaggregation_mode is ROLES[mode]
    assert (worker.component, worker.endpoint) == (component, "generate")
    worker = parse("--disaggregation-mode", mode, "--endpoint", "dyn://a.b.c").worker
    assert (worker.namespace, worker.component, worker.endpoint) == ("a", "b", "c")


def test_only_who_sees_media_first_is_routed_to_encoders() -> None:
    assert parse("--route-to-encoder").worker.route_to_encoder
    for mode in ("decode", "encode"):
        with pytest.raises(StartupError, match="--route-to-encoder"):
            parse("--route-to-encoder", "--disaggregation-mode", mode)


@pytest.mark.parametrize("flag", ["--embedding-worker", "--headless", "--no-such-flag"])
def test_an_unknown_flag_is_an_error_and_never_ignored(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flag)
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err


def test_an_abbreviated_flag_is_not_guessed_at() -> None:
    with pytest.raises(SystemExit):
        parse("--drain-time", "3")


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (("--lora-modules", "a=/tmp"), "--enable-lora"),
        (("--enable-lora", "--lora-modules", "a"), "NAME=PATH"),
        (("--enable-lora", "--lora-modules", "a=/no/such/folder"), "not a folder"),
        (("--custom-jinja-template", "/no/such/file"), "no such file"),
        (("--mm-transfer", "pigeon"), "--mm-transfer"),
    ],
)
def test_a_value_that_cannot_work_is_refused_at_start(argv: Any, match: str) -> None:
    with pytest.raises(StartupError, match=match):
        parse(*argv)


def test_adapters_are_read_by_name_and_folder(tmp_path: Path) -> None:
    config = parse("--enable-lora", "--lora-modules", f"mine={tmp_path}")
    assert [(m.name, m.path) for m in config.lora_modules] == [("mine", str(tmp_path))]


def test_prefix_caching_is_on_unless_switched_off() -> None:
    assert parse().engine_args.enable_prefix_caching is True
    assert parse("--no-enable-prefix-caching").engine_args.enable_prefix_caching is False


def test_help_shows_our_options_dynamos_and_vllms() -> None:
    text = build_parsers()[0].format_help()
    for flag in ("--mm-transfer", "--mm-max-item-mb", "--mm-hash-mode", "--drain-timeout",
                 "--namespace", "--frontend-decoding", "--max-model-len"):  # fmt: skip
        assert flag in text
