"""The proof that no block is lost or in two places: what is counted against what the arrays say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvpage.errors import InternalError
from kvpage.pages.arrays import Arrays
from kvpage.pages.census import Census, fault_of, take_census
from kvpage.pages.counts import BlockCounts
from kvpage.pages.cut_group import CutGroup
from kvpage.pages.flat_group import FlatGroup
from kvpage.pages.ledger import SlabLedger

Group = FlatGroup | CutGroup


def check(arrays: Arrays, ledger: SlabLedger, groups: Sequence[Group]) -> None:
    """Raises `InternalError` with the first thing that does not hold."""
    for fault in _faults(arrays, ledger, groups):
        raise InternalError(f"the blocks do not add up: {fault}", details={"fault": fault})


def _faults(arrays: Arrays, ledger: SlabLedger, groups: Sequence[Group]) -> Iterator[str]:
    if arrays.num_logged:
        yield f"an operation on {arrays.num_logged} blocks is under way"
    fault = fault_of(arrays)
    if fault:
        yield fault
    census = take_census(arrays)
    yield from _ledger_faults(ledger, census)
    for held in groups:
        yield from _count_faults(held, arrays, census)
        if isinstance(held, CutGroup):
            yield from _slab_faults(held, census)
            yield from _room_faults(held, arrays)
            yield from _queue_faults(held, arrays)
    owned = sum(held.num_slabs for held in groups)
    if owned + ledger.free.count + 1 != arrays.geometry.num_slabs:
        yield f"{owned} slabs owned + {ledger.free.count} free + 1 are not {arrays.geometry.num_slabs}"


def _ledger_faults(ledger: SlabLedger, census: Census) -> Iterator[str]:
    free = np.sort(ledger.free.array[: ledger.free.count])
    if not np.array_equal(free, 1 + np.flatnonzero(census.owners[1:] == 0)):
        yield "the free slabs are not those that hold nothing"
    is_idle = (census.used == 0) & (census.cached > 0)
    if ledger.num_idle != np.count_nonzero(is_idle) or not np.array_equal(ledger.idle_since > 0, is_idle):
        yield "the idle slabs are not those that hold cached blocks only"
    slabs, stamps = ledger.idle.entries()
    if not np.array_equal(np.sort(slabs), np.flatnonzero(is_idle)) or (np.diff(stamps) <= 0).any():
        yield "the queue of idle slabs does not hold each once, oldest first"
    if (ledger.idle_since[is_idle] < census.last_use[is_idle]).any() or census.last_use.max() > ledger.clock:
        yield "a slab lies idle since before its last use, or was used in the future"


def _count_faults(held: Group, arrays: Arrays, census: Census) -> Iterator[str]:
    slabs = np.flatnonzero(census.owners == held.owner)
    refs, stamps = (array.reshape(len(census.owners), -1)[slabs] for array in (arrays.refs, arrays.stamps))
    bare = (refs == 0) & (stamps == 0)
    counted = BlockCounts(used=held.used, cached=held.cached, free=held.num_free, slabs=held.num_slabs)
    found = BlockCounts(
        used=int(census.used[slabs].sum()),
        cached=int(census.cached[slabs].sum()),
        free=int(np.count_nonzero(bare[:, : held.blocks_per_slab])),
        slabs=len(slabs),
    )
    if counted != found or found.used + found.cached + found.free != found.slabs * held.blocks_per_slab:
        yield f"group {held.group} counts {counted}, and there are {found} in slabs of {held.blocks_per_slab}"


def _slab_faults(held: CutGroup, census: Census) -> Iterator[str]:
    mine = census.owners == held.owner
    used, cached = np.where(mine, census.used, 0), np.where(mine, census.cached, 0)
    if not np.array_equal(used, held.used_by_slab) or not np.array_equal(cached, held.cached_by_slab):
        yield f"group {held.group}: the counts of a slab are not those of its blocks"
    num_free = held.blocks_per_slab - used - cached
    for heap, members in ((held.roomy, used > 0), (held.roomy_idle, (used == 0) & (cached > 0))):
        slabs = np.flatnonzero(members & (num_free > 0))
        keys = num_free[slabs].astype(np.int64) * len(mine) + slabs
        if not np.isin(keys, np.array(heap, np.int64)).all():
            yield f"group {held.group}: a slab with room is not where it is looked for"


def _room_faults(held: CutGroup, arrays: Arrays) -> Iterator[str]:
    per_slab = arrays.geometry.slots_per_slab
    for slab, room in held.room.items():
        row = slice(slab * per_slab, slab * per_slab + held.blocks_per_slab)
        free = np.flatnonzero((arrays.refs[row] == 0) & (arrays.stamps[row] == 0)).tolist()
        if sorted(room) != free or not held.used_by_slab[slab] + held.cached_by_slab[slab]:
            yield f"group {held.group}: slab {slab} has room at {free}, and {sorted(room)} would be handed out"


def _queue_faults(held: CutGroup, arrays: Arrays) -> Iterator[str]:
    slots, stamps = held.oldest.entries()
    slabs = np.flatnonzero(held.cached_by_slab)
    wanted = held.cached_slots(slabs) if len(slabs) else slabs
    if not np.array_equal(np.sort(slots), wanted) or (np.diff(stamps) <= 0).any():
        yield f"group {held.group}: the queue of cached blocks does not hold each once, oldest first"
