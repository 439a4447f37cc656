"""A group that cuts its slabs into several blocks: which slab the next block comes from.

From the fullest slab in use that has room, so that others empty and go back; then from the fullest idle slab of its
own; a new slab only when none has room; then from what was used longest ago, a block of its own or an idle slab of any
group.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvpage.errors import InternalError
from kvpage.pages.arrays import Ints, Stamps
from kvpage.pages.cut_slabs import CutSlabs
from kvpage.pages.geometry import Places

_FEW = 100  # so many are counted sooner by Python than by NumPy


class CutGroup(CutSlabs):
    """The scalar ways (`…_one`) do what is frequent, or say that they did not: then the pool does a batch of one."""

    # --- one block ----------------------------------------------------------------------------------------------------

    def take_one(self) -> int | None:
        """A block without content, when a slab in use has one, or a free slab comes next."""
        heap, slabs = self.roomy, self._num_slabs
        while heap:
            num_free, slab = divmod(heap[0], slabs)
            used = self._used_at[slab]
            if not used or self.blocks_per_slab - used - self._cached_at[slab] != num_free:
                heapq.heappop(heap)
                continue
            index = (self.room.get(slab) or self._find_room(slab)).pop()
            if num_free > 1:
                heap[0] -= slabs  # one less: still the fullest
            else:
                heapq.heappop(heap)
                del self.room[slab]
            self._used_at[slab] = used + 1
            self._arrays.refs_at[slab * self._per_slab + index] = 1
            self.used += 1
            return slab * self.blocks_per_slab + index
        if self.roomy_idle:
            return None
        free_slab = self._ledger.free.pop_one()
        return self._evict_one() if free_slab is None else self._open_free_slab(free_slab)

    def _open_free_slab(self, slab: int) -> int:
        if self._arrays.owners_at[slab] != self.owner:
            self._ledger.adopt_one(slab, self.owner)
        self.room[slab] = list(range(self.blocks_per_slab - 1, 0, -1))
        self._change_one(slab, 1, 0)
        self._arrays.refs_at[slab * self._per_slab] = 1
        return slab * self.blocks_per_slab

    def _evict_one(self) -> int | None:
        """Of its own, if no slab has been idle for longer."""
        arrays, ledger, slot = self._arrays, self._ledger, self._oldest_one()
        idle = ledger.oldest_idle()
        if slot is None or (idle is not None and ledger.idle_since_at[idle] < arrays.stamps_at[slot]):
            return None
        slab, index = divmod(slot, self._per_slab)
        block = slab * self.blocks_per_slab + index
        if self._on_evict:
            self._on_evict(self.group, np.array([block], np.int32))
        self.oldest.skip()
        arrays.stamps_at[slot] = 0
        self._change_one(slab, 1, -1)
        arrays.refs_at[slot] = 1
        return block

    def _oldest_one(self) -> int | None:
        queue, arrays = self.oldest, self._arrays
        while queue.head < queue.tail:
            slot = queue.ids_at[queue.head]
            if arrays.stamps_at[slot] == queue.stamps_at[queue.head] and not arrays.refs_at[slot]:
                return slot
            queue.head += 1
        return None

    def free_one(self, block: int) -> bool:
        """Whether it was free to do so: the block is held once, as almost all are. Changes nothing otherwise."""
        if type(block) is not int or not self.blocks_per_slab <= block < self._num_slabs * self.blocks_per_slab:
            return False
        slab, index = divmod(block, self.blocks_per_slab)
        arrays, slot = self._arrays, slab * self._per_slab + index
        if not self._used_at[slab] or arrays.refs_at[slot] != 1:
            return False
        if arrays.has_content and arrays.stamps_at[slot]:
            stamp = arrays.stamps_at[slot] = self._ledger.next_stamp()
            arrays.refs_at[slot] = 0
            self.oldest.append_one(slot, stamp)
            self._change_one(slab, -1, 1)
        else:
            arrays.refs_at[slot] = 0
            if slab in self.room:
                self.room[slab].append(index)
            self._change_one(slab, -1, 0)
        return True

    def commit_one(self, block: int) -> bool:
        """Whether it was free to do so: the block is held. Changes nothing otherwise."""
        if type(block) is not int or not 0 < block < self._num_slabs * self.blocks_per_slab:
            return False
        slab, index = divmod(block, self.blocks_per_slab)
        slot = slab * self._per_slab + index
        if not self._used_at[slab] or not self._arrays.refs_at[slot]:
            return False
        if not self._arrays.stamps_at[slot]:
            self._arrays.stamps_at[slot] = self._ledger.next_stamp()
        return True

    # --- many ---------------------------------------------------------------------------------------------------------

    def take(self, count: int, new_slabs: int) -> Ints:
        """Hand out `count` blocks, with at most `new_slabs` slabs that were not in use; which suffice."""
        most_in_use = self.in_use + new_slabs
        parts: list[Ints] = []
        left = count
        while left:
            new_slabs = most_in_use - self.in_use
            ids = self._from_slabs_in_use(left) or self._from_idle_slab(left, new_slabs)
            part = np.array(ids, np.int32) if ids else self._from_free_slabs(left, new_slabs)
            if len(part):
                self._hand_out(part.astype(np.intp))
                self.used += len(part)
                parts.append(part)
                left -= len(part)
            elif not self._evict(left, new_slabs):
                raise InternalError(f"group {self.group} could not have {left} of {count} blocks that were counted")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _from_slabs_in_use(self, wanted: int) -> list[int]:
        taken: list[int] = []
        while self.roomy and len(taken) < wanted:
            num_free, slab = divmod(heapq.heappop(self.roomy), self._num_slabs)
            if self._used_at[slab] and self._num_free_of(slab) == num_free:
                taken += self._from_slab(slab, wanted - len(taken))
        return taken

    def _from_idle_slab(self, wanted: int, new_slabs: int) -> list[int]:
        while self.roomy_idle and new_slabs:
            num_free, slab = divmod(heapq.heappop(self.roomy_idle), self._num_slabs)
            is_idle = self._cached_at[slab] and not self._used_at[slab]
            if is_idle and self._num_free_of(slab) == num_free:
                self._ledger.wake(np.array([slab]))
                self.in_use, self.num_idle = self.in_use + 1, self.num_idle - 1
                return self._from_slab(slab, wanted)
        return []

    def _from_slab(self, slab: int, wanted: int) -> list[int]:
        room = self.room.get(slab) or self._find_room(slab)
        indices = room[-wanted:][::-1]
        del room[-wanted:]
        self._used_at[slab] += len(indices)
        if room:
            self._push(slab)
        else:
            del self.room[slab]
        first = slab * self.blocks_per_slab
        return [first + index for index in indices]

    def _from_free_slabs(self, wanted: int, new_slabs: int) -> Ints:
        cut = self.blocks_per_slab
        number = min(-(-wanted // cut), new_slabs, self._ledger.free.count)
        slabs = self._ledger.free.pop(number).astype(np.intp)
        ids = (slabs[:, None] * cut + np.arange(cut)).ravel()[:wanted].astype(np.int32)
        if number:
            self._ledger.adopt(slabs, self.owner)
            self.used_by_slab[slabs] = cut
            self.in_use += number
            last = int(slabs[-1])
            self._used_at[last] = len(ids) - (number - 1) * cut
            self._push(last)
        return ids

    def _hand_out(self, ids: Places) -> None:
        slots = self._arrays.geometry.slots_of(self.group, ids)
        self._arrays.log_refs(slots, 0)
        self._arrays.refs[slots] = 1

    def take_these(self, ids: Places) -> None:
        """Hand out these blocks, no block twice, none of them held; content of theirs goes.

        Their slabs are the group's or free: what was idle of others has been evicted.
        """
        slots = self._arrays.geometry.slots_of(self.group, ids)
        if self._arrays.has_content:
            self._evict_own(slots[self._arrays.stamps[slots] > 0])
        slabs = np.unique(ids // self.blocks_per_slab)
        new = slabs[self.used_by_slab[slabs] + self.cached_by_slab[slabs] == 0]
        self._ledger.free.remove(new)
        self._ledger.adopt(new, self.owner)
        self._change(slots, 1, 0)
        self._hand_out(ids)
        for slab in slabs.tolist():
            self.room.pop(slab, None)

    # --- eviction -----------------------------------------------------------------------------------------------------

    def _evict(self, wanted: int, new_slabs: int) -> int:
        """Free some blocks of this group, or slabs: what was used longest ago. How many."""
        ledger = self._ledger
        own = self.oldest.oldest()
        idle = ledger.idle.oldest() if new_slabs else None  # else all idle slabs are left to other groups
        if own is not None and (idle is None or own < idle):
            # When others need slabs too, blocks of several idle slabs may wake one slab too many: then one by one.
            number = wanted if new_slabs >= ledger.num_available else 1
            return self._evict_own(self.oldest.pop(number, idle))
        return ledger.evict_oldest(min(new_slabs, -(-wanted // self.blocks_per_slab)), own)

    def _evict_own(self, slots: Places) -> int:
        if len(slots):
            if self._on_evict:
                self._on_evict(self.group, self._arrays.geometry.ids_at(self.group, slots))
            self._drop(slots)
            self.forget(slots)
        return len(slots)

    def evict_slabs(self, slabs: Places) -> None:
        """The content of these idle slabs goes; the ledger frees them."""
        slots = self.cached_slots(slabs)
        if self._on_evict:
            self._on_evict(self.group, self._arrays.geometry.ids_at(self.group, slots))
        self._drop(slots)
        self.cached_by_slab[slabs] = 0
        self.cached -= len(slots)
        self.num_idle -= len(slabs)
        for slab in slabs.tolist():
            self.room.pop(slab, None)

    def _drop(self, slots: Places) -> None:
        if self.clears_on_reuse:
            self._arrays.stale[slots] = 1
        self._arrays.stamps[slots] = 0

    # --- what becomes of blocks ---------------------------------------------------------------------------------------

    def rest(self, slots: Places, stamps: Stamps) -> None:
        """These blocks are not held any more and keep content."""
        self.oldest.append(slots, stamps)
        self._change(slots, -1, 1)

    def wake(self, slots: Places) -> None:
        """These blocks kept content, and are held again."""
        self._change(slots, 1, -1)

    def release(self, slots: Places) -> None:
        """These blocks are not held any more and keep nothing."""
        self._add_room(slots)
        self._change(slots, -1, 0)

    def forget(self, slots: Places) -> None:
        """These blocks were not held and kept content, and keep nothing now."""
        self._add_room(slots)
        self._change(slots, 0, -1)

    def _change_one(self, slab: int, used: int, cached: int) -> None:
        """The slab has so many more used and cached blocks; what follows from it."""
        ledger, was_used = self._ledger, self._used_at[slab]
        is_used, has_content = was_used + used, self._cached_at[slab] + cached
        self._used_at[slab], self._cached_at[slab] = is_used, has_content
        self.used += used
        self.cached += cached
        if is_used and was_used:
            if used + cached:
                self._push(slab)
            return
        self.in_use += (is_used > 0) - (was_used > 0)
        if ledger.idle_since_at[slab] and (is_used or not has_content):
            self.num_idle -= 1
            ledger.wake_one(slab)
        elif has_content and was_used:
            self.num_idle += 1
            ledger.rest_one(slab, ledger.next_stamp())
        if is_used or has_content:
            self._push(slab)
        else:
            self.room.pop(slab, None)
            ledger.free.push_one(slab)

    def _change(self, slots: Places, used: int, cached: int) -> None:
        """So many more used and cached blocks for each of these slots."""
        for slab, count in _counted(slots // self._per_slab):
            self._change_one(slab, used * count, cached * count)


def _counted(slabs: Places) -> Iterable[tuple[int, int]]:
    """Each once, in the order of first places, and how often it stands there."""
    if len(slabs) <= _FEW:
        return Counter(slabs.tolist()).items()
    found, first, counts = np.unique(slabs, return_index=True, return_counts=True)
    order = np.argsort(first)
    return zip(found[order].tolist(), counts[order].tolist(), strict=True)
