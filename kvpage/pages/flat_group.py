"""A group with one block to a slab, as in vLLM: its free blocks are the free slabs, its cached blocks the idle ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpage.pages.arrays import Ints, Stamps
from kvpage.pages.census import Census
from kvpage.pages.geometry import Places
from kvpage.pages.ledger import SlabLedger

OnEvict = Callable[[int, Ints], object] | None
"""Called, if given, with a group and ids of its blocks before their content goes."""


class FlatGroup:
    """Block id = slab. Slots are those of the pool's arrays, which others may cut finer."""

    blocks_per_slab = 1
    clears_on_reuse = False
    """Whether a block is stale once it was somebody's."""
    num_free = 0
    """Blocks of its slabs that are neither held nor keep content: a slab without either is nobody's."""
    num_open = 0
    """Blocks it could have without another slab."""

    def __init__(self, group: int, ledger: SlabLedger, census: Census, on_evict: OnEvict) -> None:
        self.group, self.owner = group, group + 1
        self._ledger, self._arrays, self._on_evict = ledger, ledger.arrays, on_evict
        self._per_slab = ledger.arrays.geometry.slots_per_slab
        mine = census.owners == self.owner
        self.used = int(np.count_nonzero(census.used[mine]))
        self.cached = int(np.count_nonzero(mine)) - self.used
        step = self._per_slab
        self._refs_at, self._stamps_at = self._arrays.refs_at[::step], self._arrays.stamps_at[::step]
        self._refs, self._stamps = self._arrays.refs[::step], self._arrays.stamps[::step]

    @property
    def num_slabs(self) -> int:
        return self.used + self.cached

    def take_one(self) -> int | None:
        """A block, when one is free, or what was used longest ago is one of its own."""
        free = self._ledger.free
        count = free.count - 1
        if count < 0:
            return self._evict_one() if self.cached else None
        free.count = count
        slab = free.at[count]
        if self._arrays.owners_at[slab] != self.owner:
            self._ledger.adopt_one(slab, self.owner)
        self._refs_at[slab] = 1
        self.used += 1
        return slab

    def _evict_one(self) -> int | None:
        ledger = self._ledger
        slab = ledger.oldest_idle()
        if slab is None or self._arrays.owners_at[slab] != self.owner:
            return None
        if self._on_evict:
            self._on_evict(self.group, np.array([slab], np.int32))
        ledger.idle.skip()
        ledger.wake_one(slab)
        self._stamps_at[slab] = 0
        self.cached -= 1
        self._refs_at[slab] = 1
        self.used += 1
        return slab

    def free_one(self, block: int) -> bool:
        """Whether it was free to do so: the block is held once, as almost all are. Changes nothing otherwise."""
        if type(block) is not int or not 0 < block < len(self._refs_at):
            return False
        ledger, arrays = self._ledger, self._arrays
        if self._refs_at[block] != 1 or arrays.owners_at[block] != self.owner:
            return False
        if arrays.has_content and self._stamps_at[block]:
            stamp = self._stamps_at[block] = ledger.next_stamp()
            self._refs_at[block] = 0
            self.cached += 1
            ledger.rest_one(block, stamp)
        else:
            self._refs_at[block] = 0
            free = ledger.free
            free.at[free.count] = block
            free.count += 1
        self.used -= 1
        return True

    def commit_one(self, block: int) -> bool:
        """Whether it was free to do so: the block is held. Changes nothing otherwise."""
        if type(block) is not int or not 0 < block < len(self._refs_at):
            return False
        if not self._refs_at[block] or self._arrays.owners_at[block] != self.owner:
            return False
        if not self._stamps_at[block]:
            self._stamps_at[block] = self._ledger.next_stamp()
        return True

    def take(self, count: int, new_slabs: int) -> Ints:
        """Hand out `count` blocks; the caller knows that so many slabs, at most `new_slabs`, can be had."""
        ledger = self._ledger
        if count > ledger.free.count:
            ledger.evict_oldest(count - ledger.free.count)
        ids = ledger.free.pop(count)
        self._hand_out(ids.astype(np.intp))
        return ids

    def take_these(self, ids: Places) -> None:
        """Hand out these blocks, no block twice, none of them held; content of theirs goes."""
        idle = ids[self._ledger.idle_since[ids] > 0]
        if len(idle):
            self._ledger.evict(idle)
        self._ledger.free.remove(ids)
        self._hand_out(ids)

    def _hand_out(self, ids: Places) -> None:
        self._ledger.adopt(ids, self.owner)
        self._arrays.log_refs(ids * self._per_slab if self._per_slab > 1 else ids, 0)
        self._refs[ids] = 1
        self.used += len(ids)

    def rest(self, slots: Places, stamps: Stamps) -> None:
        """These blocks are not held any more and keep content."""
        self._ledger.rest(slots // self._per_slab, stamps)
        self.used -= len(slots)
        self.cached += len(slots)

    def wake(self, slots: Places) -> None:
        """These blocks kept content, and are held again."""
        self._ledger.wake(slots // self._per_slab)
        self.cached -= len(slots)
        self.used += len(slots)

    def release(self, slots: Places) -> None:
        """These blocks are not held any more and keep nothing."""
        self._ledger.free.push(slots // self._per_slab if self._per_slab > 1 else slots)
        self.used -= len(slots)

    def forget(self, slots: Places) -> None:
        """These blocks were not held and kept content, and keep nothing now."""
        slabs = slots // self._per_slab
        self._ledger.wake(slabs)
        self._ledger.free.push(slabs)
        self.cached -= len(slots)

    def evict_slabs(self, slabs: Places) -> None:
        if self._on_evict:
            self._on_evict(self.group, slabs.astype(np.int32))
        if self.clears_on_reuse:
            self._arrays.stale[slabs * self._per_slab] = 1
        self._stamps[slabs] = 0
        self.cached -= len(slabs)
