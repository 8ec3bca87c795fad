"""The KV connector of a prefill or decode worker: what is filled in, and what cannot serve.

Lives in the worker process, before the engine starts; the engine's processes inherit what is set
in the environment here.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from dynamo.common.constants import DisaggregationMode
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from dynamo_worker_ext.errors import StartupError

log = logging.getLogger(__name__)

NIXL: Final = "NixlConnector"

#: Seconds after which vLLM stops waiting for its workers to end by themselves, which those with
#: NIXL's connector do not do (0.31.0): four more, and it kills them.
_SHUTDOWN: Final = ("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")

_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"

#: What each role does with KV, and what it must not be told to do. Asking for both is allowed.
_DOES: Final = {
    DisaggregationMode.PREFILL: "kv_producer",
    DisaggregationMode.DECODE: "kv_consumer",
}

#: Registered ports, below what the system gives to clients.
_FIRST_PORT: Final = 15_000


def prepare(engine_args: AsyncEngineArgs, role: DisaggregationMode) -> None:
    """Give a prefill or decode engine its KV connector; changes `engine_args` and the environment.

    Without ``--kv-transfer-config`` it is NIXL's, with the KV in the memory where the engine has
    it. Where nothing is said about NIXL's side channel, over which engines meet, it listens on
    this host's loopback (or ``VLLM_HOST_IP``) and a free port.

    Raises:
        StartupError: the connector is told to do something else than the role needs.
    """
    does = _DOES.get(role)
    if does is None:
        return
    os.environ.setdefault(*_SHUTDOWN)
    config = engine_args.kv_transfer_config
    if config is None:
        config = KVTransferConfig(kv_connector=NIXL, kv_role=does)
    engine_args.kv_transfer_config = config
    if config.kv_role not in (does, "kv_both"):
        raise StartupError(
            f"--kv-transfer-config: kv_role is {config.kv_role!r}; a {role.value} worker is a "
            f"{does!r}"
        )
    if role is DisaggregationMode.DECODE:
        if config.kv_load_failure_policy != "fail":
            raise StartupError(
                "--kv-transfer-config: kv_load_failure_policy must be 'fail' on a decode worker, "
                f"not {config.kv_load_failure_policy!r}: it cannot compute a prompt whose media "
                "it has not"
            )
        # It processes no media, so it has nothing to keep; what stands in for the items there
        # must not be taken for them.
        engine_args.mm_processor_cache_gb = 0
    elif engine_args.mm_processor_cache_type == "shm":
        raise StartupError(
            "--mm-processor-cache-type shm: a prefill worker has to see its items, and this cache "
            "hides them; use 'lru'"
        )
    if uses_nixl(config):
        _side_channel(os.environ, engine_args.data_parallel_size)


def uses_nixl(config: KVTransferConfig | None) -> bool:
    """Whether NIXL's connector moves the KV, alone or as one of several."""
    return config is not None and NIXL in set(_names(config))


def _names(config: KVTransferConfig) -> Iterator[str | None]:
    yield config.kv_connector
    for one in config.kv_connector_extra_config.get("connectors", ()):
        if isinstance(one, Mapping):
            yield one.get("kv_connector")


def _side_channel(environ: MutableMapping[str, str], ports: int) -> None:
    if not environ.get(_HOST):
        environ[_HOST] = environ.get("VLLM_HOST_IP") or "127.0.0.1"
        if environ[_HOST].startswith("127."):
            log.warning(
                "NIXL's side channel listens on %s: workers of other hosts cannot reach it; set "
                "%s to an address of this host where there are any",
                environ[_HOST],
                _HOST,
            )
    if not environ.get(_PORT):
        environ[_PORT] = str(_free_ports(environ[_HOST], ports))
    log.info("NIXL's side channel: %s port %s", environ[_HOST], environ[_PORT])


def _free_ports(host: str, count: int) -> int:
    """The first of `count` free ports in a row: each data-parallel rank listens on its own.

    They are not held until the engine listens, so they are drawn at random, and from ports that
    the system does not give to anyone who did not ask for them.
    """
    end = _first_ephemeral() - count
    for _ in range(1000):
        first = _FIRST_PORT + secrets.randbelow(end - _FIRST_PORT)
        if all(_is_free(host, first + i) for i in range(count)):
            return first
    raise StartupError(f"no {count} free port(s) in a row on {host}; set {_PORT}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _first_ephemeral() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        return max(int(text.split()[0]), _FIRST_PORT + 5000)
    except (OSError, ValueError, IndexError):
        return 32768
