"""Stacks and queues of ids in flat arrays: the free slabs, and what may be evicted, oldest first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


class Entry(NamedTuple):
    item: int
    stamp: int


class AgeQueue:
    """(id, stamp) in the order of stamps. An entry is left behind when its id is used again: `counts` says which do."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._reserve(_LEAST_CAPACITY)
        self._head = self._tail = 0

    def _reserve(self, capacity: int) -> None:
        self._ids: Ints = np.empty(capacity, np.int32)
        self._stamps: Stamps = np.empty(capacity, np.int64)
        self._ids_at = memoryview(self._ids)  # type: ignore[arg-type]
        self._stamps_at = memoryview(self._stamps)  # type: ignore[arg-type]

    def fill(self, ids: Places, stamps: Stamps) -> None:
        """Put in what is found in the arrays, in any order."""
        order = np.argsort(stamps, kind="stable")
        self.append(ids[order], stamps[order])

    def append(self, ids: Places, stamps: Stamps) -> None:
        """`stamps` ascend, and are larger than all before."""
        if self._tail + len(ids) > len(self._ids):
            self._make_room(len(ids))
        end = self._tail + len(ids)
        self._ids[self._tail : end] = ids
        self._stamps[self._tail : end] = stamps
        self._tail = end

    def append_one(self, item: int, stamp: int) -> None:
        if self._tail == len(self._ids):
            self._make_room(1)
        self._ids_at[self._tail] = item
        self._stamps_at[self._tail] = stamp
        self._tail += 1

    def first(self) -> Entry | None:
        """The oldest entry, whether it counts or not."""
        if self._head == self._tail:
            return None
        return Entry(self._ids_at[self._head], self._stamps_at[self._head])

    def skip(self) -> None:
        """Go on to the next."""
        self._head += 1

    def entries(self) -> tuple[Ints, Stamps]:
        """All that count, oldest first."""
        ids, stamps = self._ids[self._head : self._tail], self._stamps[self._head : self._tail]
        counting = self._counts(ids, stamps)
        return ids[counting], stamps[counting]

    def oldest(self) -> int | None:
        """The stamp of the oldest entry that counts."""
        while self._head < self._tail:
            end = min(self._tail, self._head + _LOOK)
            places = np.flatnonzero(self._counts(self._ids[self._head : end], self._stamps[self._head : end]))
            if len(places):
                self._head += int(places[0])
                return int(self._stamps[self._head])
            self._head = end
        return None

    def pop(self, count: int, before: int | None = None) -> Places:
        """The oldest ids that count, up to `count` of them, all with stamps smaller than `before`."""
        tail = self._tail
        if before is not None:
            tail = self._head + int(np.searchsorted(self._stamps[self._head : tail], before))
        taken: list[Ints] = []
        while count and self._head < tail:
            end = min(tail, self._head + max(count, _LOOK))
            ids = self._ids[self._head : end]
            places = np.flatnonzero(self._counts(ids, self._stamps[self._head : end]))[:count]
            taken.append(ids[places])
            count -= len(places)
            self._head = end if count else self._head + int(places[-1]) + 1
        return np.concatenate([*taken, np.empty(0, np.intp)])

    def _make_room(self, count: int) -> None:
        ids, stamps = self.entries()
        capacity = max(_LEAST_CAPACITY, 2 * (len(ids) + count))
        self._reserve(capacity)
        self._ids[: len(ids)], self._stamps[: len(ids)] = ids, stamps
        self._head, self._tail = 0, len(ids)
