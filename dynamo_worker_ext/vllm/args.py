"""The command line of ``python -m dynamo_worker_ext.vllm``.

Names and environment variables are those of ``python -m dynamo.vllm`` 1.6.1 and of vLLM itself, so
that an operator changes one word in a launch script; see `worker.add_worker_arguments` for ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.frontend_decoding_args import add_frontend_decoding_arg
from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.configuration.utils import (
    add_argument,
    add_negatable_bool_argument,
    split_served_model_names,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_worker_ext import __version__
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.worker import WorkerOptions, add_worker_arguments, worker_options
from dynamo_worker_ext.worker.arguments import (
    ROLES,
    LoraModule,
    check_role,
    lora_module,
    sdk_config,
)
from dynamo_worker_ext.worker.options import check_not_negative

PROG = "python -m dynamo_worker_ext.vllm"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the command line says.

    Attributes:
        options: our own.
        engine_args: vLLM's.
        worker: the SDK's.
        served_names: the model's name and its aliases.
        frontend_decoding: the Rust frontend decodes media.
        lora_modules: adapters that are served from the start.
        kv_timeout_s: of a decode worker, seconds of nothing but waiting for KV after which its
            engine counts as broken; 0 for never.
        runtime: Dynamo's runtime configuration.
    """

    options: WorkerOptions
    engine_args: AsyncEngineArgs
    worker: WorkerConfig
    served_names: tuple[str, ...]
    frontend_decoding: bool
    lora_modules: tuple[LoraModule, ...]
    kv_timeout_s: float
    runtime: DynamoRuntimeConfig


def build_parsers() -> tuple[argparse.ArgumentParser, FlexibleArgumentParser]:
    """The parser of the worker, whose help shows everything, and vLLM's own for the rest."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="A multimodal vLLM worker for NVIDIA Dynamo.",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dynamo-worker-ext {__version__}")
    DynamoRuntimeArgGroup().add_arguments(parser)
    group = parser.add_argument_group("Dynamo vLLM Options")
    add_argument(
        group,
        flag_name="--disaggregation-mode",
        env_var="DYN_VLLM_DISAGGREGATION_MODE",
        default="agg",
        choices=list(ROLES),
        help="Role of this worker. 'agg' and 'pd' are one aggregated worker; 'prefill' computes "
        "prompts and 'decode' answers, with NIXL between them unless --kv-transfer-config says "
        "otherwise; 'encode' runs the vision tower for workers with --route-to-encoder.",
    )
    add_negatable_bool_argument(
        group,
        flag_name="--route-to-encoder",
        env_var="DYN_VLLM_ROUTE_TO_ENCODER",
        default=False,
        help="Have images encoded by encode workers.",
    )
    add_negatable_bool_argument(
        group,
        flag_name="--enable-multimodal",
        env_var="DYN_VLLM_ENABLE_MULTIMODAL",
        default=True,
        help="Take media. On unless switched off, where dynamo.vllm has it off.",
    )
    add_frontend_decoding_arg(group, env_prefix="VLLM")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapters to serve, each as a model of its own name. Needs --enable-lora.",
    )
    own = add_worker_arguments(parser)
    add_argument(
        own,
        flag_name="--kv-timeout",
        env_var="DYN_KV_TIMEOUT",
        default=60.0,
        arg_type=float,
        help="Decode workers: seconds in which the engine does nothing but wait for prefill's KV, "
        "after which the worker leaves, so that its requests end and it can be started anew; 0 "
        "for never.",
    )

    engine_parser = FlexibleArgumentParser(prog=PROG, add_help=False)
    AsyncEngineArgs.add_cli_args(engine_parser, async_args_only=False)
    engine_group = parser.add_argument_group("vLLM Engine Options (see vLLM's documentation)")
    # Shown by our --help, parsed by vLLM's own parser, which knows its spellings.
    for action in engine_parser._actions:
        if action.option_strings:
            engine_group._group_actions.append(action)
    return parser, engine_parser


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """Parse and check a command line.

    Raises:
        StartupError: options that cannot be served; the message names the flag.
        SystemExit: from argparse, for what is no option at all, ``--help`` and ``--version``.
    """
    parser, engine_parser = build_parsers()
    args, rest = parser.parse_known_args(argv)
    vllm_args = engine_parser.parse_args(rest)

    role = ROLES[args.disaggregation_mode]
    check_role(role, args.route_to_encoder)

    runtime = DynamoRuntimeConfig.from_cli_args(args)
    try:
        runtime.validate()
        engine_args = AsyncEngineArgs.from_cli_args(vllm_args)
    except ValueError as error:
        raise StartupError(str(error)) from error
    served = split_served_model_names(engine_args.served_model_name) or [vllm_args.model]
    engine_args.served_model_name = served[0]
    engine_args.enable_log_requests = False
    if engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = True
    if not args.enable_multimodal:
        engine_args.language_model_only = True

    check_not_negative("--kv-timeout", args.kv_timeout)
    loras = tuple(lora_module(text) for text in args.lora_modules)
    if loras and not engine_args.enable_lora:
        raise StartupError("--lora-modules needs --enable-lora")
    return Config(
        options=worker_options(args),
        engine_args=engine_args,
        worker=sdk_config(
            runtime,
            vllm_args.model,
            served[0],
            args.frontend_decoding,
            role=role,
            route_to_encoder=args.route_to_encoder,
        ),
        served_names=tuple(served),
        frontend_decoding=args.frontend_decoding,
        lora_modules=loras,
        kv_timeout_s=args.kv_timeout,
        runtime=runtime,
    )
