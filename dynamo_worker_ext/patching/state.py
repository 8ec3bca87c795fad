"""What state the patches of an installed engine are in. Reads the files, changes nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dynamo_worker_ext.errors import PatchFormatError
from dynamo_worker_ext.patching import manifest as manifests
from dynamo_worker_ext.patching.diff import Difference
from dynamo_worker_ext.patching.engines import Installation
from dynamo_worker_ext.patching.manifest import Patch, PatchedFile


class State(StrEnum):
    """Of a patch in an installed engine, or of all of them together."""

    APPLIED = "applied"
    ALREADY_UPSTREAM = "already-upstream"
    NOT_NEEDED = "not-needed"
    #: The files are exactly those that the patch is for, and it is not applied.
    APPLICABLE = "applicable"
    REFUSED = "refused"

    @property
    def is_good(self) -> bool:
        """Whether the engine is as it should be."""
        return self not in {State.APPLICABLE, State.REFUSED}


@dataclass(frozen=True, slots=True)
class Replacement:
    """A file, and the content that is to take the place of its own.

    Attributes:
        path: absolute.
        content: the new one.
        sha256: of the content that it has now.
    """

    path: Path
    content: bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """One patch of one installed engine.

    Attributes:
        patch: which one.
        state: what it is.
        reason: why it is refused, or why nothing has to be done; empty otherwise.
        replacements: what applying an applicable patch, or reverting an applied one, writes.
    """

    patch: Patch
    state: State
    reason: str = ""
    replacements: tuple[Replacement, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """All patches of one installed engine.

    Attributes:
        installation: the engine.
        patches: those that its version has.
        refusal: why none of them can be applied or reverted; empty if they can.
        notes: what was done to the tree besides what was asked.
    """

    installation: Installation
    patches: tuple[PatchStatus, ...] = ()
    refusal: str = ""
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """Of all patches together: the one that asks most of the reader."""
        states = {status.state for status in self.patches}
        if self.refusal or State.REFUSED in states:
            return State.REFUSED
        for state in (State.APPLICABLE, State.APPLIED, State.ALREADY_UPSTREAM):
            if state in states:
                return state
        return State.NOT_NEEDED

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        where = self.installation
        return {
            "engine": where.engine,
            "distribution": where.distribution,
            "version": where.version,
            "site_packages": str(where.site_packages),
            "state": self.state.value,
            "refusal": self.refusal,
            "notes": list(self.notes),
            "patches": [
                {
                    "name": status.patch.name,
                    "state": status.state.value,
                    "reason": status.reason,
                    "files": [file.path for file in status.patch.files],
                }
                for status in self.patches
            ],
        }


def inspect(installation: Installation) -> EngineStatus:
    """Look at every file that the patches of an engine are about.

    A patch counts as applicable, or as applied, only if applying or reverting it was tried in
    memory and gave the very bytes that its manifest names.

    Args:
        installation: the engine.

    Raises:
        PatchFormatError: a manifest or patch is malformed.
    """
    known = manifests.find(installation.engine, installation.version)
    if known is None:
        versions = [
            version
            for manifest in manifests.manifests()
            if manifest.engine == installation.engine
            for version in manifest.versions
        ]
        return EngineStatus(
            installation,
            refusal=f"nothing is known about {installation.engine} {installation.version}; "
            f"known versions: {', '.join(versions) or 'none'}",
        )
    statuses = tuple(_status(patch, installation.site_packages) for patch in known.patches)
    states = {status.state for status in statuses}
    refusal = ""
    if State.REFUSED in states:
        reasons = [f"{s.patch.name}: {s.reason}" for s in statuses if s.state is State.REFUSED]
        refusal = "; ".join([*reasons, _reinstall(installation)])
    elif {State.APPLIED, State.APPLICABLE} <= states:
        have, lack = (
            ", ".join(s.patch.name for s in statuses if s.state is state)
            for state in (State.APPLIED, State.APPLICABLE)
        )
        refusal = f"partly patched: with {have}, without {lack}; {_reinstall(installation)}"
    return EngineStatus(installation, statuses, refusal)


def sha256(content: bytes) -> str:
    """Of the content, in hex."""
    return hashlib.sha256(content).hexdigest()


def read(path: Path, root: Path) -> bytes:
    """The content of a file of a tree.

    Raises:
        OSError: it cannot be read, is no plain file, or is outside of the tree.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        if not path.parent.resolve().is_relative_to(root):
            raise OSError(errno.EXDEV, f"it is outside of {root}", str(path))
        return file.read()


def other_side(patch: Patch, file: PatchedFile, content: bytes) -> tuple[State, bytes] | None:
    """Of an original file the patched one, of a patched one the original.

    Returns:
        Whether the patch is applicable or applied, and the other content; None for any third file.

    Raises:
        PatchFormatError: the patch does not make what its manifest says.
    """
    found, diff = sha256(content), patch.diffs[file.path]
    if found == file.before:
        state, wanted = State.APPLICABLE, file.after
    elif found == file.after:
        state, wanted, diff = State.APPLIED, file.before, diff.reversed()
    else:
        return None
    result = diff.apply(content)
    if isinstance(result, Difference) or sha256(result) != wanted:
        raise PatchFormatError(
            f"{patch.directory / patch.name}.patch does not make of {file.path} what the manifest "
            f"says: {result if isinstance(result, Difference) else 'its SHA-256 differs'}"
        )
    return state, result


def _reinstall(installation: Installation) -> str:
    return f"reinstall {installation.distribution} {installation.version} to begin anew"


def _status(patch: Patch, root: Path) -> PatchStatus:
    if patch.state != "patch":
        return PatchStatus(patch, State(patch.state), patch.why)
    before: list[Replacement] = []
    after: list[Replacement] = []
    for file in patch.files:
        path = root / file.path
        try:
            content = read(path, root)
        except OSError as error:
            return PatchStatus(patch, State.REFUSED, f"{file.path}: {error.strerror}")
        side = other_side(patch, file, content)
        if side is None:
            return PatchStatus(patch, State.REFUSED, _changed(patch, file, content))
        state, other = side
        replacement = Replacement(path, other, sha256(content))
        (before if state is State.APPLICABLE else after).append(replacement)
    if before and after:
        names = [
            ", ".join(str(one.path.relative_to(root)) for one in some) for some in (after, before)
        ]
        return PatchStatus(
            patch, State.REFUSED, f"partly patched: {names[0]} is, {names[1]} is not"
        )
    if before:
        return PatchStatus(patch, State.APPLICABLE, replacements=tuple(before))
    return PatchStatus(patch, State.APPLIED, replacements=tuple(after))


def _changed(patch: Patch, file: PatchedFile, content: bytes) -> str:
    diff = patch.diffs[file.path]
    tries: Sequence[bytes | Difference] = (diff.apply(content), diff.reversed().apply(content))
    differences = [one for one in tries if isinstance(one, Difference)]
    # Of a patched and an unpatched reading, the one that gets further is what was meant.
    first = (
        str(max(differences, key=lambda one: one.line))
        if len(differences) == len(tries)
        else "the lines that the patch is about are as expected, another one is not"
    )
    return (
        f"{file.path} is neither what {file.before[:12]} nor what {file.after[:12]} names "
        f"(SHA-256 {sha256(content)[:12]}): {first}"
    )
