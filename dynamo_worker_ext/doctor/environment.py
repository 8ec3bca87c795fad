"""This machine: versions that belong together, memory, ports."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dynamo_worker_ext import __version__
from dynamo_worker_ext.doctor.findings import Finding
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.patching import report

#: What this package was tested with; pyproject.toml pins the same.
PROVEN: Final[Mapping[str, str]] = {
    "ai-dynamo": "1.6.1",
    "ai-dynamo-runtime": "1.6.1",
    "vllm": "0.31.0",
    "sglang": "0.5.21",
}

#: With which NIXL each engine was tested.
PROVEN_NIXL: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("1.4.1",),
    "sglang": ("1.4.1", "1.5.0"),
}

_PYTHON: Final = ((3, 11), (3, 14))
_AREA: Final = "environment"
_SHM_LEAST: Final = 1 << 30
_SHM_FULL: Final = 0.9

VersionOf = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of an installed distribution, without its local part (``+cpu``)."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(
    environ: Mapping[str, str] = os.environ,
    *,
    version_of: VersionOf = installed,
    shm: Path = Path("/dev/shm"),  # noqa: S108 - the memory that is shared
    meminfo: Path = Path("/proc/meminfo"),
) -> list[Finding]:
    """Everything about this machine."""
    return [
        *_python(),
        *_versions(version_of),
        *_nixl(environ, version_of),
        *_shared_memory(shm),
        *_huge_pages(meminfo),
        *_ports(environ),
        *patches(version_of),
    ]


def patches(version_of: VersionOf = installed) -> Iterator[Finding]:
    """What engine patches are in effect here."""
    for engine in ("vllm", "sglang"):
        if version_of(engine) is None:
            continue
        found = report.installed(engine)
        if found.refusal:
            yield Finding.note(
                _AREA,
                f"patches of {engine}: {found.refusal}",
                f"python -m dynamo_worker_ext.patching check --engine {engine}",
            )
        elif found.missing:
            yield Finding.note(
                _AREA,
                f"{engine} {found.version} without the patch {', '.join(found.missing)}",
                f"python -m dynamo_worker_ext.patching apply --engine {engine}",
            )
        for name in found.names:
            yield Finding.ok(_AREA, f"{engine} has the patch {name}")


def _python() -> Iterator[Finding]:
    have = sys.version_info[:3]
    text = f"Python {'.'.join(map(str, have))}, dynamo-worker-ext {__version__}"
    if _PYTHON[0] <= have[:2] < _PYTHON[1]:
        yield Finding.ok(_AREA, text)
    else:
        yield Finding.problem(_AREA, text, "use Python 3.11 to 3.13")


def _versions(version_of: VersionOf) -> Iterator[Finding]:
    have = {name: version_of(name) for name in PROVEN}
    engines = [name for name in ("vllm", "sglang") if have[name]]
    for name, proven in PROVEN.items():
        version = have[name]
        if version == proven:
            yield Finding.ok(_AREA, f"{name} {version}")
        elif version is not None:
            yield Finding.problem(
                _AREA,
                f"{name} {version}, but this package was tested with {proven}",
                f"pip install {name}=={proven}",
            )
        elif name not in ("vllm", "sglang"):
            yield Finding.problem(_AREA, f"{name} is missing", f"pip install {name}=={proven}")
    if not engines:
        yield Finding.problem(
            _AREA,
            "no engine is installed",
            f"run this where the workers run, or pip install vllm=={PROVEN['vllm']}",
        )


def _nixl(environ: Mapping[str, str], version_of: VersionOf) -> Iterator[Finding]:
    shim = version_of("nixl")
    binaries = {n: v for n in ("nixl-cu12", "nixl-cu13") if (v := version_of(n)) is not None}
    if shim is None and not binaries:
        yield Finding.note(_AREA, "NIXL is not installed", "needed between hosts only")
        return
    if shim is None or not binaries or {*binaries.values()} != {shim}:
        named = ", ".join(f"{n} {v}" for n, v in {"nixl": shim or "missing", **binaries}.items())
        yield Finding.problem(
            _AREA,
            f"parts of NIXL that do not belong together: {named}",
            f"pip install --no-deps nixl=={shim or '1.4.1'} nixl-cu13=={shim or '1.4.1'}",
        )
        return
    for engine, proven in PROVEN_NIXL.items():
        if version_of(engine) is not None and shim not in proven:
            yield Finding.note(
                _AREA,
                f"nixl {shim}, but {engine} was tested with {' and '.join(proven)}",
                f"pip install --no-deps nixl=={proven[0]} nixl-cu13=={proven[0]}",
            )
            break
    else:
        yield Finding.ok(_AREA, f"nixl {shim}")
    if not environ.get("UCX_NET_DEVICES"):
        yield Finding.note(
            _AREA,
            "UCX_NET_DEVICES is not set: UCX listens on every network, unauthenticated",
            "name the devices between your workers, or lo",
        )


def _shared_memory(shm: Path) -> Iterator[Finding]:
    try:
        stat = os.statvfs(shm)
    except OSError as error:
        yield Finding.problem(
            _AREA, f"{shm}: {error.strerror}", "mount a tmpfs there; media travels through it"
        )
        return
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    used = size - free
    text = f"{shm} has {_mb(size)}, {_mb(used)} of it in use"
    if size < _SHM_LEAST:
        yield Finding.problem(
            _AREA, text, f"give it {_mb(_SHM_LEAST)} at least (docker --shm-size=1g)"
        )
    elif used > _SHM_FULL * size:
        yield Finding.problem(
            _AREA, text, "remove what stopped processes left there, or make it larger"
        )
    else:
        yield Finding.ok(_AREA, text)


def _mb(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MB"


def _huge_pages(meminfo: Path) -> Iterator[Finding]:
    values: dict[str, str] = {}
    try:
        for line in meminfo.read_text().splitlines():
            key, _, value = line.partition(":")
            values[key] = value.strip()
    except OSError:
        return
    total, free = values.get("HugePages_Total", "0"), values.get("HugePages_Free", "0")
    if total == "0":
        yield Finding.note(_AREA, "no huge pages are reserved; the arena does without")
    else:
        size = values.get("Hugepagesize", "?")
        yield Finding.ok(_AREA, f"huge pages: {free} of {total} free, {size} each")


def _ports(environ: Mapping[str, str]) -> Iterator[Finding]:
    port = environ.get("DYN_SYSTEM_PORT", "").strip()
    if port in ("", "-1", "0"):
        yield Finding.note(
            _AREA,
            "DYN_SYSTEM_PORT is not set here: a worker started so has no /metrics",
            "set it to a free port below 32768, another one for each worker",
        )
        return
    try:
        from dynamo_worker_ext.worker import check_system_port
    except ImportError:
        return  # no Dynamo, which is a finding already
    try:
        check_system_port(environ)
    except StartupError as error:
        yield Finding.problem(
            _AREA, str(error), "no worker can be started with it; fine if one runs on it already"
        )
    else:
        yield Finding.ok(_AREA, f"DYN_SYSTEM_PORT {port} is free")
