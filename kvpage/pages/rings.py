"""Stacks and queues of ids in flat arrays: the free slabs, and what may be evicted, oldest first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpage.pages.arrays import Ints, Stamps
from kvpage.pages.geometry import Places

Flags = npt.NDArray[np.bool_]
Counts = Callable[[Ints, Stamps], Flags]
_LEAST_CAPACITY = 256
_LOOK = 64  # entries looked at at a time for the oldest


class Stack:
    """Ids, the last put on first."""

    def __init__(self, ids: npt.NDArray[np.integer], capacity: int) -> None:
        """`ids` are taken from the front."""
        self.array: Ints = np.empty(capacity, np.int32)
        self.at = memoryview(self.array)  # type: ignore[arg-type] # NumPy's stubs lack the buffer protocol
        self.count = len(ids)
        self.array[: self.count] = ids[::-1]

    def pop(self, count: int) -> Ints:
        self.count -= count
        return self.array[self.count : self.count + count][::-1].copy()

    def push(self, ids: npt.NDArray[np.integer]) -> None:
        """The first of `ids` is popped first."""
        self.array[self.count : self.count + len(ids)] = ids[::-1]
        self.count += len(ids)

    def pop_one(self) -> int | None:
        if not self.count:
            return None
        self.count -= 1
        return self.at[self.count]

    def push_one(self, item: int) -> None:
        self.at[self.count] = item
        self.count += 1

    def remove(self, ids: npt.NDArray[np.integer]) -> None:
        """`ids` must be in it. Looks at the whole stack."""
        kept = self.array[: self.count]
        kept = kept[~np.isin(kept, ids)]
        self.count = len(kept)
        self.array[: self.count] = kept


class AgeQueue:
    """(id, stamp) in the order of stamps. An entry is left behind when its id is used again: `counts` says which do."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._reserve(_LEAST_CAPACITY)
        self.head = self.tail = 0
        """Entries from here, to here."""

    def _reserve(self, capacity: int) -> None:
        self._ids: Ints = np.empty(capacity, np.int32)
        self._stamps: Stamps = np.empty(capacity, np.int64)
        self.ids_at = memoryview(self._ids)  # type: ignore[arg-type]
        self.stamps_at = memoryview(self._stamps)  # type: ignore[arg-type]

    def fill(self, ids: Places, stamps: Stamps) -> None:
        """Put in what is found in the arrays, in any order."""
        order = np.argsort(stamps, kind="stable")
        self.append(ids[order], stamps[order])

    def append(self, ids: Places, stamps: Stamps) -> None:
        """`stamps` ascend, and are larger than all before."""
        if self.tail + len(ids) > len(self._ids):
            self._make_room(len(ids))
        end = self.tail + len(ids)
        self._ids[self.tail : end] = ids
        self._stamps[self.tail : end] = stamps
        self.tail = end

    def append_one(self, item: int, stamp: int) -> None:
        if self.tail == len(self._ids):
            self._make_room(1)
        self.ids_at[self.tail] = item
        self.stamps_at[self.tail] = stamp
        self.tail += 1

    def skip(self) -> None:
        """The oldest entry counts no more."""
        self.head += 1

    def entries(self) -> tuple[Ints, Stamps]:
        """All that count, oldest first."""
        ids, stamps = self._ids[self.head : self.tail], self._stamps[self.head : self.tail]
        counting = self._counts(ids, stamps)
        return ids[counting], stamps[counting]

    def oldest(self) -> int | None:
        """The stamp of the oldest entry that counts."""
        while self.head < self.tail:
            end = min(self.tail, self.head + _LOOK)
            places = np.flatnonzero(self._counts(self._ids[self.head : end], self._stamps[self.head : end]))
            if len(places):
                self.head += int(places[0])
                return int(self._stamps[self.head])
            self.head = end
        return None

    def pop(self, count: int, before: int | None = None) -> Places:
        """The oldest ids that count, up to `count` of them, all with stamps smaller than `before`."""
        tail = self.tail
        if before is not None:
            tail = self.head + int(np.searchsorted(self._stamps[self.head : tail], before))
        taken: list[Ints] = []
        while count and self.head < tail:
            end = min(tail, self.head + max(count, _LOOK))
            ids = self._ids[self.head : end]
            places = np.flatnonzero(self._counts(ids, self._stamps[self.head : end]))[:count]
            taken.append(ids[places])
            count -= len(places)
            self.head = end if count else self.head + int(places[-1]) + 1
        return np.concatenate([*taken, np.empty(0, np.intp)])

    def _make_room(self, count: int) -> None:
        ids, stamps = self.entries()
        capacity = max(_LEAST_CAPACITY, 2 * (len(ids) + count))
        self._reserve(capacity)
        self._ids[: len(ids)], self._stamps[: len(ids)] = ids, stamps
        self.head, self.tail = 0, len(ids)
