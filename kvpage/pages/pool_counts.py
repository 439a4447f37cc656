"""What is in a pool: how many blocks of each group, which slabs, how often a block is held."""

from __future__ import annotations

import numpy as np

from kvpage.pages import conservation
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids, block_ids
from kvpage.pages.block_map import BlockMap, map_blocks
from kvpage.pages.census import take_census
from kvpage.pages.counts import BlockCounts, SlabCounts, SlabTable
from kvpage.pages.geometry import Places
from kvpage.pages.pool_state import Group, PoolState
from kvpage.pages.rings import Flags


class PoolCounts(PoolState):
    """Changes nothing."""

    def available(self, group: int) -> int:
        """Blocks that the group could have now if it alone took some, cached ones counted. Raises `SpecInvalid`."""
        held = self._group(group)
        return held.num_open + self._ledger.num_available * held.blocks_per_slab

    def counts(self, group: int) -> BlockCounts:
        held = self._group(group)
        return BlockCounts(used=held.used, cached=held.cached, free=held.num_free, slabs=held.num_slabs)

    def slab_counts(self) -> SlabCounts:
        self._group(0)
        owned = sum(held.num_slabs for held in self._groups.values())
        return SlabCounts(owned=owned, idle=self._ledger.num_idle, free=self._ledger.free.count)

    def slabs(self, group: int) -> SlabTable:
        """The slabs that the group owns, and what is in each. Looks at every block."""
        owner = self._group(group).owner
        census = take_census(self._arrays)
        slabs = np.flatnonzero(census.owners == owner)
        return SlabTable(slabs.astype(np.int32), census.used[slabs], census.cached[slabs])

    def map(self, max_cells: int) -> BlockMap:
        """All blocks, drawn together to so many cells at most. Looks at every block."""
        self._group(0)
        return map_blocks(self._arrays, max_cells)

    def times_held(self, group: int, ids: Ids) -> Ints:
        """How often each of these blocks is held. Raises `SpecInvalid` for what is no block id of the group."""
        held = self._group(group)
        blocks = block_ids(ids, self.geometry.num_blocks(group))
        refs = self._arrays.refs.take(self.geometry.slots_of(group, blocks))
        return np.where(self._foreign(held, blocks), np.int32(0), refs)

    def is_held(self, group: int, block: int) -> bool:
        """Whether somebody holds this block of the group; also False for what is none."""
        held = self._group(group)
        if type(block) is not int or not held.blocks_per_slab <= block < self.geometry.num_blocks(group):
            return False
        slab, index = divmod(block, held.blocks_per_slab)
        slot = slab * self.geometry.slots_per_slab + index
        return self._arrays.refs_at[slot] > 0 and self._arrays.owners_at[slab] == held.owner

    def with_content(self, group: int) -> Ints:
        """Blocks of the group that keep content, held or cached, ascending. Looks at every block."""
        owner = self._group(group).owner
        if not self._arrays.has_content:
            return np.empty(0, np.int32)
        slots = np.flatnonzero(self._arrays.stamps)
        mine = self._arrays.owners.take(slots // self.geometry.slots_per_slab) == owner
        return self.geometry.ids_at(group, slots[mine])

    def check(self) -> None:
        """Prove that nothing is lost or in two places. Raises `InternalError` naming what does not hold."""
        self._group(0)
        conservation.check(self._arrays, self._ledger, tuple(self._groups.values()))

    def __repr__(self) -> str:
        if self._is_closed:
            return "<BlockPool, closed>"
        free = self.slab_counts().free
        each = ", ".join(f"{group}: {held.used} used {held.cached} cached" for group, held in self._groups.items())
        return f"<BlockPool of {self.geometry.num_slabs} slabs, {free} free; {each}>"

    def _foreign(self, held: Group, blocks: Places) -> Flags:
        """Which blocks lie in slabs of others."""
        slabs = blocks if held.blocks_per_slab == 1 else blocks // held.blocks_per_slab
        foreign: Flags = self._arrays.owners.take(slabs) != held.owner
        return foreign

    def _content_of(self, slots: Places) -> Flags:
        """Which of the slots keep content."""
        if not self._arrays.has_content:
            return np.zeros(len(slots), np.bool_)
        content: Flags = self._arrays.stamps.take(slots) > 0
        return content
