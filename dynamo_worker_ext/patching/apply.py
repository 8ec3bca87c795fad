"""Applies and reverts the patches of an installed engine: all of them, or nothing.

Everything is computed and checked before the first byte is written. Each file is replaced in one
step, by a rename, so that a hard link to it elsewhere (an installer's cache) keeps its content.
While files are being replaced there is a journal in site-packages: a run that finds one, because
the one before was killed, first puts the tree back to where it was, if it is neither the old nor
the new one. The lock is on the directory itself and leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dynamo_worker_ext.errors import PatchRefusedError
from dynamo_worker_ext.patching import manifest as manifests
from dynamo_worker_ext.patching.engines import Installation
from dynamo_worker_ext.patching.state import (
    EngineStatus,
    Replacement,
    State,
    inspect,
    other_side,
    read,
    sha256,
)

_Doing = Literal["apply", "revert"]


def check(installation: Installation) -> EngineStatus:
    """The state of an engine's patches. Writes nothing, needs no right to.

    Raises:
        PatchRefusedError: another run is at work there.
        PatchFormatError: a manifest or patch is malformed.
    """
    with _locked(installation.site_packages, fcntl.LOCK_SH):
        status = inspect(installation)
        if _journal(installation).exists():
            note = "a run was interrupted here; apply or revert repairs the tree first"
            return replace(
                status, refusal=(status.refusal and f"{note} ({status.refusal})") or note
            )
        return status


def apply(installation: Installation) -> EngineStatus:
    """Apply every patch of an engine that is not applied yet.

    Returns:
        The state afterwards. If it is refused, nothing was changed.

    Raises:
        PatchRefusedError: another run is at work, or the files cannot be written. All of them
            are as they were.
        PatchFormatError: a manifest or patch is malformed.
    """
    return _change(installation, "apply")


def revert(installation: Installation) -> EngineStatus:
    """Give every patched file the bytes that the engine was shipped with.

    Result and errors are those of `apply`.
    """
    return _change(installation, "revert")


def _change(installation: Installation, doing: _Doing) -> EngineStatus:
    changed = State.APPLICABLE if doing == "apply" else State.APPLIED
    with _locked(installation.site_packages, fcntl.LOCK_EX):
        notes = _repair(installation)
        status = inspect(installation)
        replacements = [
            one for patch in status.patches if patch.state is changed for one in patch.replacements
        ]
        if doing == "revert":
            replacements.reverse()
        if not status.refusal and replacements:
            _write(installation, doing, replacements)
            status = inspect(installation)
        return replace(status, notes=notes)


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PatchRefusedError(f"{directory} cannot be read: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchRefusedError(f"another run is at work in {directory}; wait for it") from None
        except OSError as error:
            raise PatchRefusedError(f"{directory} cannot be locked: {error.strerror}") from None
        yield
    finally:
        os.close(descriptor)


def _journal(installation: Installation) -> Path:
    name = f".dynamo-worker-ext-patching-{installation.engine}.json"
    return installation.site_packages / name


def _staged(path: Path) -> Path:
    return path.with_name(f".{path.name}.dwe-new")


def _write(
    installation: Installation,
    doing: _Doing,
    replacements: Sequence[Replacement],
) -> None:
    """Replace files, in their order; put all back if one cannot be."""
    root = installation.site_packages
    entry = {"engine": installation.engine, "version": installation.version, "doing": doing}
    try:
        for one in replacements:
            # The lock keeps our own runs away, and nobody else.
            if sha256(read(one.path, root)) != one.sha256:
                raise PatchRefusedError(f"{one.path} is being changed; nothing was written")
        _create(_journal(installation), json.dumps(entry).encode(), like=None)
        for one in replacements:
            _create(_staged(one.path), one.content, like=one.path)
        for one in replacements:
            _remove_compiled(one.path)
            os.replace(_staged(one.path), one.path)
            _sync(one.path.parent)
        _finish(installation, [one.path for one in replacements])
    except OSError as error:
        _repair(installation)
        if all(sha256(read(one.path, root)) != one.sha256 for one in replacements):
            return  # it was the tidying up that failed at first
        raise PatchRefusedError(
            f"{error.filename or root} cannot be written: {error.strerror}; all files are as "
            "they were"
        ) from None


def _finish(installation: Installation, paths: Sequence[Path]) -> None:
    """Remove what is not to survive a run, the journal last."""
    for path in paths:
        _staged(path).unlink(missing_ok=True)
        _remove_compiled(path)
        _sync(path.parent)
    _journal(installation).unlink()
    _sync(installation.site_packages)


def _remove_compiled(path: Path) -> None:
    """Python knows a stale .pyc only by the source's size and time of change, if at all."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _repair(installation: Installation) -> tuple[str, ...]:
    """After a killed run, see to it that the tree is the old or the new one; say which.

    Raises:
        PatchRefusedError: a file has been changed since, or cannot be written.
    """
    try:
        entry = json.loads(read(_journal(installation), installation.site_packages))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError):
        entry = None  # cut off while it was written: no file had been replaced
    doing = "revert" if isinstance(entry, dict) and entry.get("doing") == "revert" else "apply"
    known = manifests.find(installation.engine, installation.version)
    if known is None:  # another version was installed since; `inspect` refuses it
        return ()
    root = installation.site_packages
    old: list[Path] = []
    new: list[Replacement] = []
    for patch in known.patches:
        for file in patch.files:
            path = root / file.path
            try:
                content = read(path, root)
            except OSError as error:
                raise PatchRefusedError(f"{path}: {error.strerror}") from None
            side = other_side(patch, file, content)
            if side is None:
                raise PatchRefusedError(
                    f"a run was interrupted here, and {path} has been changed since; "
                    f"reinstall {installation.distribution} {installation.version}"
                )
            state, other = side
            if (state is State.APPLICABLE) == (doing == "apply"):
                old.append(path)
            else:
                new.append(Replacement(path, other, sha256(content)))
    try:
        if old and new:
            for one in reversed(new):
                _staged(one.path).unlink(missing_ok=True)
                _create(_staged(one.path), one.content, like=one.path)
                os.replace(_staged(one.path), one.path)
                _sync(one.path.parent)
        _finish(installation, [*old, *(one.path for one in new)])
    except OSError as error:
        raise PatchRefusedError(
            f"a run was interrupted here; to repair it, {error.filename or root} has to be "
            f"writable: {error.strerror}"
        ) from None
    if new and not old:
        return (f"an interrupted {doing} was found, and is complete",)
    return (f"an interrupted {doing} was found; the tree is as it was before it",)


def _create(path: Path, content: bytes, *, like: Path | None) -> None:
    """Write a new file and see it onto the disk, with the mode and owner of another."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if like is not None:
            status = like.stat(follow_symlinks=False)
            mine = os.fstat(descriptor)
            if (mine.st_uid, mine.st_gid) != (status.st_uid, status.st_gid):
                os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, status.st_mode & 0o7777)
        os.fsync(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
