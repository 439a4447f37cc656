"""Blocks of a pool, handed out and taken back: ids only, no bytes (docs/allocator.md).

    pool = BlockPool.of(plan)
    tables = pool.allocate_all({0: 12, 1: 3})     # all of them, or `OutOfBlocks` and nothing
    pool.free(0, tables[0])

One thread at a time. A block is *held* as often as it was handed out and retained less freed. A block that was
committed keeps *content*: when nobody holds it any more it stays cached, until it is retained again, or evicted because
nothing else is free. Every operation is done or refused as a whole. If its process is killed at any instruction, the
next `BlockPool` on the same buffer finds it done or not begun (content that was evicted for it may be gone).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages import runs
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids, block_ids, distinct, repeated, whole_number
from kvpage.pages.geometry import Places
from kvpage.pages.pool_counts import PoolCounts
from kvpage.pages.pool_state import Group
from kvpage.pages.shortage import out_of_blocks, out_of_run, out_of_slabs, why_not

_MOST_HELD = 2**31 - 1
_NO_IDS = np.empty(0, np.int32)


class HeldBatch(NamedTuple):
    slots: Places
    refs: Ints
    """How often each is held."""


class BlockPool(PoolCounts):
    """See the module; counts are `PoolCounts`', opening and closing `PoolState`'s."""

    # --- taking -------------------------------------------------------------------------------------------------------

    def allocate_one(self, group: int) -> int:
        """One block id. Raises `SpecInvalid` for an unknown group, `OutOfBlocks`."""
        try:
            held = self._groups[group]
        except (KeyError, TypeError):
            held = self._group(group)
        try:
            block = held.take_one()
        except BaseException:
            self._recover()
            raise
        return int(self.allocate(group, 1)[0]) if block is None else block

    def allocate(self, group: int, count: int) -> Ints:
        """`count` block ids. Raises `SpecInvalid` for an unknown group or a negative count, `OutOfBlocks`."""
        held = self._group(group)
        number = whole_number(count, "the number of blocks")
        if number > self.available(group):
            raise out_of_blocks(held, self._ledger, number)
        with self._whole:
            ids = held.take(number, self._ledger.num_available) if number else np.empty(0, np.int32)
            self._arrays.end()
        return ids

    def allocate_all(self, counts: Mapping[int, int]) -> dict[int, Ints]:
        """For every group its number of block ids, or nothing. Raises as `allocate`."""
        wanted = {
            group: whole_number(count, f"the number of blocks of group {group}") for group, count in counts.items()
        }
        held = {group: self._group(group) for group in wanted}
        needed = {group: slabs_needed(held[group], count) for group, count in wanted.items()}
        later = sum(needed.values())
        if later > self._ledger.num_available:
            raise out_of_slabs(held, self._ledger, wanted, needed)
        taken = {}
        with self._whole:
            for group, count in wanted.items():
                later -= needed[group]
                taken[group] = held[group].take(count, self._ledger.num_available - later) if count else _NO_IDS.copy()
            self._arrays.end()
        return taken

    def allocate_run(self, group: int, count: int) -> Ints:
        """`count` block ids that follow each other: the lowest run of free blocks, or else the lowest for which content
        must be evicted. Looks at every block. Raises as `allocate`; `OutOfBlocks` also where no run is as long.
        """
        held = self._group(group)
        number = whole_number(count, "the number of blocks")
        if number == 0:
            return _NO_IDS.copy()
        run = runs.find_run(self._arrays, group, number)
        if run.first is None:
            raise out_of_run(held, number, run.longest)
        with self._whole:
            ids = np.arange(run.first, run.first + number)
            slabs = np.unique(ids // held.blocks_per_slab)
            idle = slabs[self._ledger.idle_since[slabs] > 0]
            self._ledger.evict(idle[self._arrays.owners[idle] != held.owner])
            held.take_these(ids)
            self._arrays.end()
        return ids.astype(np.int32)

    def copy_on_write(self, group: int, block: int) -> int:
        """A block that its holder may write into: itself, if it is held once and keeps no content; else a new one, for
        which this holding is given up. Whoever calls copies the bytes, before anything else is allocated.

        Raises as `free`, and `OutOfBlocks`.
        """
        held = self._group(group)
        slots, before = self._held(held, [block])
        if before[0] == 1 and not self._content_of(slots)[0]:
            return int(block)
        if not self.available(group):
            raise out_of_blocks(held, self._ledger, 1)
        with self._whole:
            new = held.take(1, self._ledger.num_available)
            self._let_go(held, slots, before, 1)
        return int(new[0])

    # --- holding and giving back --------------------------------------------------------------------------------------

    def retain(self, group: int, ids: Ids) -> None:
        """Hold these blocks once more each time they stand in `ids`: blocks that somebody holds, or that are cached.

        Raises `SpecInvalid` for what is no block id of the group, `Conflict` for blocks that are neither.
        """
        held = self._group(group)
        slots, before, after = self._held_more(group, self._known(held, ids))
        with self._whole:
            self._hold(held, slots, before, after)

    def free_one(self, group: int, block: int) -> None:
        """As `free` of one."""
        try:
            held = self._groups[group]
        except (KeyError, TypeError):
            held = self._group(group)
        try:
            is_done = held.free_one(block)
        except BaseException:
            self._recover()
            raise
        if not is_done:
            self.free(group, [block])

    def free(self, group: int, ids: Ids) -> None:
        """Hold these blocks once less each time they stand in `ids`. Those that nobody holds then are cached where they
        keep content, the last of `ids` to be evicted first; the others are handed out next.

        Raises `SpecInvalid` for what is no block id of the group, and `Conflict` for blocks that are not held, or not
        as often as they stand in `ids`.
        """
        held = self._group(group)
        slots, before = self._held(held, ids)
        twice = repeated(slots, self._ledger.marks)
        times: Ints | int = 1
        if twice:
            slots, times = twice
            before = self._arrays.refs.take(slots)
            too_often = np.flatnonzero(before < times)
            if len(too_often):
                block = self.geometry.ids_at(group, slots[too_often[:1]])[0]
                held_now, wanted = before[too_often[0]], times[too_often[0]]
                raise Conflict(
                    f"block {block} of group {group} is held {held_now} times and would be freed {wanted} times"
                )
        with self._whole:
            self._let_go(held, slots, before, times)

    def take_back(self, group: int, ids: Ids) -> None:
        """Undo a `free` of `ids` that was the last operation: each is held once more each time it stands in them,
        whether others hold it, or it is cached, or free. Looks at every free slab.

        Raises `SpecInvalid` for what is no block id of the group, `Conflict` for blocks in slabs of others.
        """
        held = self._group(group)
        blocks = block_ids(ids, self.geometry.num_blocks(group))
        wrong = self._foreign(held, blocks)
        if np.count_nonzero(wrong):
            raise why_not(self._arrays, group, int(blocks[wrong][0]), "was not freed last")
        slots, before, after = self._held_more(group, self.geometry.slots_of(group, blocks))
        is_bare = (before == 0) & ~self._content_of(slots)
        with self._whole:
            if np.count_nonzero(is_bare):
                held.take_these(self.geometry.ids_at(group, slots[is_bare]).astype(np.intp))
                self._arrays.refs[slots[is_bare]] = after[is_bare]
            self._hold(held, slots[~is_bare], before[~is_bare], after[~is_bare])

    def _held_more(self, group: int, slots: Places) -> tuple[Places, Ints, Ints]:
        """Each slot once; how often it is held, and how often it will be. Raises `SpecInvalid` if that is too often."""
        twice = repeated(slots, self._ledger.marks)
        slots, times = twice or (slots, np.ones(len(slots), np.int32))
        before = self._arrays.refs.take(slots)
        if len(slots) and int(before.max()) + int(times.max()) > _MOST_HELD:
            raise SpecInvalid(f"a block of group {group} would be held more than {_MOST_HELD} times")
        return slots, before, before + times

    def _hold(self, held: Group, slots: Places, before: Ints, after: Ints) -> None:
        """These blocks, which are held or cached, no slot twice, are held `after` times from now on."""
        self._arrays.log_refs(slots, before)
        self._arrays.refs[slots] = after
        self._arrays.end()
        cached = slots[before == 0]
        if len(cached):
            held.wake(cached)

    def _let_go(self, held: Group, slots: Places, before: Ints, times: Ints | int) -> None:
        """`slots`, no slot twice, are held `before` times, and so many times less from now on."""
        arrays = self._arrays
        left = before - times
        ended = slots if not np.count_nonzero(left) else slots[left == 0]
        kept, bare = ended[:0], ended
        if arrays.has_content:
            content = self._content_of(ended)
            kept, bare = ended[content][::-1], ended[~content]
        if held.clears_on_reuse:
            arrays.stale[bare] = 1
        arrays.log_refs(slots, before)
        if len(kept):
            stamps = self._ledger.next_stamps(len(kept))
            arrays.stamps[kept] = stamps
        arrays.refs[slots] = left
        arrays.end()
        if len(kept):
            held.rest(kept, stamps)
        if len(bare):
            held.release(bare)

    def commit_one(self, group: int, block: int) -> None:
        """As `commit` of one."""
        if not (self._arrays.has_content and self._group(group).commit_one(block)):
            self.commit(group, [block])

    def commit(self, group: int, ids: Ids) -> None:
        """These blocks, which must be held, keep content from now on. Raises as `free`."""
        held = self._group(group)
        slots = self._held(held, ids).slots
        if not len(slots):
            return
        arrays = self._arrays
        if not arrays.has_content:
            arrays.keep_content()
        slots = distinct(slots[arrays.stamps.take(slots) == 0], self._ledger.marks)
        with self._whole:
            arrays.log_content(slots)
            arrays.stamps[slots] = self._ledger.next_stamps(1)
            arrays.end()

    def drop(self, group: int, ids: Ids) -> None:
        """The content of these blocks, held or cached, is worth nothing any more. Raises as `retain`."""
        held = self._group(group)
        slots = self._known(held, ids)
        slots = distinct(slots[self._content_of(slots)], self._ledger.marks)
        if not len(slots):
            return
        cached = slots[self._arrays.refs.take(slots) == 0]
        with self._whole:
            if held.clears_on_reuse:
                self._arrays.stale[cached] = 1
            self._arrays.log_content(slots)
            self._arrays.stamps[slots] = 0
            self._arrays.end()
            if len(cached):
                held.forget(cached)

    def _held(self, held: Group, ids: Ids) -> HeldBatch:
        blocks = block_ids(ids, self.geometry.num_blocks(held.group))
        slots = self.geometry.slots_of(held.group, blocks)
        refs = self._arrays.refs.take(slots)
        wrong = refs == 0
        if len(self._groups) > 1:
            wrong |= self._foreign(held, blocks)
        if np.count_nonzero(wrong):
            raise why_not(self._arrays, held.group, int(blocks[wrong][0]), "is not held")
        return HeldBatch(slots, refs)

    def _known(self, held: Group, ids: Ids) -> Places:
        blocks = block_ids(ids, self.geometry.num_blocks(held.group))
        slots = self.geometry.slots_of(held.group, blocks)
        wrong = ((self._arrays.refs.take(slots) == 0) & ~self._content_of(slots)) | self._foreign(held, blocks)
        if np.count_nonzero(wrong):
            raise why_not(self._arrays, held.group, int(blocks[wrong][0]), "is neither held nor cached")
        return slots

    # --- clearing -----------------------------------------------------------------------------------------------------

    def to_clear(self, group: int, ids: Ids) -> Ints:
        """Of these blocks, which were just handed out, those whose bytes may be somebody else's. They are taken for
        clean from here on: whoever is given them clears them before use. Raises as `free` where anything is cleared.
        """
        held = self._group(group)
        if not self._arrays.clearing:
            return _NO_IDS.copy()
        slots = self._held(held, ids).slots
        # What keeps content was written by its holder; that a kill came between two stores must not wipe it.
        slots = slots[(self._arrays.stale.take(slots) > 0) & ~self._content_of(slots)]
        slots = distinct(slots, self._ledger.marks)
        self._arrays.stale[slots] = 0
        return self.geometry.ids_at(group, slots)

    def mark_stale(self, group: int, ids: Ids) -> None:
        """The holder of these blocks died, perhaps before it cleared them; free them then. Raises as `to_clear`."""
        held = self._group(group)
        if self._arrays.clearing:
            self._arrays.stale[self._held(held, ids).slots] = 1


def slabs_needed(held: Group, count: int) -> int:
    """Slabs not in use that the group needs for `count` blocks."""
    return -(-max(0, count - held.num_open) // held.blocks_per_slab)
