"""What both engines' command lines have in common besides our own options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.runtime import parse_endpoint

from dynamo_worker_ext.errors import StartupError

#: What ``--disaggregation-mode`` says, and the role that it means.
ROLES: Final[Mapping[str, DisaggregationMode]] = {
    "agg": DisaggregationMode.AGGREGATED,
    "pd": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
    "encode": DisaggregationMode.ENCODE,
}


#: Under which component a role registers, unless ``--endpoint`` says otherwise. They differ, as
#: roles on one endpoint would take each other's requests.
COMPONENTS: Final[Mapping[DisaggregationMode, str]] = {
    DisaggregationMode.AGGREGATED: "backend",
    DisaggregationMode.PREFILL: "prefill",
    DisaggregationMode.DECODE: "backend",
    DisaggregationMode.ENCODE: "encode",
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapter of ``--lora-modules``: the name clients ask for, and its folder."""

    name: str
    path: str


def check_role(role: DisaggregationMode, route_to_encoder: bool) -> None:
    """Refuse what the Backend SDK would refuse later, and worse.

    Raises:
        StartupError: this role takes nothing from an encode worker.
    """
    if route_to_encoder and role in (DisaggregationMode.DECODE, DisaggregationMode.ENCODE):
        raise StartupError(
            f"--route-to-encoder is for workers that see media first, not for {role.value}; "
            "leave it out"
        )


def sdk_config(
    runtime: DynamoRuntimeConfig,
    model: str,
    served_name: str,
    frontend_decoding: bool,
    *,
    role: DisaggregationMode = DisaggregationMode.AGGREGATED,
    route_to_encoder: bool = False,
) -> WorkerConfig:
    """What the Backend SDK is told of a worker.

    Args:
        runtime: Dynamo's own options, validated.
        model: the model's folder or name.
        served_name: what clients call it.
        frontend_decoding: the Rust frontend decodes media.
        role: what this worker does of a request.
        route_to_encoder: encode workers encode its media.

    Raises:
        StartupError: the chat template does not exist.
    """
    component, endpoint = COMPONENTS[role], "generate"
    if runtime.endpoint is not None:
        runtime.namespace, component, endpoint = parse_endpoint(runtime.endpoint)
    return WorkerConfig.from_runtime_config(
        runtime,
        model_name=model,
        served_model_name=served_name,
        component=component,
        endpoint=endpoint,
        disaggregation_mode=role,
        route_to_encoder=route_to_encoder,
        custom_jinja_template=_template(runtime.custom_jinja_template),
        metrics_labels=[("model", served_name)],
        **(_media_decoding() if frontend_decoding else {}),
    )


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    full = Path(os.path.expandvars(path)).expanduser()
    if not full.is_file():
        raise StartupError(f"--custom-jinja-template {full}: no such file")
    return str(full)


def lora_module(text: str) -> LoraModule:
    """Read one NAME=PATH.

    Raises:
        StartupError: it is none, or there is no such folder.
    """
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise StartupError(f"--lora-modules {text!r}: expected NAME=PATH")
    if not Path(path).is_dir():
        raise StartupError(f"--lora-modules {name}: {path} is not a folder")
    return LoraModule(name, path)


def _media_decoding() -> dict[str, Any]:
    """What the card says about decoding in the Rust frontend."""
    from dynamo.common.utils.media_decoder import (
        build_frontend_image_decoder_options,
        enable_frontend_video_decoding,
    )
    from dynamo.llm import MediaDecoder, MediaFetcher

    decoder = MediaDecoder()
    decoder.enable_image(build_frontend_image_decoder_options())
    enable_frontend_video_decoding(decoder)
    fetcher = MediaFetcher()
    fetcher.timeout_ms(30_000)
    allow_internal = os.environ.get("DYN_MM_ALLOW_INTERNAL", "0") == "1"
    fetcher.allow_direct_ip(allow_internal)
    fetcher.allow_direct_port(allow_internal)
    return {"media_decoder": decoder, "media_fetcher": fetcher}
