"""Which slabs are free, which lie idle, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvpage.pages.arrays import Arrays, Stamps
from kvpage.pages.batches import Marks
from kvpage.pages.census import Census
from kvpage.pages.geometry import Places
from kvpage.pages.rings import AgeQueue, Stack


class Evictable(Protocol):
    """What the ledger needs of a group: to forget the content of whole idle slabs of its own."""

    def evict_slabs(self, slabs: Places) -> None: ...


class SlabLedger:
    """A slab is free (of nobody), in use (some block of it is held), or idle: nothing is held, and some block keeps
    content, so its group keeps the slab until somebody needs it.
    """

    def __init__(self, arrays: Arrays, census: Census) -> None:
        num_slabs = arrays.geometry.num_slabs
        self.arrays = arrays
        if len(arrays.geometry.blocks_per_slab) == 1:
            arrays.owners[1:] = 1
        self._clears = arrays.clearing.on_group_change
        self.groups: Sequence[Evictable] = ()
        """Set once, when they are made."""
        self.clock = int(arrays.stamps.max()) if arrays.has_content else 0
        """The last stamp given out."""
        self.idle_since: Stamps = np.zeros(num_slabs, np.int64)
        """The stamp at which the slab became idle; 0: it is not."""
        self.idle_since_at = memoryview(self.idle_since)  # type: ignore[arg-type] # no buffer protocol in NumPy's stubs
        self.idle = AgeQueue(lambda slabs, stamps: self.idle_since.take(slabs) == stamps)
        self.num_idle = 0
        self.free = Stack(1 + np.flatnonzero(census.owners[1:] == 0), num_slabs)
        self.marks: Marks = np.empty(arrays.geometry.num_slots, np.int16)
        """Scratch for finding what a batch names twice; untouched pages take no memory."""
        slabs = np.flatnonzero((census.used == 0) & (census.cached > 0))
        if len(slabs):
            self.num_idle = len(slabs)
            self.idle_since[slabs] = census.last_use[slabs]
            self.idle.fill(slabs, census.last_use[slabs])

    @property
    def num_available(self) -> int:
        """Slabs that a group could have: free ones, and idle ones whose content would go."""
        return self.free.count + self.num_idle

    def next_stamp(self) -> int:
        self.clock += 1
        return self.clock

    def next_stamps(self, count: int) -> Stamps:
        """Ascending, larger than all before."""
        self.clock += count
        return np.arange(self.clock - count + 1, self.clock + 1)

    def rest(self, slabs: Places, stamps: Stamps) -> None:
        """Nothing of these slabs is held any more, and they keep content; `stamps` ascend."""
        self.idle_since[slabs] = stamps
        self.num_idle += len(slabs)
        self.idle.append(slabs, stamps)

    def rest_one(self, slab: int, stamp: int) -> None:
        self.idle_since_at[slab] = stamp
        self.num_idle += 1
        self.idle.append_one(slab, stamp)

    def wake_one(self, slab: int) -> None:
        self.idle_since_at[slab] = 0
        self.num_idle -= 1

    def oldest_idle(self) -> int | None:
        """The slab that is idle for longest."""
        queue = self.idle
        while queue.head < queue.tail:
            slab = queue.ids_at[queue.head]
            if self.idle_since_at[slab] == queue.stamps_at[queue.head]:
                return slab
            queue.head += 1
        return None

    def wake(self, slabs: Places) -> None:
        """These slabs, no slab twice, are not idle any more."""
        self.num_idle -= len(slabs)
        self.idle_since[slabs] = 0

    def adopt(self, slabs: Places, owner: int) -> None:
        """These free slabs, no slab twice, belong to `owner` (1 + group) from now on."""
        if len(self.groups) == 1:
            return  # it has them all
        before = self.arrays.owners.take(slabs)
        changed = before != owner
        if np.count_nonzero(changed):
            if self._clears:
                self.arrays.soil_slabs(slabs[changed & (before > 0)])  # first: what is clean may be thought stale
            self.arrays.owners[slabs[changed]] = owner

    def adopt_one(self, slab: int, owner: int) -> None:
        if self._clears and self.arrays.owners_at[slab]:
            self.arrays.soil_slab(slab)
        self.arrays.owners_at[slab] = owner

    def evict_oldest(self, count: int, before: int | None = None) -> int:
        """Take the content of up to `count` idle slabs, those used longest ago (and before that stamp), and free them.

        How many there were.
        """
        slabs = self.idle.pop(count, before)
        self.evict(slabs)
        return len(slabs)

    def evict(self, slabs: Places) -> None:
        """Take the content of these idle slabs, no slab twice, whoever has them, and free them."""
        if not len(slabs):
            return
        if len(self.groups) == 1:
            self.groups[0].evict_slabs(slabs)
        else:
            owners = self.arrays.owners.take(slabs)
            for owner in np.unique(owners).tolist():
                self.groups[owner - 1].evict_slabs(slabs[owners == owner])
        self.wake(slabs)
        self.free.push(slabs)
