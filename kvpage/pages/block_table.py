"""The blocks of one sequence in one group, as kernels read them: an int32 array that grows at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from kvpage.pages.arrays import Ints

NULL_BLOCK = 0
"""Stands where a block was given back. Kernels may read it and never see what is in it."""
_LEAST_CAPACITY = 16


class BlockTable:
    """Blocks from `start` to before `end` are held; before `start` stands the null block."""

    def __init__(self) -> None:
        self._array: Ints = np.zeros(_LEAST_CAPACITY, np.int32)
        self.start = self.end = 0

    @property
    def ids(self) -> Ints:
        """All entries. A read-only view, right until the sequence changes: it is not copied when blocks are added."""
        view = self._array[: self.end]
        view.flags.writeable = False
        return view

    @property
    def held(self) -> Ints:
        """What is held, first block first; a copy."""
        return self._array[self.start : self.end].copy()

    @property
    def num_held(self) -> int:
        return self.end - self.start

    def last(self) -> int:
        return int(self._array[self.end - 1])

    def append(self, ids: Ints | Sequence[int]) -> None:
        end = self.end + len(ids)
        if end > len(self._array):
            larger = np.zeros(max(end, 2 * len(self._array)), np.int32)
            larger[: self.end] = self._array[: self.end]
            self._array = larger
        self._array[self.end : end] = ids
        self.end = end

    def skip_to(self, start: int) -> None:
        """Begin at block `start`: of the ones before, which an empty table never had, nothing is held."""
        self.append(np.zeros(start - self.end, np.int32))
        self.start = start

    def replace_last(self, block: int) -> None:
        self._array[self.end - 1] = block

    def cut_before(self, start: int) -> Ints:
        """Blocks before `start` are not needed any more: the null block takes their place. Returns what was held."""
        start = max(self.start, min(start, self.end))
        gone = self._array[self.start : start].copy()
        self._array[self.start : start] = NULL_BLOCK
        self.start = start
        return gone

    def cut_from(self, end: int) -> Ints:
        """Blocks from `end` on are gone. Returns what was held of them, first block first."""
        end = min(self.end, max(end, self.start))
        gone = self._array[end : self.end].copy()
        self.end = end
        return gone

    def copy(self) -> Self:
        twin = type(self)()
        twin._array = self._array.copy()
        twin.start, twin.end = self.start, self.end
        return twin
