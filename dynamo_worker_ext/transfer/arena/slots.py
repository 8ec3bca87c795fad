"""The sender's books: which slots there are, what lies in them, and who may be looking.

Nothing here waits or is thread-safe: it all happens on the sender's event loop.
"""

from __future__ import annotations

import secrets
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Final, NamedTuple

from dynamo_worker_ext.transfer.arena.memory import PAGE, SLOTS, TABLE_BYTES, OwnPart
from dynamo_worker_ext.transfer.buffers import size_class

#: Holds a slot from `SlotPool.take` to `SlotPool.end`, among the readers that may hold it too.
_OWNER: Final = "owner"


class ArenaStatistics(NamedTuple):
    """What an arena holds now.

    Attributes:
        bytes: memory of all parts.
        used_bytes: of these, in slots that are not free.
        offered: slots that can be read.
        held: slots that readers hold.
        quarantined: of these, the ones whose offer has ended.
        readers: connections.
    """

    bytes: int
    used_bytes: int
    offered: int
    held: int
    quarantined: int
    readers: int = 0


class Slot:
    """Some memory of one part.

    Attributes:
        part: index of the part.
        number: its entry in the part's table.
        start: where it begins in the part, in bytes; at a page.
        capacity: whole pages, in bytes.
        generation: of what lies in it; never used before.
        deadline: when the offer ends by itself, by the pool's clock.
        leases: who may look at it, and how often they said so.
    """

    __slots__ = ("capacity", "deadline", "generation", "leases", "number", "part", "start")

    def __init__(self, part: int, number: int, start: int, capacity: int, generation: int) -> None:
        self.part, self.number, self.start, self.capacity = part, number, start, capacity
        self.generation = generation
        self.deadline = float("inf")
        self.leases: Counter[Hashable] = Counter({_OWNER: 1})


class _Books:
    """One part's free memory and its slots."""

    def __init__(self, part: OwnPart) -> None:
        self.part = part
        self.free = [(TABLE_BYTES, part.nbytes - TABLE_BYTES)]  # start, length; by start
        self.numbers = list(range(SLOTS - 1, -1, -1))
        self.slots: dict[int, Slot] = {}

    def carve(self, nbytes: int) -> int | None:
        """The first place that is large enough: what was used last is still in the CPU's cache."""
        if self.numbers:
            for at, (start, length) in enumerate(self.free):
                if length >= nbytes:
                    self.free[at : at + 1] = [(start + nbytes, length - nbytes)] * (length > nbytes)
                    return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        at = bisect(self.free, (start, 0))
        if at < len(self.free) and self.free[at][0] == start + nbytes:
            nbytes += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == start:
            at -= 1
            before = self.free.pop(at)
            start, nbytes = before[0], before[1] + nbytes
        self.free.insert(at, (start, nbytes))


class SlotPool:
    """All slots of one sender.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._books: list[_Books] = []
        # Kept where JSON readers that know only doubles see every number exactly.
        self._generation = secrets.randbits(48)

    @property
    def bytes(self) -> int:
        return sum(books.part.nbytes for books in self._books)

    def part(self, index: int) -> OwnPart | None:
        """One part, None if there is none of that number."""
        return self._books[index].part if 0 <= index < len(self._books) else None

    def add(self, part: OwnPart) -> None:
        self._books.append(_Books(part))

    def take(self, nbytes: int) -> Slot | None:
        """A slot for `nbytes`, held by its owner; None if there is no room."""
        capacity = -(-size_class(nbytes) // PAGE) * PAGE
        for index, books in enumerate(self._books):
            start = books.carve(capacity)
            if start is not None:
                self._generation += 1
                slot = Slot(index, books.numbers.pop(), start, capacity, self._generation)
                books.slots[slot.number] = slot
                return slot
        return None

    def offer(self, slot: Slot, offset: int, size: int, seconds: float) -> None:
        """Let receivers find what lies in a slot, for so long at most."""
        slot.deadline = self._clock() + seconds
        self._books[slot.part].part.publish(slot.number, slot.generation, offset, size)

    def find(self, part: int, number: int, generation: int) -> Slot | None:
        """The slot, None if it is free or holds something else."""
        if not 0 <= part < len(self._books):
            return None
        slot = self._books[part].slots.get(number)
        return slot if slot is not None and slot.generation == generation else None

    def overdue(self) -> list[Slot]:
        """Slots whose offer is past its deadline."""
        now = self._clock()
        return [slot for slot in self._all() if _OWNER in slot.leases and slot.deadline <= now]

    def retract(self, slot: Slot) -> None:
        """Let nobody find a slot any more. `end` must follow."""
        self._books[slot.part].part.retract(slot.number)

    def end(self, slot: Slot) -> None:
        """The owner no longer holds a slot. A second call changes nothing."""
        self._let_go(slot, _OWNER, all_of_it=True)

    def hold(self, slot: Slot, reader: Hashable) -> None:
        slot.leases[reader] += 1

    def release(self, slot: Slot, reader: Hashable) -> None:
        """Take back one `hold`; changes nothing where there was none."""
        self._let_go(slot, reader)

    def drop(self, reader: Hashable) -> None:
        """Take back all that a reader holds."""
        for slot in self._all():
            self._let_go(slot, reader, all_of_it=True)

    def statistics(self) -> ArenaStatistics:
        slots = self._all()
        held = [slot for slot in slots if any(who != _OWNER for who in slot.leases)]
        return ArenaStatistics(
            bytes=self.bytes,
            used_bytes=sum(slot.capacity for slot in slots),
            offered=sum(
                books.part.generation(n) != 0 for books in self._books for n in books.slots
            ),
            held=len(held),
            quarantined=sum(_OWNER not in slot.leases for slot in held),
        )

    def check(self) -> None:
        """Make sure that the pool is whole.

        Raises:
            RuntimeError: memory is lost or in two places, or free memory is on offer.
        """
        for index, books in enumerate(self._books):
            areas = [*books.free, *((s.start, s.capacity) for s in books.slots.values())]
            at = TABLE_BYTES
            for start, length in sorted(areas):
                if start != at or length <= 0:
                    raise RuntimeError(f"part {index} of the arena is not whole at {at}: {areas}")
                at += length
            if at != books.part.nbytes:
                raise RuntimeError(f"part {index} of the arena ends at {at}")
            if any(sum(one) == two[0] for one, two in pairwise(books.free)):
                raise RuntimeError(f"part {index} of the arena is in pieces: {books.free}")
            if sorted([*books.numbers, *books.slots]) != list(range(SLOTS)):
                raise RuntimeError(f"slots of part {index} of the arena are lost or doubled")
            if any(books.part.generation(number) for number in books.numbers):
                raise RuntimeError(f"part {index} of the arena offers a free slot")
            if any(not slot.leases for slot in books.slots.values()):
                raise RuntimeError(f"part {index} of the arena keeps a slot that nobody holds")

    def close(self) -> None:
        """Offer nothing any more and give up all memory."""
        for books in self._books:
            for number in books.slots:
                books.part.retract(number)
            books.part.close()
        self._books.clear()

    def _all(self) -> list[Slot]:
        return [slot for books in self._books for slot in books.slots.values()]

    def _let_go(self, slot: Slot, who: Hashable, *, all_of_it: bool = False) -> None:
        if who not in slot.leases:
            return
        slot.leases[who] -= 1
        if all_of_it or not slot.leases[who]:
            del slot.leases[who]
        if not slot.leases and slot.part < len(self._books):
            books = self._books[slot.part]
            del books.slots[slot.number]
            books.numbers.append(slot.number)
            books.give_back(slot.start, slot.capacity)
