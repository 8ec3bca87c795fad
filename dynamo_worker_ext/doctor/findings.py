"""One finding, and how they are printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is; only a problem makes the command fail."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was looked at.

    Attributes:
        level: how bad it is.
        area: what it belongs to: ``environment``, ``workers``, ``transports``, ``probe``, ...
        text: what was found.
        advice: one line of what to do; empty where there is nothing to do.
    """

    level: Level
    area: str
    text: str
    advice: str = ""

    @classmethod
    def ok(cls, area: str, text: str) -> Finding:
        return cls(Level.OK, area, text)

    @classmethod
    def note(cls, area: str, text: str, advice: str = "") -> Finding:
        return cls(Level.NOTE, area, text, advice)

    @classmethod
    def problem(cls, area: str, text: str, advice: str) -> Finding:
        return cls(Level.PROBLEM, area, text, advice)


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if one of them is a problem, else 0."""
    return int(any(one.level is Level.PROBLEM for one in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """All of them, for programs."""
    return json.dumps(
        {
            "healthy": not exit_status(findings),
            "findings": [dataclasses.asdict(one) for one in findings],
        },
        indent=2,
    )


def as_text(findings: Sequence[Finding]) -> str:
    """All of them, for people: by area, each with its advice below."""
    lines: list[str] = []
    area = ""
    for one in findings:
        if one.area != area:
            area = one.area
            lines += ["", area] if lines else [area]
        lines.append(f"  {one.level.value:8} {one.text}")
        if one.advice:
            lines.append(f"  {'':8} -> {one.advice}")
    problems = sum(one.level is Level.PROBLEM for one in findings)
    total = "nothing is wrong" if not problems else f"{problems} problem" + "s" * (problems > 1)
    return "\n".join([*lines, "", total])
