"""The blocks of a pool, held by leases: what a worker serves, and what a process may use alone.

    pool = LeasedPool(plan)
    lease, token = pool.open("engine")
    grant = pool.do(lease, Step(allocate={0: 12, 1: 3}))     # all of it, or `OutOfBlocks` and nothing
    pool.close_lease(lease)                                  # its blocks are free again

Everything that must outlive the process is in one buffer. After kill -9 at any instruction the next `LeasedPool` on it
finds every step done or not begun, each block held by those who hold it, and leases without an owner (`quarantined`).
One thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvpage.errors import Conflict, InternalError, KvpageError
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids, Marks, block_ids, repeated, whole_number
from kvpage.pages.clearing import Clearing
from kvpage.pages.events import EventLog
from kvpage.pages.geometry import Geometry, Places
from kvpage.pages.holdings import Holdings
from kvpage.pages.lease_records import LeaseRecords
from kvpage.pages.leases import Lease, LeaseBook, Opened, Owner
from kvpage.pages.pool_buffer import PoolBuffer
from kvpage.pages.pool_conservation import leases_fault
from kvpage.pages.pool_prefix import PoolPrefix
from kvpage.pages.prefix import Match
from kvpage.pages.prefix_index import PrefixIndex
from kvpage.pages.steps import NOTHING, Grant, Step
from kvpage.pages.tenants import Tenant
from kvpage.pages.usage import Usage
from kvpage.plans import Plan


class _Freed(NamedTuple):
    slots: Places
    times: Ints
    num_ended: int
    """Blocks that the lease holds no more afterwards."""


class HeldBlocks(NamedTuple):
    """Of one lease and group: block ids, ascending, and how often it holds each."""

    ids: Ints
    times: Ints


class LeasedPool:
    def __init__(self, plan: Plan, buffer: Any = None, *, events: EventLog | None = None) -> None:
        """`buffer`: writable, `pool_buffer_bytes` bytes, zeros for a new pool, else what a pool of this plan left in
        it; None: memory of this process. Raises `SpecInvalid` for a plan without blocks or a buffer of another size,
        `Conflict` for a buffer that holds something else.
        """
        self.plan, self.geometry = plan, Geometry.of(plan)
        self.block_bytes = tuple(group.block_stride_bytes for group in plan.groups)
        """By group: what one block takes of the pool."""
        self._parts = PoolBuffer.of(self.geometry, buffer)
        self._events = EventLog() if events is None else events
        self._clears = bool(Clearing.of(plan))
        self._marks: Marks = np.empty(self.geometry.num_slots, np.int16)
        self.holdings = Holdings(self.geometry, self._parts.holdings)
        self.book = LeaseBook(LeaseRecords(self._parts.records), len(plan.groups))
        self.usage = Usage(self.book, self.block_bytes)
        known = {lease.row for lease in self.book}
        for holder in self.holdings.holders() - known:  # a lease or reservation that had all but ended
            self.holdings.drop(holder)
        self._find_blocks()

    def _find_blocks(self) -> None:
        """From the buffer, as those who hold blocks say."""
        self.index = PrefixIndex(self.geometry, self._parts.index, events=self._events)
        self.blocks = BlockPool.of(
            self.plan, self._parts.blocks, on_evict=self.index.evicted, times_held=self.holdings.times_held
        )
        self.prefix = PoolPrefix(self.plan, self.blocks, self.index)
        counts = self.holdings.count_blocks(self._group_of_slab(), len(self.block_bytes))
        self.usage.recount((lease, counts[lease.row].tolist()) for lease in self.book.with_reservations())

    def _group_of_slab(self) -> Ints:
        groups = np.full(self.geometry.num_slabs, -1, np.int32)
        for group in range(len(self.block_bytes)):
            groups[self.blocks.slabs(group).slabs] = group
        return groups

    def close(self) -> None:
        """Let go of the buffer, which keeps its state; the pool is of no more use."""
        self.blocks.close()
        self.holdings.close()
        self.book.close()

    # --- leases -------------------------------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        owner: Owner = Owner(),  # noqa: B008 - it is frozen
        *,
        tenant: str = "",
        token: str | None = None,
        ttl_s: float = 0.0,
        keep_s: float = 0.0,
    ) -> Opened:
        """A lease without blocks. `token`: what proves, to adopt it, that one may; None: a new one. `ttl_s`: it is one
        that ends by time; `keep_s`: how long its blocks stay when its owner has died.

        Raises `Conflict` where the name is taken, `SpecInvalid` for an unfit name, tenant or token, `TooManyClients`.
        """
        Tenant(name=tenant)
        opened = self.book.open(name, owner, tenant=tenant, token=token, ttl_s=ttl_s, keep_s=keep_s)
        self.holdings.begin(opened.lease.row)  # the row's last operation is not this lease's
        self.holdings.end()
        return opened

    def adopt(
        self,
        name: str,
        token: str,
        owner: Owner = Owner(),  # noqa: B008
        *,
        ttl_s: float = 0.0,
        keep_s: float = 0.0,
    ) -> Lease:
        """The lease of this name and its blocks go to another owner. Its id is another from now on, and what the owner
        before had reserved is given back. Raises `NotFound`, and `PermissionDenied` for a wrong token.
        """
        lease = self.book.adopt(name, token, owner, ttl_s=ttl_s, keep_s=keep_s)
        for reservation in list(lease.reservations.values()):
            self.close_lease(reservation)
        return lease

    def close_lease(self, lease: Lease, *, owner_died: bool = False) -> None:
        """Its blocks are given back, those of its reservations too. `owner_died`: it may not have cleared what it was
        told to."""
        for reservation in list(lease.reservations.values()):
            self.close_lease(reservation, owner_died=owner_died)
        held = self.holdings.held_by(lease.row)
        if len(held.slots):
            with self.operation(lease):
                for group, (ids, times) in self._by_group(held.slots, held.times).items():
                    if owner_died or lease.parent:
                        self.blocks.mark_stale(group, ids)
                    self.blocks.free(group, np.repeat(ids, times))
                self.holdings.take(lease.row, held.slots, held.times)
            self.usage.change(lease, {group: -count for group, count in enumerate(lease.blocks)})
        self.book.remove(lease)

    def held(self, lease: Lease) -> dict[int, HeldBlocks]:
        """By group, what the lease holds, without its reservations. Looks at every block."""
        return self._by_group(*self.holdings.held_by(lease.row))

    def _by_group(self, slots: Places, times: Ints) -> dict[int, HeldBlocks]:
        groups = self._group_of_slab()[slots // self.geometry.slots_per_slab]
        found = {}
        for group in np.unique(groups).tolist():
            mine = groups == group
            found[group] = HeldBlocks(self.geometry.ids_at(group, slots[mine]), times[mine])
        return found

    # --- steps --------------------------------------------------------------------------------------------------------

    def do(self, lease: Lease, step: Step) -> Grant:
        """What the lease holds anew.

        Raises `SpecInvalid` for what can be no block of a group, `Conflict` for blocks that the lease does not hold
        (or, to retain, nobody), `OutOfBlocks` where there are too few or the tenant's quota is used up, `NotSupported`
        to commit where the plan allows no prefix cache. Nothing is done then, but `Step.commit` stays.
        """
        if step.key and step.key == self.holdings.last(lease.row).key:
            return self._again(lease)
        return self._do(lease, step, sum(step.allocate.values()))

    def _do(self, lease: Lease, step: Step, result: int) -> Grant:
        freed = {group: self._freed(lease, group, ids) for group, ids in step.free.items()}
        allocate = {group: whole_number(count, "the number of blocks") for group, count in step.allocate.items()}
        retained = {group: self._counted(group, ids) for group, ids in step.retain.items()}
        taken_counts = Counter(allocate)
        taken_counts.update({group: len(slots) for group, (slots, _) in retained.items()})
        self.usage.check_quota(lease, taken_counts, {group: some.num_ended for group, some in freed.items()})
        for group, content in step.commit.items():
            self._freed(lease, group, content.ids)
            self.prefix.commit(group, content)
        changes: dict[int, int] = dict.fromkeys(range(len(self.block_bytes)), 0)
        with self.operation(lease, step.key, result) as serial, ExitStack() as undo:
            for group, ids in step.retain.items():
                self.blocks.retain(group, ids)
                undo.callback(self.blocks.free, group, ids)
                changes[group] += self.holdings.share(lease.row, *retained[group], serial)
            for group, ids in step.free.items():
                self.blocks.free(group, ids)
                undo.callback(self.blocks.take_back, group, ids)
                changes[group] -= self.holdings.take(lease.row, freed[group].slots, freed[group].times)
            taken = self._allocate(allocate, as_runs=step.as_runs, undo=undo)
            for group, new in taken.items():
                self.holdings.give(lease.row, self._slots(group, new), serial)
                changes[group] += len(new)
            undo.pop_all()
        self.usage.change(lease, changes)
        lease.last_grant = Grant(ids=taken, clear=self._to_clear(taken))
        return lease.last_grant

    def _allocate(self, counts: Mapping[int, int], *, as_runs: bool, undo: ExitStack) -> dict[int, Ints]:
        if not as_runs:
            if len(counts) == 1:
                [(group, count)] = counts.items()
                return {group: self.blocks.allocate(group, count)}
            return self.blocks.allocate_all(counts)
        taken = {}
        for group, count in counts.items():
            taken[group] = self.blocks.allocate_run(group, count)
            undo.callback(self.blocks.free, group, taken[group])
        return taken

    def allocate_one(self, lease: Lease, group: int, key: int = 0) -> Grant:
        """As `do` of a step that allocates one block."""
        if key and key == self.holdings.last(lease.row).key:
            return self._again(lease)
        self.usage.check_quota(lease, {group: 1}, {})
        block = self.blocks.allocate_one(group)
        holdings = self.holdings
        try:
            serial = holdings.begin(lease.row, key, 1)
            holdings.give_one(lease.row, self._slot(group, block), serial)
            holdings.end()
        except BaseException:
            self._mend()
            raise
        self.usage.change_one(lease, group, 1)
        taken = {group: np.array([block], np.int32)}
        lease.last_grant = Grant(ids=taken, clear=self._to_clear(taken))
        return lease.last_grant

    def free_one(self, lease: Lease, group: int, block: int, key: int = 0) -> Grant:
        """As `do` of a step that frees one block."""
        is_new = not key or key != self.holdings.last(lease.row).key
        num_blocks = self.geometry.num_blocks(group) if 0 <= group < len(self.block_bytes) else 0
        if not (is_new and 0 < block < num_blocks and self.holdings.holds_once(lease.row, self._slot(group, block))):
            return self.do(lease, Step(key=key, free={group: [block]}))
        self.blocks.free_one(group, block)
        try:
            self.holdings.begin(lease.row, key)
            self.holdings.take_one(self._slot(group, block))
            self.holdings.end()
        except BaseException:
            self._mend()
            raise
        self.usage.change_one(lease, group, -1)
        lease.last_grant = NOTHING
        return NOTHING

    def _slot(self, group: int, block: int) -> int:
        cut = self.geometry.blocks_per_slab[group]
        return block + block // cut * (self.geometry.slots_per_slab - cut)

    def _again(self, lease: Lease) -> Grant:
        """What the last step was answered with."""
        if lease.last_grant is not None:
            return lease.last_grant
        last = self.holdings.last(lease.row)
        slots = self.holdings.given(lease.row, last.serial)
        if len(slots) != last.result:
            raise Conflict(f"the answer to step {last.key} is not known any more; ask for all that the lease holds")
        ids = {group: held.ids for group, held in self._by_group(slots, np.ones(len(slots), np.int32)).items()}
        # Which of them were to be cleared went with the process before: all, where any might be.
        return Grant(ids=ids, clear=ids if self._clears else {})

    def _to_clear(self, taken: Mapping[int, Ints]) -> dict[int, Ints]:
        if not self._clears:
            return {}
        return {group: stale for group, ids in taken.items() if len(stale := self.blocks.to_clear(group, ids))}

    def _slots(self, group: int, ids: Ints) -> Places:
        return self.geometry.slots_of(group, ids.astype(np.intp))

    def _counted(self, group: int, ids: Ids) -> tuple[Places, Ints]:
        """Each slot of the ids once, and how often it stands there. Raises `SpecInvalid` for what is no block id."""
        self.blocks.counts(group)
        slots = self.geometry.slots_of(group, block_ids(ids, self.geometry.num_blocks(group)))
        twice = repeated(slots, self._marks)
        return twice or (slots, np.ones(len(slots), np.int32))

    def _freed(self, lease: Lease, group: int, ids: Ids) -> _Freed:
        """Raises `Conflict` unless the lease holds the blocks as often as they stand in `ids`."""
        slots, times = self._counted(group, ids)
        held = self.holdings.times(lease.row, slots)
        wrong = np.flatnonzero(held < times)
        if len(wrong):
            block = self.geometry.ids_at(group, slots[wrong[:1]])[0]
            raise Conflict(
                f"block {block} of group {group} is held {held[wrong[0]]} times by lease {lease.record.name}, not"
                f" {times[wrong[0]]} times; it may have been freed before",
                details={"group": group, "block": int(block)},
            )
        return _Freed(slots, times, int(np.count_nonzero(held == times)))

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def take_prefix(self, lease: Lease, hashes: Sequence[Sequence[bytes]], at_most_tokens: int, key: int = 0) -> Match:
        """The longest cached beginning of a prompt, held by the lease from now on. `hashes`: by group, of its whole
        blocks in order. Raises `NotSupported` where the plan allows no prefix cache, `SpecInvalid` for a hash that is
        none.
        """
        last = self.holdings.last(lease.row)
        is_again = key and key == last.key
        match = self.prefix.find(hashes, last.result if is_again else at_most_tokens)
        if not is_again:
            retain = {group: ids for group, ids in enumerate(match.blocks) if len(ids)}
            self._do(lease, Step(key=key, retain=retain), match.num_tokens)
            self.prefix.count(match, at_most_tokens)
        return match

    # --- staying whole ------------------------------------------------------------------------------------------------

    @contextmanager
    def operation(self, lease: Lease, key: int = 0, result: int = 0) -> Iterator[int]:
        """Around what changes who holds what: done as a whole, or, when anything is raised, not at all."""
        try:
            yield self.holdings.begin(lease.row, key, result)
            self.holdings.end()
        except KvpageError:
            self.holdings.undo()
            raise
        except BaseException:
            self._mend()
            raise

    def _mend(self) -> None:
        """After something went wrong in the middle: as a new process would find it."""
        self.holdings.undo()
        self.blocks.close()
        self._find_blocks()

    def check(self) -> None:
        """Prove that nothing is lost or in two places, and that each block is held by those who hold it. Raises
        `InternalError` naming what does not hold."""
        self.prefix.check()
        fault = leases_fault(self)
        if fault:
            raise InternalError(fault)
