"""The command line of ``python -m dynamo_worker_ext.sglang``.

Names and environment variables are those of ``python -m dynamo.sglang`` 1.6.1 and of SGLang
itself, so that an operator changes one word in a launch script; see
`dynamo_worker_ext.worker.add_worker_arguments` for ours.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.configuration.utils import (
    add_argument,
    add_negatable_bool_argument,
    split_served_model_names,
)
from dynamo.common.constants import DisaggregationMode
from dynamo.sglang.backend_args import DynamoSGLangArgGroup
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.worker import WorkerOptions, add_worker_arguments, worker_options
from dynamo_worker_ext.worker.arguments import ROLES, check_role, sdk_config

PROG = "python -m dynamo_worker_ext.sglang"

#: Roles by name, SGLang's own name of the aggregated one among them.
_ROLES: Final[Mapping[str, DisaggregationMode]] = {
    **ROLES,
    "null": DisaggregationMode.AGGREGATED,
}

#: What SGLang calls those that it has a mode for.
_ENGINE_MODES: Final[Mapping[DisaggregationMode, str]] = {
    DisaggregationMode.PREFILL: "prefill",
    DisaggregationMode.DECODE: "decode",
}

#: Options of ``dynamo.sglang`` for what this worker does not do, by the names of their values.
_NOT_SERVED: Final = (
    "use_sglang_tokenizer",
    "gateway_workers",
    "dedicated_mm_encoder",
    "embedding_worker",
    "rerank_worker",
    "image_diffusion_worker",
    "video_generation_worker",
    "disagg_config",
    "disagg_config_key",
    "enable_rl",
    "engine_routes",
)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the command line says.

    Attributes:
        options: our own.
        engine_args: SGLang's, parsed; `server_args` makes its own type of them.
        worker: the SDK's.
        served_names: the model's name and its aliases.
        frontend_decoding: the Rust frontend decodes media.
        feature_cache_bytes: memory for processed media.
        kv_events: what ``--kv-events-config`` says; None where the worker is to choose.
        runtime: Dynamo's runtime configuration.
    """

    options: WorkerOptions
    engine_args: argparse.Namespace
    worker: WorkerConfig
    served_names: tuple[str, ...]
    frontend_decoding: bool
    feature_cache_bytes: int
    kv_events: dict[str, Any] | None
    runtime: DynamoRuntimeConfig

    def server_args(self, **more: Any) -> ServerArgs:
        """SGLang's own type. Reads the model's configuration.

        Args:
            more: set over what the command line says.

        Raises:
            StartupError: SGLang refuses them.
        """
        values = argparse.Namespace(**{**vars(self.engine_args), **more})
        try:
            return ServerArgs.from_cli_args(values)
        except (ValueError, AssertionError, OSError) as error:
            raise StartupError(f"SGLang refuses its arguments: {error}") from error


def build_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the worker, whose help shows everything, and SGLang's own for the rest."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="A multimodal SGLang worker for NVIDIA Dynamo.",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    DynamoRuntimeArgGroup().add_arguments(parser)
    DynamoSGLangArgGroup().add_arguments(parser)
    if "DYN_SGL_ENABLE_MULTIMODAL" not in os.environ:  # on unless switched off
        parser.set_defaults(enable_multimodal=True)
    group = parser.add_argument_group("Roles")
    add_argument(
        group,
        flag_name="--disaggregation-mode",
        env_var="DYN_SGL_DISAGGREGATION_MODE",
        default=None,
        choices=list(_ROLES),
        help="Role of this worker: 'agg', 'pd' and SGLang's 'null' are one aggregated worker, "
        "'prefill' and 'decode' share each request, an 'encode' worker runs the vision tower for "
        "workers with --route-to-encoder.",
    )
    add_negatable_bool_argument(
        group,
        flag_name="--route-to-encoder",
        env_var="DYN_SGL_ROUTE_TO_ENCODER",
        default=False,
        help="Have images encoded by encode workers.",
    )
    add_argument(
        add_worker_arguments(parser),
        flag_name="--mm-cache-mb",
        env_var="DYN_MM_CACHE_MB",
        default=512,
        arg_type=int,
        help="Memory for processed media, so that a repeat is neither received nor processed, in "
        "MB; 0 for none.",
    )
    engine_parser = argparse.ArgumentParser(prog=PROG, add_help=False)
    ServerArgs.add_cli_args(engine_parser)
    engine_group = parser.add_argument_group("SGLang Engine Options (see SGLang's documentation)")
    for action in engine_parser._actions:
        if action.option_strings and "--disaggregation-mode" not in action.option_strings:
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
    for name in _NOT_SERVED:
        if getattr(args, name) not in (None, False, []):
            raise StartupError(f"--{name.replace('_', '-')} is not served by this worker")
    if args.mm_cache_mb < 0:
        raise StartupError(f"--mm-cache-mb is {args.mm_cache_mb}; it must not be negative")
    if "--config" in rest:
        rest = ConfigArgumentMerger(parser=engine_parser).merge_config_with_args(rest)
    engine_args = engine_parser.parse_args(rest)
    _check_engine_args(engine_args)
    role = _role(args.disaggregation_mode, engine_args)
    check_role(role, args.route_to_encoder)

    runtime = DynamoRuntimeConfig.from_cli_args(args)
    try:
        runtime.validate()
    except ValueError as error:
        raise StartupError(str(error)) from error
    served = split_served_model_names(engine_args.served_model_name) or [engine_args.model_path]
    engine_args.served_model_name = served[0]
    # Frontends take new tokens, not all since the beginning.
    engine_args.incremental_streaming_output = True
    if args.enable_multimodal:
        engine_args.enable_multimodal = True
    else:
        engine_args.language_model_only = True
    return Config(
        options=worker_options(args),
        engine_args=engine_args,
        worker=sdk_config(
            runtime,
            engine_args.model_path,
            served[0],
            args.frontend_decoding,
            role=role,
            route_to_encoder=args.route_to_encoder,
        ),
        served_names=tuple(served),
        frontend_decoding=args.frontend_decoding,
        feature_cache_bytes=args.mm_cache_mb << 20,
        kv_events=_kv_events(engine_args.kv_events_config),
        runtime=runtime,
    )


def _role(asked: str | None, engine_args: argparse.Namespace) -> DisaggregationMode:
    """The role, which SGLang's own flag of the same name may also say (in a ``--config`` file)."""
    role = _ROLES[asked or engine_args.disaggregation_mode]
    engine_args.disaggregation_mode = _ENGINE_MODES.get(role, "null")
    return role


def _check_engine_args(args: argparse.Namespace) -> None:
    if args.tokenizer_worker_num > 1:
        raise StartupError("--tokenizer-worker-num above 1 is not served by this worker")
    if args.schedule_low_priority_values_first:
        raise StartupError(
            "--schedule-low-priority-values-first: in Dynamo the larger priority is served sooner"
        )
    if args.nnodes > 1:
        raise StartupError("--nnodes above 1 is not served by this worker")
    if args.is_embedding:
        raise StartupError("--is-embedding: this worker serves generating models")


def _kv_events(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise StartupError(f"--kv-events-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise StartupError(f"--kv-events-config is a JSON object, got {text[:80]}")
    return config
