"""Blocks of one kind of group in slabs: fullest slab first, an empty slab goes back at once.

Of equally full slabs the one is taken from that has been as full as it is the longest.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Run(NamedTuple):
    """Blocks that lie in one slab, and belong one after the other to one request."""

    slab: int
    blocks: int


class Slabs:
    """The slabs that a group owns. Slabs are named by numbers of its own: which slab of the pool it is does not matter.

    Counts only: with one block per slab no slab is told from another.
    """

    def __init__(self, blocks_per_slab: int) -> None:
        self._blocks_per_slab = blocks_per_slab
        self._used: dict[int, int] = {}  # slab -> blocks of it in use, when slabs hold more than one block
        self._by_free: list[dict[int, None]] = [{} for _ in range(blocks_per_slab + 1)]
        self._with_room = 0  # bit f is set when _by_free[f] has a slab, 0 < f < blocks_per_slab
        self._names = 0
        self.used_blocks = 0
        self.owned_slabs = 0

    @property
    def free_blocks(self) -> int:
        """Blocks of owned slabs that nobody uses."""
        return self.owned_slabs * self._blocks_per_slab - self.used_blocks

    def slabs_needed(self, blocks: int) -> int:
        """New slabs it would take to hand out `blocks` blocks."""
        return max(0, -(-(blocks - self.free_blocks) // self._blocks_per_slab))

    def take(self, blocks: int, into: deque[Run]) -> int:
        """Hand out `blocks` blocks, appended to `into`. Returns the new slabs that it took."""
        before = self.owned_slabs
        self.used_blocks += blocks
        if self._blocks_per_slab == 1:
            self.owned_slabs += blocks
            append_run(into, 0, blocks)
            return blocks
        while blocks:
            slab, free = self._fullest_with_room()
            taken = min(free, blocks)
            self._move(slab, free, free - taken)
            append_run(into, slab, taken)
            blocks -= taken
        return self.owned_slabs - before

    def give_back(self, blocks: int, oldest_first: deque[Run]) -> int:
        """Take back the first `blocks` blocks of `oldest_first`. Returns the slabs that became empty and are freed."""
        before = self.owned_slabs
        self.used_blocks -= blocks
        if self._blocks_per_slab == 1:
            self.owned_slabs -= blocks
        while blocks:
            slab, run = oldest_first[0]
            given = min(run, blocks)
            if given == run:
                oldest_first.popleft()
            else:
                oldest_first[0] = Run(slab, run - given)
            if self._blocks_per_slab > 1:
                free = self._blocks_per_slab - self._used[slab]
                self._move(slab, free, free + given)
            blocks -= given
        return before - self.owned_slabs

    def _fullest_with_room(self) -> tuple[int, int]:
        if self._with_room:
            free = (self._with_room & -self._with_room).bit_length() - 1
            return next(iter(self._by_free[free])), free
        self._names += 1
        self.owned_slabs += 1
        self._used[self._names] = 0
        return self._names, self._blocks_per_slab

    def _move(self, slab: int, free: int, free_after: int) -> None:
        """File `slab` under the number of its free blocks; forget it when it is empty."""
        if 0 < free < self._blocks_per_slab:
            filed = self._by_free[free]
            del filed[slab]
            if not filed:
                self._with_room ^= 1 << free
        if free_after == self._blocks_per_slab:
            del self._used[slab]
            self.owned_slabs -= 1
            return
        self._used[slab] = self._blocks_per_slab - free_after
        if free_after:
            self._by_free[free_after][slab] = None
            self._with_room |= 1 << free_after


def append_run(runs: deque[Run], slab: int, blocks: int) -> None:
    """Blocks that follow those in `runs`."""
    if runs and runs[-1].slab == slab:
        runs[-1] = Run(slab, runs[-1].blocks + blocks)
    else:
        runs.append(Run(slab, blocks))
