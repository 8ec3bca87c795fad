"""One media item as an engine takes it: its named fields, and how each is batched.

This is what vLLM calls a ``MultiModalKwargsItem``, as plain types that need no engine. What a
payload says about a field is checked here; `codec` reads and writes the payload itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from dynamo_worker_ext.errors import InvalidTransferError

if TYPE_CHECKING:
    import torch

    #: What one field holds; lists may be nested.
    Nested: TypeAlias = "torch.Tensor | list[Nested] | int | float"

FieldKind = Literal["batched", "flat", "shared"]

#: More dimensions than any model's tensors have.
MAX_DIMS: Final = 16

_KINDS: Final[tuple[str, ...]] = get_args(FieldKind)


@dataclass(frozen=True, slots=True, eq=False)
class KwargsField:
    """One named field of an item.

    Attributes:
        data: tensors, nested in lists where the model wants lists; a plain number where a
            processor made one; None if the sender left the field empty.
        kind: how the engine joins this field over the items of a batch.
        options: what `kind` needs: ``keep_on_cpu`` (bool) for all; ``slices`` (list of
            `slice`, or of tuples of `slice`) and ``dim`` (int) for "flat"; ``batch_size`` (int)
            for "shared". Only what the sender wrote is here.
    """

    data: Nested | None
    kind: FieldKind
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class KwargsItem:
    """One media item as the engine takes it: its fields by name, in the sender's order."""

    fields: Mapping[str, KwargsField]


def read_kind(value: object) -> tuple[FieldKind, dict[str, Any]]:
    """Check what a payload says about how a field is batched.

    Args:
        value: ``[kind, options]`` as msgpack gave it.

    Raises:
        InvalidTransferError: ``invalid_type``.
    """
    if not isinstance(value, list) or len(value) != 2:
        raise invalid_type(f"a field is [kind, options], got {short(value)}")
    kind, raw = value
    needed: tuple[str, ...]
    match kind:
        case "batched":
            needed, allowed = (), {"keep_on_cpu"}
        case "flat":
            needed, allowed = ("slices",), {"keep_on_cpu", "slices", "dim"}
        case "shared":
            needed, allowed = ("batch_size",), {"keep_on_cpu", "batch_size"}
        case _:
            raise invalid_type(f"a field is one of {', '.join(_KINDS)}, got {short(kind)}")
    options = as_dict(raw, f"the options of a {kind} field")
    if not options.keys() <= allowed or not all(key in options for key in needed):
        raise invalid_type(f"a {kind} field takes {sorted(allowed)}, got {short(list(options))}")
    return kind, {key: _OPTIONS[key](option) for key, option in options.items()}


def _read_keep_on_cpu(value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid_type(f"keep_on_cpu is true or false, got {short(value)}")
    return value


def _read_slices(value: object) -> list[Any]:
    """One slice an item, or a tuple of slices each, as an index of several dimensions."""
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise invalid_type(f"slices are a list, got {short(value)}")
    return [
        tuple(_read_slice(part) for part in entry)
        if entry and isinstance(entry[0], list)
        else _read_slice(entry)
        for entry in value
    ]


def _read_slice(value: object) -> slice:
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(part is None or (type(part) is int and abs(part) < 2**63) for part in value)
        or value[2] == 0
    ):
        raise invalid_type(f"a slice is [start, stop, step], got {short(value)}")
    return slice(*value)


def _read_dim(value: object) -> int:
    if type(value) is not int or not -MAX_DIMS <= value < MAX_DIMS:
        raise invalid_type(f"dim is from -{MAX_DIMS} to {MAX_DIMS - 1}, got {short(value)}")
    return value


def _read_batch_size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise invalid_type(f"batch_size is a count, got {short(value)}")
    return value


#: Options by name with what reads them, in the order in which vLLM writes them.
_OPTIONS: Final[Mapping[str, Callable[[object], Any]]] = {
    "keep_on_cpu": _read_keep_on_cpu,
    "slices": _read_slices,
    "dim": _read_dim,
    "batch_size": _read_batch_size,
}


def write_kind(field: KwargsField) -> tuple[FieldKind, dict[str, Any]]:
    """The inverse of `read_kind`, options in the order in which vLLM writes them.

    Raises:
        InvalidTransferError: ``invalid_type``, of a kind or an option that does not exist.
    """
    options = {key: field.options[key] for key in _OPTIONS if key in field.options}
    if field.kind not in _KINDS or len(options) != len(field.options):
        raise invalid_type(f"a field of kind {field.kind!r} with options {sorted(field.options)}")
    return field.kind, options


def write_slice(value: object) -> object:
    """What msgpack has no type for, as `read_kind` reads it: slices are the only such options.

    Raises:
        InvalidTransferError: ``invalid_type``, of anything else.
    """
    if isinstance(value, slice):
        # Processors compute them, so that they may be numpy's integers.
        parts = (value.start, value.stop, value.step)
        return [None if part is None else int(part) for part in parts]
    raise invalid_type(f"an option holds numbers and slices, got {type(value).__name__}")


def as_dict(value: object, what: str) -> dict[str, Any]:
    """`value` if it is a map with names as keys; InvalidTransferError otherwise."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise invalid_type(f"{what} is a map with names as keys, got {short(value)}")
    return value


def invalid_type(message: str) -> InvalidTransferError:
    """The error for what is not of the form that `codec` describes."""
    return InvalidTransferError(message, reason="invalid_type")


def short(value: object) -> str:
    """A value from the payload, fit for an error message and a log line."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int | float | None):
        return repr(value)
    # One level only: what came may be nested as deeply as its sender liked.
    if isinstance(value, list) and not any(isinstance(entry, list) for entry in value[:MAX_DIMS]):
        return f"[{', '.join(short(entry) for entry in value[:MAX_DIMS])}]"[:200]
    return type(value).__name__
