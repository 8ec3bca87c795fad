"""Unified diffs, applied strictly: each line has to stand exactly where the diff says.

Of our own, because neither git nor patch is in every engine image, both look for a place nearby
when the named one does not fit, and this package is installed without its dependencies there. It
reads only what this project writes: hunks of text files, each line ended by a newline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_worker_ext.errors import PatchFormatError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line of a file that is not what a diff expects.

    Attributes:
        line: its number, from 1.
        expected: the line in the diff.
        found: the line in the file; None after its end.
    """

    line: int
    expected: str
    found: str | None

    def __str__(self) -> str:
        found = "the end of the file" if self.found is None else repr(self.found[:_SHOWN])
        return f"line {self.line}: expected {self.expected[:_SHOWN]!r}, found {found}"


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that take the place of others. Lines keep their newline.

    Attributes:
        at: lines before it, in the file that it is applied to.
        old: lines that have to stand there.
        new: lines that take their place.
    """

    at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What a diff does to one file.

    Attributes:
        path: relative to the directory that is patched.
        hunks: in order; they do not overlap.
    """

    path: str
    hunks: tuple[Hunk, ...]

    def apply(self, content: bytes) -> bytes | Difference:
        """The content after the diff, or the first line that is not what the diff expects."""
        lines = _split(content)
        result: list[bytes] = []
        done = 0
        for hunk in self.hunks:
            end = hunk.at + len(hunk.old)
            if difference := _differs(lines[hunk.at : end], hunk):
                return difference
            result += lines[done : hunk.at]
            result += hunk.new
            done = end
        return b"".join(result + lines[done:])

    def reversed(self) -> FileDiff:
        """The diff that takes this one back."""
        hunks, shift = [], 0
        for hunk in self.hunks:
            hunks.append(Hunk(hunk.at + shift, hunk.new, hunk.old))
            shift += len(hunk.new) - len(hunk.old)
        return FileDiff(self.path, tuple(hunks))


def parse(text: bytes, name: str) -> dict[str, FileDiff]:
    """Read a diff, with paths that start with ``a/`` and ``b/``.

    Args:
        text: the diff.
        name: what to call it in an error.

    Raises:
        PatchFormatError: it is not such a diff.
    """
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    lines = _split(text)
    at = shift = 0
    while at < len(lines):
        if lines[at].startswith(b"--- "):
            path = _path(lines[at : at + 2], name)
            if path in files:
                raise PatchFormatError(f"{name}: {path} is in it twice")
            hunks = files[path] = []
            at, shift = at + 2, 0
        elif (head := _HUNK.match(lines[at])) and hunks is not None:
            hunk, place, size = _hunk(head, lines[at + 1 :], f"{name}, line {at + 1}")
            if (hunks and hunk.at < hunks[-1].at + len(hunks[-1].old)) or place != hunk.at + shift:
                raise PatchFormatError(f"{name}, line {at + 1}: the hunk is out of place")
            hunks.append(hunk)
            at, shift = at + 1 + size, shift + len(hunk.new) - len(hunk.old)
        else:
            raise PatchFormatError(f"{name}, line {at + 1}: expected a file or a hunk to begin")
    if not files or not all(files.values()):
        raise PatchFormatError(f"{name}: it changes nothing")
    return {path: FileDiff(path, tuple(found)) for path, found in files.items()}


def _split(content: bytes) -> list[bytes]:
    """Lines with their newline; a carriage return is an ordinary character."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + [last for last in lines[-1:] if last]


def _differs(found: Sequence[bytes], hunk: Hunk) -> Difference | None:
    for i, expected in enumerate(hunk.old):
        line = found[i] if i < len(found) else None
        if line != expected:
            shown = None if line is None else line.decode(errors="replace").rstrip("\n")
            return Difference(hunk.at + i + 1, expected.decode(errors="replace")[:-1], shown)
    return None


def _path(head: Sequence[bytes], name: str) -> str:
    old, new = (line.decode(errors="replace").rstrip("\n") for line in [*head, b"", b""][:2])
    if not (old.startswith("--- a/") and new == f"+++ b/{old[6:]}"):
        raise PatchFormatError(f"{name}: expected '--- a/PATH' and '+++ b/PATH', found {old!r}")
    return old[6:]


def _hunk(head: re.Match[bytes], lines: Sequence[bytes], where: str) -> tuple[Hunk, int, int]:
    """The hunk, the lines before its new text, and the number of lines read."""
    old_at, old_size, new_at, new_size = (int(n) if n else 1 for n in head.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    size = 0
    for line in lines:
        if (len(old), len(new)) == (old_size, new_size):
            break
        kind, text = line[:1], line[1:]
        if kind not in b" +-" or not text.endswith(b"\n"):
            raise PatchFormatError(f"{where}: line {size + 1} of the hunk is no diff: {line!r}")
        if kind != b"+":
            old.append(text)
        if kind != b"-":
            new.append(text)
        size += 1
    if (len(old), len(new)) != (old_size, new_size):
        raise PatchFormatError(f"{where}: the hunk does not have the lines that it announces")
    # Where a side is empty, its number is that of the line before it.
    before = old_at - 1 if old_size else old_at
    return Hunk(before, tuple(old), tuple(new)), new_at - 1 if new_size else new_at, size
