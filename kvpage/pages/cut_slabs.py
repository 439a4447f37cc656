"""What a group that cuts its slabs keeps of each: how many blocks are used and cached, and where there is room."""

from __future__ import annotations

import heapq

import numpy as np

from kvpage.errors import InternalError
from kvpage.pages.arrays import Ints, Stamps
from kvpage.pages.census import Census
from kvpage.pages.flat_group import OnEvict
from kvpage.pages.geometry import Places
from kvpage.pages.ledger import SlabLedger
from kvpage.pages.rings import AgeQueue, Flags

_SPARE_KEYS = 64  # outdated keys that a heap may always have


class CutSlabs:
    """Keys of the heaps are (free blocks of the slab) × (number of slabs) + slab; keys that no longer hold stay behind.

    `room` keeps the free indices of slabs that blocks were taken from; those of others are found when they are needed.
    """

    clears_on_reuse = False
    """Whether a block is stale once it was somebody's."""

    def __init__(self, group: int, ledger: SlabLedger, census: Census, on_evict: OnEvict) -> None:
        geometry = ledger.arrays.geometry
        self.group, self.owner = group, group + 1
        self.blocks_per_slab = geometry.blocks_per_slab[group]
        self._num_slabs, self._per_slab = geometry.num_slabs, geometry.slots_per_slab
        self._ledger, self._arrays, self._on_evict = ledger, ledger.arrays, on_evict
        mine = census.owners == self.owner
        self.used_by_slab: Ints = np.where(mine, census.used, 0)
        self.cached_by_slab: Ints = np.where(mine, census.cached, 0)
        self._used_at = memoryview(self.used_by_slab)  # type: ignore[arg-type] # no buffer protocol in NumPy's stubs
        self._cached_at = memoryview(self.cached_by_slab)  # type: ignore[arg-type]
        self.used, self.cached = int(self.used_by_slab.sum()), int(self.cached_by_slab.sum())
        self.in_use = int(np.count_nonzero(self.used_by_slab))
        """Slabs of which some block is held."""
        self.num_idle = int(np.count_nonzero(mine)) - self.in_use
        self.room: dict[int, list[int]] = {}
        self.roomy: list[int] = []  # heap of slabs in use
        self.roomy_idle: list[int] = []  # heap of idle slabs
        self._fill_heaps(np.flatnonzero(mine))
        self.oldest = AgeQueue(self._keeps_content)
        """Slots with content that nobody holds."""
        if self.cached:
            slots = self.cached_slots(np.flatnonzero(self.cached_by_slab))
            self.oldest.fill(slots, self._arrays.stamps[slots])

    # --- counts -------------------------------------------------------------------------------------------------------

    @property
    def num_slabs(self) -> int:
        return self.in_use + self.num_idle

    @property
    def num_free(self) -> int:
        """Blocks of its slabs that are neither held nor keep content."""
        return self.num_slabs * self.blocks_per_slab - self.used - self.cached

    @property
    def num_open(self) -> int:
        """Blocks it could have without another slab: what is not held of its slabs in use."""
        return self.in_use * self.blocks_per_slab - self.used

    def _num_free_of(self, slab: int) -> int:
        return self.blocks_per_slab - self._used_at[slab] - self._cached_at[slab]

    # --- which slab has room ------------------------------------------------------------------------------------------

    def _push(self, slab: int) -> None:
        """Note that the slab has room, if it has. Keys that no longer hold are cleared out when they are many."""
        num_free = self._num_free_of(slab)
        if not num_free:
            return
        heap = self.roomy if self._used_at[slab] else self.roomy_idle
        heapq.heappush(heap, num_free * self._num_slabs + slab)
        if len(heap) > 2 * self.num_slabs + _SPARE_KEYS:
            self._fill_heaps(np.flatnonzero(self.used_by_slab + self.cached_by_slab))

    def _fill_heaps(self, slabs: Places) -> None:
        used = self.used_by_slab[slabs]
        num_free = self.blocks_per_slab - used - self.cached_by_slab[slabs]
        keys = num_free.astype(np.int64) * self._num_slabs + slabs
        self.roomy[:] = np.sort(keys[(num_free > 0) & (used > 0)]).tolist()  # sorted is a heap
        self.roomy_idle[:] = np.sort(keys[(num_free > 0) & (used == 0)]).tolist()

    def _find_room(self, slab: int) -> list[int]:
        start = slab * self._per_slab
        is_free = self._arrays.refs[start : start + self.blocks_per_slab] == 0
        if self._arrays.has_content:
            is_free &= self._arrays.stamps[start : start + self.blocks_per_slab] == 0
        found: list[int] = np.flatnonzero(is_free)[::-1].tolist()
        if not found:
            raise InternalError(f"slab {slab} of group {self.group} has no free block where one was counted")
        self.room[slab] = found
        return found

    def _add_room(self, slots: Places) -> None:
        if self.room:
            for slot in slots.tolist():
                slab, index = divmod(slot, self._per_slab)
                if slab in self.room:
                    self.room[slab].append(index)

    def cached_slots(self, slabs: Places) -> Places:
        slots: Places = (slabs[:, None] * self._per_slab + np.arange(self.blocks_per_slab)).ravel()
        cached: Flags = (self._arrays.stamps[slots] > 0) & (self._arrays.refs[slots] == 0)
        return slots[cached]

    def _keeps_content(self, slots: Ints, stamps: Stamps) -> Flags:
        cached: Flags = (self._arrays.stamps.take(slots) == stamps) & (self._arrays.refs.take(slots) == 0)
        return cached
