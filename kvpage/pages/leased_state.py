"""A pool of blocks that leases hold: opened, mended after an interruption, looked at, closed."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from kvpage.errors import Conflict, InternalError, StaleHandle
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Arrays, Ints
from kvpage.pages.batches import Marks
from kvpage.pages.clearing import Clearing
from kvpage.pages.events import EventLog
from kvpage.pages.geometry import Geometry
from kvpage.pages.holdings import Held, Holdings
from kvpage.pages.lease_records import LeaseRecords
from kvpage.pages.leases import Lease, LeaseBook
from kvpage.pages.pool_buffer import PoolBuffer
from kvpage.pages.pool_conservation import leases_fault
from kvpage.pages.pool_prefix import PoolPrefix
from kvpage.pages.prefix_index import PrefixIndex
from kvpage.pages.usage import Usage
from kvpage.pages.whole import Whole
from kvpage.plans import Plan


class HeldBlocks(NamedTuple):
    """Of one lease and group: block ids, ascending, and how often it holds each."""

    ids: Ints
    times: Ints


class LeasedState:
    def __init__(self, plan: Plan, buffer: Any = None, *, events: EventLog | None = None) -> None:
        """`buffer`: writable, `pool_buffer_bytes` bytes, zeros for a new pool, else what a pool of this plan left in
        it; None: memory of this process. Raises `SpecInvalid` for a plan without blocks or a buffer of another size,
        `Conflict` for a buffer that holds something else.
        """
        self.plan, self.geometry = plan, Geometry.of(plan)
        self.block_bytes = tuple(plan.slab_bytes // group.blocks_per_slab for group in plan.groups)
        """By group: what one block takes of the pool."""
        self._parts = PoolBuffer.of(self.geometry, buffer)
        self._events = EventLog() if events is None else events
        self._clearing = Clearing.of(plan)
        self._marks: Marks = np.empty(self.geometry.num_slots, np.int16)
        self._is_closed = False
        self.holdings = Holdings(self.geometry, self._parts.holdings)
        self.book = LeaseBook(LeaseRecords(self._parts.records), len(plan.groups))
        self.usage = Usage(self.book, self.block_bytes)
        self.whole = Whole(self._mend, lambda: self.holdings.is_amid)
        """Around whatever changes who holds what."""
        self._find_blocks(is_new=self.holdings.is_new)

    def _find_blocks(self, *, is_new: bool = False) -> None:
        """From the buffer, as those who hold blocks say; `is_new`: nobody does."""
        if not is_new:  # or untouched memory would be looked at, and taken
            for holder in self.holdings.holders() - {lease.row for lease in self.book.with_reservations()}:
                self.holdings.drop(holder)  # a lease or reservation that had all but ended
            self._give_slabs_back()
        self.index = PrefixIndex(self.geometry, self._parts.index, events=self._events)
        self.blocks = BlockPool.of(
            self.plan,
            self._parts.blocks,
            on_evict=self.index.evicted,
            times_held=None if is_new else self.holdings.times_held,
        )
        self.prefix = PoolPrefix(self.plan, self.blocks, self.index, self.book)
        if not is_new:
            counts = self.holdings.count_blocks(len(self.block_bytes))
            self.usage.recount((lease, counts[lease.row].tolist()) for lease in self.book.with_reservations())

    def _give_slabs_back(self) -> None:
        """A step that was interrupted after it had freed the last block of a slab may have given that to another group;
        those who hold the block again know whose it is."""
        owners = self.holdings.owners()
        slabs = np.flatnonzero(owners)
        if len(slabs):
            Arrays(self.geometry, self._parts.blocks, self._clearing).owners[slabs] = owners[slabs]

    def _mend(self) -> None:
        """After something went wrong in the middle: as a new process would find it, but that leases go on."""
        self._require_open()
        self.holdings.recover()
        self.book.mend()
        self.blocks.close()
        index, counts = self.index, self.prefix.counts
        before = index.snapshot().hashes
        self._find_blocks()
        vars(index).clear()  # the pool before, which is a cycle, refers to it
        self.prefix.went_on(counts)
        for lease in self.book.with_reservations():
            if lease.parent is not None:
                lease.reserved = {group: blocks.ids for group, blocks in self.held(lease).items()}
        for group, after in enumerate(self.index.snapshot().hashes):
            self._events.append("removed", group, b"".join(set(before[group]) - set(after)))
            self._events.append("stored", group, b"".join(set(after) - set(before[group])))

    def close(self) -> None:
        """Let go of the buffer, which keeps its state; the pool is of no more use."""
        if not self._is_closed:
            self._is_closed, self.whole.is_whole = True, False
            for lease in self.book.with_reservations():
                lease.state = "ended"
            self.blocks.close()
            vars(self.index).clear()  # as above
            self.holdings.close()
            self.book.close()
            del self._parts

    @property
    def closed(self) -> bool:
        return self._is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            "<LeasedPool, closed>" if self._is_closed else f"<LeasedPool of {len(self.book)} leases, {self.blocks!r}>"
        )

    def held(self, lease: Lease) -> dict[int, HeldBlocks]:
        """By group, what the lease holds, without its reservations. Looks at every block."""
        self._require_open()
        return self._by_group(self.holdings.held_by(lease.row))

    def _by_group(self, held: Held) -> dict[int, HeldBlocks]:
        found = {}
        for group in np.unique(held.groups).tolist():
            mine = held.groups == group
            found[group] = HeldBlocks(self.geometry.ids_at(group, held.slots[mine]), held.times[mine])
        return found

    def _require_open(self) -> None:
        if self._is_closed:
            raise Conflict("the pool is closed")

    def _refuse(self, lease: Lease) -> None:
        """Why nothing can be done with a lease that has ended."""
        raise StaleHandle(
            f"{lease.lease_id} was closed, or another has adopted it; open a lease, or adopt this one by its name and"
            " token",
            details={"lease_id": lease.lease_id},
        )

    def check(self) -> None:
        """Prove that nothing is lost or in two places, and that each block is held by those who hold it. Raises
        `InternalError` naming what does not hold."""
        with self.whole:
            self.prefix.check()
            fault = leases_fault(self)
        if fault:
            raise InternalError(fault)
