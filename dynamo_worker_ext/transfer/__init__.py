"""Moving pre-processed media between processes.

One file a concept: `base` is the contract, `codec` what a payload is, `kwargs` what is in it,
`buffers` the memory, and each transport a file of its own, imported when it is opened by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from dynamo_worker_ext.card import host_identity
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, MmKwargsSender, Received

__all__ = [
    "Limits",
    "MmKwargsReceiver",
    "MmKwargsSender",
    "Received",
    "open_receiver",
    "open_sender",
    "usable",
]


class _Transport(NamedTuple):
    """Where a transport is and whether this host can receive with it.

    Attributes:
        module: in this package.
        prefix: of its two classes, ``...Receiver`` and ``...Sender``.
        is_usable: may a worker advertise it? Does not import it.
    """

    module: str
    prefix: str
    is_usable: Callable[[], bool]


def _has_shared_memory() -> bool:
    return os.access("/dev/shm", os.R_OK | os.X_OK)  # noqa: S108 - see shm.SHM_DIRECTORY


def _has_arena() -> bool:
    # Senders and receivers meet by a socket in there, and know each other by the identity.
    return _has_shared_memory() and bool(host_identity()) and hasattr(os, "memfd_create")


def _has_nixl() -> bool:
    # Not imported: that takes a second, and a worker may be told to leave it alone.
    return find_spec("nixl") is not None


#: The transports that exist, best first. One more is one more line.
_BUILT: Final = {
    "arena": _Transport("arena", "Arena", _has_arena),
    "shm": _Transport("shm", "Shm", _has_shared_memory),
    "nixl": _Transport("nixl", "Nixl", _has_nixl),
    "fake": _Transport("fake", "Fake", lambda: False),
}


def open_receiver(
    name: str, limits: Limits, metrics: Metrics, **options: Any
) -> MmKwargsReceiver[Any]:
    """A receiver by the name of its transport.

    Args:
        name: ``arena``, ``shm``, ``nixl``, or ``fake`` in tests.
        limits: sizes and deadline.
        metrics: where stages and bytes are counted.
        options: keyword arguments of that receiver's own.

    Raises:
        StartupError: no transport has this name.
        TransportUnavailableError: it has, but cannot be used here.
    """
    receiver: MmKwargsReceiver[Any] = _load(name, "Receiver")(limits, metrics, **options)
    return receiver


def open_sender(name: str, **options: Any) -> MmKwargsSender[Any]:
    """A sender by the name of its transport.

    Args:
        name: as for `open_receiver`.
        options: keyword arguments of that sender's own.

    Raises:
        StartupError: no transport has this name.
        TransportUnavailableError: it has, but cannot be used here.
    """
    sender: MmKwargsSender[Any] = _load(name, "Sender")(**options)
    return sender


def usable() -> tuple[str, ...]:
    """Transports that can be tried on this host, in the order in which they are preferred."""
    return tuple(name for name, transport in _BUILT.items() if transport.is_usable())


def _load(name: str, kind: str) -> Any:
    if name not in _BUILT:
        raise StartupError(f"there is no transport called {name!r}; there is {', '.join(_BUILT)}")
    transport = _BUILT[name]
    return getattr(import_module(f"{__name__}.{transport.module}"), transport.prefix + kind)
