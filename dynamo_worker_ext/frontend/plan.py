"""Which transports a request's media is offered over. A pure decision, in the frontend."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from dynamo_worker_ext.card import WorkerCard
from dynamo_worker_ext.errors import StartupError

#: Transports, the preferred first, and whether they need memory that both sides share.
_NEEDS_SHARED_MEMORY: Final = {"arena": True, "shm": True, "nixl": False}

MODES: Final = ("auto", *_NEEDS_SHARED_MEMORY, "off")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with one request's media.

    Attributes:
        transports: what to offer it over; none where no worker could take it.
        is_certain: every worker that may get the request can read one of them, so that it need
            not carry raw media as well.
    """

    transports: tuple[str, ...]
    is_certain: bool


def check_mode(mode: str) -> str:
    """`mode` as `plan` takes it.

    Raises:
        StartupError: there is no such mode.
    """
    mode = mode.strip().lower()
    if mode not in MODES:
        raise StartupError(f"DYNAMO_MM_TRANSFER is {mode!r}; it is one of {', '.join(MODES)}")
    return mode


def plan(
    mode: str,
    cards: Iterable[WorkerCard],
    host_id: str,
    *,
    usable: Collection[str] = MODES,
    item_bytes: int = 0,
) -> Plan:
    """Decide by the cards of all workers that may get the request.

    Args:
        mode: one of `MODES`; a transport's name for this one only.
        cards: of the worker that was chosen, or else of all.
        host_id: this process's `card.host_identity`.
        usable: transports that can be sent over from here and fit the request.
        item_bytes: the largest payload of the request.
    """
    asked = tuple(_NEEDS_SHARED_MEMORY) if mode == "auto" else (mode,)
    names = [name for name in asked if name in _NEEDS_SHARED_MEMORY and name in usable]
    best = [_best(card, names, host_id, item_bytes) for card in cards]
    if mode != "auto" and None in best:
        # Asked for by name: workers whose cards do not say so may take it, upstream's among them.
        return Plan(tuple(names), is_certain=False)
    wanted = set(best)
    return Plan(
        tuple(name for name in names if name in wanted),
        is_certain=bool(best) and None not in wanted,
    )


def _best(card: WorkerCard, names: Iterable[str], host_id: str, item_bytes: int) -> str | None:
    if card.max_item_bytes is not None and item_bytes > card.max_item_bytes:
        return None
    for name in names:
        reaches = card.shares_memory_with(host_id) or not _NEEDS_SHARED_MEMORY[name]
        if reaches and name in card.transports:
            return name
    return None
