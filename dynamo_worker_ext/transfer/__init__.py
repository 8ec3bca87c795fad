"""Moving pre-processed media between processes.

One file a concept: `base` is the contract, `codec` what a payload is, `kwargs` what is in it,
`buffers` the memory, and each transport a file of its own, imported when it is opened by name.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from dynamo_worker_ext.errors import StartupError, TransportUnavailableError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.transfer.base import Limits, MmKwargsReceiver, MmKwargsSender, Received

__all__ = [
    "Limits",
    "MmKwargsReceiver",
    "MmKwargsSender",
    "Received",
    "open_receiver",
    "open_sender",
    "receivable",
]

#: Module and class prefix of each transport that exists.
_BUILT: Final = {"shm": ("shm", "Shm"), "nixl": ("nixl", "Nixl"), "fake": ("fake", "Fake")}

#: Names that DESIGN gives to transports which this version does not have yet.
_PLANNED: Final = ("arena",)


def open_receiver(
    name: str, limits: Limits, metrics: Metrics, **options: Any
) -> MmKwargsReceiver[Any]:
    """A receiver by the name of its transport.

    Args:
        name: ``shm``, ``nixl``, or ``fake`` in tests.
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


def receivable() -> tuple[str, ...]:
    """Transports that can be opened on this host, in the order in which they are preferred."""
    usable = os.access("/dev/shm", os.R_OK | os.X_OK)  # noqa: S108 - see shm.SHM_DIRECTORY
    # Not imported: that takes a second, and a worker may be told to leave it alone.
    nixl = find_spec("nixl") is not None
    return (("shm",) if usable else ()) + (("nixl",) if nixl else ())


def _load(name: str, kind: str) -> Any:
    if name in _PLANNED:
        raise TransportUnavailableError(
            f"the {name} transport is not built yet; there is {_listed()}"
        )
    if name not in _BUILT:
        raise StartupError(f"there is no transport called {name!r}; there is {_listed()}")
    module, prefix = _BUILT[name]
    return getattr(import_module(f"{__name__}.{module}"), prefix + kind)


def _listed() -> str:
    return ", ".join(_BUILT)
