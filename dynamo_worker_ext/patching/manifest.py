"""What is known about each engine version: `patches/<engine>/<version>/manifest.toml`.

One manifest is for the versions that it lists, which have the very same files; there are no
ranges. An entry either changes files, or says why nothing has to be changed.
"""

from __future__ import annotations

import tomllib
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dynamo_worker_ext.errors import PatchFormatError
from dynamo_worker_ext.patching.diff import FileDiff, parse

EngineName = Literal["vllm", "sglang"]
ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)

_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ignored_types=(cached_property,))


class PatchedFile(_Strict):
    """One file that a patch changes.

    Attributes:
        path: relative to site-packages.
        before: SHA-256 of the file as the engine ships it.
        after: SHA-256 of the patched file.
    """

    path: _Text
    before: _Sha256
    after: _Sha256


class Patch(_Strict):
    """One patch of one manifest.

    Attributes:
        name: the same in every version that has it.
        state: ``patch`` if files have to be changed; otherwise why they do not.
        why: what goes wrong without it; for the other states, why nothing is to be done.
        changes: what it changes in the engine's behaviour.
        why_a_patch: why neither the engine's public API nor its plugin hooks do.
        upstream: where upstream has, or discusses, the change.
        not_needed_since: the first version without need, if there is one.
        checks: the checks of behaviour that prove it; see `verify`.
        files: in the order in which they are replaced. Each step leaves an engine that works.
        directory: of the manifest.
    """

    name: Annotated[str, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)]
    state: Literal["patch", "already-upstream", "not-needed"] = "patch"
    why: _Text
    changes: str = ""
    why_a_patch: str = ""
    upstream: tuple[Annotated[str, Field(pattern="^https://")], ...] = ()
    not_needed_since: str | None = None
    checks: tuple[str, ...] = ()
    files: tuple[PatchedFile, ...] = ()
    directory: Annotated[Path, Field(exclude=True)]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.state == "patch") != bool(self.files):
            raise ValueError(f"{self.name}: files belong to the state 'patch', and to no other")
        if self.files and not (self.changes and self.why_a_patch and self.checks):
            raise ValueError(f"{self.name}: changes, why_a_patch and checks are missing")
        for file in self.files:
            parts = PurePosixPath(file.path).parts
            if file.path.startswith("/") or ".." in parts or len(parts) < 2:
                raise ValueError(f"{self.name}: {file.path!r} is not a path inside a package")
        return self

    @cached_property
    def diffs(self) -> dict[str, FileDiff]:
        """What is done to each file, by its path.

        Raises:
            PatchFormatError: the patch is missing, malformed, or for other files.
        """
        path = self.directory / f"{self.name}.patch"
        try:
            diffs = parse(path.read_bytes(), str(path))
        except OSError as error:
            raise PatchFormatError(f"{path}: {error.strerror}") from None
        named = {file.path for file in self.files}
        if diffs.keys() != named:
            raise PatchFormatError(
                f"{path} changes {sorted(diffs)}, but the manifest names {sorted(named)}"
            )
        return diffs


class Manifest(_Strict):
    """The patches of one or more versions of an engine, whose files are the same.

    Attributes:
        engine: whose they are.
        versions: exact versions, without a local part such as ``+cpu``.
        patches: no two of them change the same file.
    """

    engine: EngineName
    versions: Annotated[tuple[_Text, ...], Field(min_length=1)]
    patches: Annotated[tuple[Patch, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        paths = [file.path for patch in self.patches for file in patch.files]
        if len(set(paths)) < len(paths):
            raise ValueError("two patches of one version change the same file")
        if len({patch.name for patch in self.patches}) < len(self.patches):
            raise ValueError("two patches of one version have the same name")
        if any(not path.startswith(f"{self.engine}/") for path in paths):
            raise ValueError(f"a patch of {self.engine} changes a file of something else")
        return self


def patches_directory() -> Path:
    """Where the patches are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def manifests() -> tuple[Manifest, ...]:
    """All manifests, by engine and then in the order of their directories' names.

    Raises:
        PatchFormatError: one is malformed, or there is none.
    """
    return _load_all(patches_directory())


def find(engine: str, version: str) -> Manifest | None:
    """The manifest for exactly this version, without its local part; None if there is none."""
    public = version.partition("+")[0]
    for manifest in manifests():
        if manifest.engine == engine and public in manifest.versions:
            return manifest
    return None


@cache
def _load_all(root: Path) -> tuple[Manifest, ...]:
    found = [_load(path) for path in sorted(root.glob("*/*/manifest.toml"))]
    if not found:
        raise PatchFormatError(f"there are no patches in {root}; this package is incomplete")
    seen: set[tuple[str, str]] = set()
    for manifest in found:
        for version in manifest.versions:
            if (manifest.engine, version) in seen:
                raise PatchFormatError(f"two manifests are for {manifest.engine} {version}")
            seen.add((manifest.engine, version))
    return tuple(found)


def _load(path: Path) -> Manifest:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PatchFormatError(f"{path}: {error}") from None
    for patch in data.get("patches", []):
        patch["directory"] = path.parent
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PatchFormatError(f"{path}: {where}: {first['msg']}") from None
    if path.parent.name != manifest.versions[0] or path.parent.parent.name != manifest.engine:
        raise PatchFormatError(
            f"{path} is for {manifest.engine} {manifest.versions[0]}, which belongs elsewhere"
        )
    return manifest
