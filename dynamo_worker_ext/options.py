"""Readers of what a client may ask for, the same for both engines.

The engines check ranges, but they take True for 1, and a string fails deep inside of them. A
reader takes the option's name and its value and returns the value checked; `read` applies a table
of them to one section of a request, and refuses every option that the table does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from dynamo_worker_ext.errors import RequestError, UnsupportedOptionError

_LARGEST: Final = sys.float_info.max

Reader = Callable[[str, Any], Any]

#: Name in the request -> (the engine's name, reader). None: checked, but not passed on.
Table = Mapping[str, tuple[str | None, Reader]]


def read(where: str, section: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """One section of a request under the engine's names. Null stands for "not asked for".

    Args:
        where: the section's name, for messages.

    Raises:
        UnsupportedOptionError: an option carries a value and is not in `table`.
        RequestError: a reader refused a value.
    """
    result: dict[str, Any] = {}
    for name, value in section.items():
        if value is None:
            continue
        if name not in table:
            raise UnsupportedOptionError(
                f"{where}.{name}={short(value)} cannot be honoured by this worker; leave it out"
            )
        target, reader = table[name]
        checked = reader(name, value)
        if target is not None:
            result[target] = checked
    return result


def section(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside of `holder`; an empty one if it is missing or null."""
    value = holder.get(name)
    return {} if value is None else obj(name, value)


def short(value: object) -> str:
    """A value from the wire, fit for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is a number, got {short(value)}")
    if not -_LARGEST <= value <= _LARGEST:  # so are NaN, and integers that no float can hold
        raise RequestError(f"{name} is a finite number, got {short(value)}")
    return value


def integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is an integer, got {short(value)}")
    if not -(2**63) <= value < 2**63:
        raise RequestError(f"{name} is an integer of 64 bits, got {short(value)}")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is true or false, got {short(value)}")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} is a string, got {short(value)}")
    return value


def obj(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is an object, got {short(value)}")
    return dict(value)


def items(name: str, value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} is a list, got {short(value)}")
    return list(value)


def texts(name: str, value: object) -> list[str]:
    return [text(f"each of {name}", one) for one in items(name, value)]


def token_ids(name: str, value: object) -> list[int]:
    return [integer(f"each of {name}", one) for one in items(name, value)]


def token_id_lists(name: str, value: object) -> list[list[int]]:
    return [token_ids(f"each of {name}", one) for one in items(name, value)]


def text_or_texts(name: str, value: object) -> list[str]:
    return [value] if isinstance(value, str) else texts(name, value)


def logit_bias(name: str, value: object) -> dict[int, float]:
    result = {}
    for key, bias in obj(name, value).items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise RequestError(f"{name} maps token ids to numbers, got {short(key)}") from None
        # The range of OpenAI's API, to which vLLM's and SGLang's own servers cut it as well.
        result[token] = min(100.0, max(-100.0, number(f"{name}[{token}]", bias)))
    return result


def only(neutral: object, why: str) -> Reader:
    """A reader of an option that the engine honours under one value only: the neutral one."""

    def reader(name: str, value: object) -> None:
        if value != neutral or isinstance(value, bool) is not isinstance(neutral, bool):
            raise UnsupportedOptionError(f"{name}={short(value)} cannot be honoured: {why}")

    return reader
