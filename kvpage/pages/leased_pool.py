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
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from kvpage.errors import Conflict, KvpageError
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids, Repeated, block_ids, repeated, whole_number
from kvpage.pages.leased_state import HeldBlocks as HeldBlocks
from kvpage.pages.leased_state import LeasedState
from kvpage.pages.leases import Lease, Opened, Owner
from kvpage.pages.prefix import Match
from kvpage.pages.steps import NOT_KEPT, NOTHING, Grant, Step
from kvpage.pages.tenants import Tenant

Undo = Callable[[], None]


class LeasedPool(LeasedState):
    """See the module; opening and closing are `LeasedState`'s."""

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
        with self.whole:
            self.holdings.begin(self.book.next_row())  # the row's last operation is not this lease's
            self.holdings.end()
            return self.book.open(name, owner, tenant=tenant, token=token, ttl_s=ttl_s, keep_s=keep_s)

    def adopt(
        self,
        name: str,
        token: str,
        owner: Owner = Owner(),  # noqa: B008
        *,
        ttl_s: float = 0.0,
        keep_s: float = 0.0,
    ) -> Lease:
        """The lease of this name and its blocks go to another owner, and so does the key of its last step, about which
        the new owner may ask again. What it was for the owner before has ended; what that had reserved is given back.
        Raises `NotFound`, and `PermissionDenied` for a wrong token.
        """
        with self.whole:
            lease = self.book.proved(name, token)
            for reservation in list(lease.reservations.values()):
                self._close(reservation, owner_died=False)
            adopted = self.book.adopt(lease, owner, ttl_s=ttl_s, keep_s=keep_s)
            if self._clearing:  # whoever had it may have written into what was given last, as clean as it was
                serial, grant = adopted.last_grant
                adopted.last_grant = serial, Grant(ids=grant.ids, clear=grant.ids)
            return adopted

    def close_lease(self, lease: Lease, *, owner_died: bool = False) -> None:
        """Its blocks are given back, those of its reservations too. `owner_died`: it may not have cleared what it was
        told to. Raises `StaleHandle` for one that has ended."""
        with self.whole:
            if lease.state == "ended":
                self._refuse(lease)
            for reservation in list(lease.reservations.values()):
                self._close(reservation, owner_died=owner_died)
            self._close(lease, owner_died=owner_died)

    def _close(self, lease: Lease, *, owner_died: bool) -> None:
        held = self.holdings.held_by(lease.row)
        self.book.remove(lease)  # it has ended: should this process die now, the next one gives its blocks back
        self.holdings.begin(lease.row)
        for group, (ids, times) in self._by_group(held).items():
            if owner_died or lease.parent:
                self.blocks.mark_stale(group, ids)
            self.blocks.free(group, np.repeat(ids, times))
        self.holdings.take(lease.row, held.slots, held.times)
        self.usage.change(lease, {group: -count for group, count in enumerate(lease.blocks)})
        self.holdings.end()

    # --- steps --------------------------------------------------------------------------------------------------------

    def do(self, lease: Lease, step: Step) -> Grant:
        """What the lease holds anew.

        Raises `SpecInvalid` for what can be no block of a group, `Conflict` for blocks that the lease does not hold
        (or, to retain, nobody), `OutOfBlocks` where there are too few or the tenant's quota is used up, `NotSupported`
        to commit where the plan allows no prefix cache, `StaleHandle` for a lease that has ended. Nothing is done then,
        but `Step.commit` stays.
        """
        with self.whole:
            if lease.state == "ended":
                self._refuse(lease)
            if step.key and step.key == self.holdings.last(lease.row).key:
                return self._again(lease)
            return self._do(lease, step)

    def _do(self, lease: Lease, step: Step, result: int | None = None) -> Grant:
        """`result`: what `Holdings.last` remembers of it; None: how many blocks are allocated."""
        allocate = {group: whole_number(count, "the number of blocks") for group, count in step.allocate.items()}
        for group in (*allocate, *step.commit):
            self.blocks.counts(group)  # raises `SpecInvalid` where there is none
        for group, content in step.commit.items():
            self._held_often(lease, group, content.ids)
            self.prefix.commit(group, content)
        serial = self.holdings.begin(lease.row, step.key, sum(allocate.values()) if result is None else result)
        done: list[Undo] = []
        try:
            changes = Counter(self._retain(lease, step, done))
            given_back = {group: self._held_often(lease, group, ids) for group, ids in step.free.items()}
            for group, slots in given_back.items():
                changes[group] -= self.holdings.take(lease.row, *slots)
            changes.update(allocate)
            self.usage.check_quota(lease, changes)
            for group, ids in step.free.items():
                self.blocks.free(group, ids)
                done.append(partial(self.blocks.take_back, group, ids))
            taken = self._allocate(allocate, done, as_runs=step.as_runs)
        except KvpageError:
            self._take_back(done)
            raise
        for group, new in taken.items():
            self.holdings.give(lease.row, group, self.geometry.slots_of(group, new.astype(np.intp)), serial)
        self.usage.change(lease, changes)
        self.holdings.end()
        return self.granted(lease, serial, taken)

    def _take_back(self, done: Sequence[Undo]) -> None:
        """What was done of a step that is refused."""
        try:
            for undo in reversed(done):
                undo()
        except KvpageError:  # a run that is free again has left a slab with another group, of which a block was freed
            self._mend()
        self.holdings.undo()

    def _retain(self, lease: Lease, step: Step, done: list[Undo]) -> dict[int, int]:
        """By group, how many blocks the lease did not hold before."""
        new = {}
        for group, ids in step.retain.items():
            self.blocks.retain(group, ids)
            done.append(partial(self.blocks.free, group, ids))
            new[group] = self.holdings.share(lease.row, group, *self._counted(group, ids))
        return new

    def _allocate(self, counts: Mapping[int, int], done: list[Undo], *, as_runs: bool) -> dict[int, Ints]:
        if not as_runs:
            if len(counts) == 1:
                [(group, count)] = counts.items()
                return {group: self.blocks.allocate(group, count)}
            return self.blocks.allocate_all(counts)
        taken = {}
        for group, count in counts.items():
            taken[group] = self.blocks.allocate_run(group, count)
            done.append(partial(self.blocks.free, group, taken[group]))
        return taken

    def allocate_one(self, lease: Lease, group: int, key: int = 0) -> Grant:
        """As `do` of a step that allocates one block."""
        block = self.take_quickly(lease, group, key)
        if block is None:
            return self.do(lease, Step(key=key, allocate={group: 1}))
        return Grant(ids={group: np.array([block], np.int32)})

    def free_one(self, lease: Lease, group: int, block: int, key: int = 0) -> Grant:
        """As `do` of a step that frees one block."""
        if self.free_quickly(lease, group, block, key):
            return NOTHING
        return self.do(lease, Step(key=key, free={group: [block]}))

    def take_quickly(self, lease: Lease, group: int, key: int) -> int | None:
        """What `do` of a step that allocates one block gives, where nothing special is to be heeded; else None, and
        nothing is done. Raises what breaks into it, as an interruption.
        """
        holdings = self.holdings
        if lease.state == "ended" or not self.whole.is_whole or self._clearing:
            return None
        if (key and key == holdings.last_key(lease.row)) or self.usage.has_quota(lease):
            return None
        try:
            block = self.blocks.allocate_one(group)
            holdings.begin_giving(lease.row, key, group, self._slot(group, block))
            self.usage.change_one(lease, group, 1)
            holdings.end()
            lease.last_grant = NOT_KEPT
            return block
        except KvpageError:  # raised before anything was done, and again by `do`
            return None
        except BaseException as error:
            self.whole.failed(error)
            raise

    def free_quickly(self, lease: Lease, group: int, block: int, key: int) -> bool:
        """As `take_quickly`, of a step that frees one block."""
        holdings = self.holdings
        if lease.state == "ended" or not self.whole.is_whole or not 0 <= group < len(self.block_bytes):
            return False
        if (key and key == holdings.last_key(lease.row)) or not 0 < block < self.geometry.num_blocks(group):
            return False
        slot = self._slot(group, block)
        if not holdings.holds_once(lease.row, slot):
            return False
        try:
            self.blocks.free_one(group, block)
            holdings.begin_taking(lease.row, key, slot)
            self.usage.change_one(lease, group, -1)
            holdings.end()
            lease.last_grant = NOT_KEPT
            return True
        except KvpageError:
            return False
        except BaseException as error:
            self.whole.failed(error)
            raise

    def _slot(self, group: int, block: int) -> int:
        cut = self.geometry.blocks_per_slab[group]
        return block + block // cut * (self.geometry.slots_per_slab - cut)

    def granted(self, lease: Lease, serial: int, taken: dict[int, Ints]) -> Grant:
        """The answer to a step that is done."""
        clear = {}
        if self._clearing:
            clear = {group: stale for group, ids in taken.items() if len(stale := self.blocks.to_clear(group, ids))}
        grant = Grant(ids=taken, clear=clear)
        lease.last_grant = serial, grant
        return grant

    def again(self, lease: Lease, key: int) -> Grant | None:
        """What the step with this key was answered with, if it was the lease's last. Raises `Conflict` where that is
        not known any more."""
        with self.whole:
            return self._again(lease) if key and key == self.holdings.last(lease.row).key else None

    def _again(self, lease: Lease) -> Grant:
        last, (serial, grant) = self.holdings.last(lease.row), lease.last_grant
        if serial == last.serial:
            return grant
        given = self.holdings.given(lease.row, last.serial)
        if len(given.slots) != last.result:
            raise Conflict(f"the answer to step {last.key} is not known any more; ask for all that the lease holds")
        ids = {group: held.ids for group, held in self._by_group(given).items()}
        # Which of them were to be cleared went with the process before: all, where any might be.
        return Grant(ids=ids, clear=ids if self._clearing else {})

    def _counted(self, group: int, ids: Ids) -> Repeated:
        """Each slot of the ids once, and how often it stands there. Raises `SpecInvalid` for what is no block id."""
        self.blocks.counts(group)
        slots = self.geometry.slots_of(group, block_ids(ids, self.geometry.num_blocks(group)))
        return repeated(slots, self._marks) or Repeated(slots, np.ones(len(slots), np.int32))

    def _held_often(self, lease: Lease, group: int, ids: Ids) -> Repeated:
        """As `_counted`. Raises `Conflict` unless the lease holds the blocks as often as they stand in `ids`."""
        slots, times = counted = self._counted(group, ids)
        held = self.holdings.times(lease.row, slots)
        wrong = np.flatnonzero(held < times)
        if len(wrong):
            block = self.geometry.ids_at(group, slots[wrong[:1]])[0]
            raise Conflict(
                f"block {block} of group {group} is held {held[wrong[0]]} times by lease {lease.record.name}, not"
                f" {times[wrong[0]]} times; it may have been freed before",
                details={"group": group, "block": int(block)},
            )
        return counted

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def take_prefix(self, lease: Lease, hashes: Sequence[Sequence[bytes]], at_most_tokens: int, key: int = 0) -> Match:
        """The longest cached beginning of a prompt, held by the lease from now on. `hashes`: by group, of its whole
        blocks in order. Raises `NotSupported` where the plan allows no prefix cache, `SpecInvalid` for a hash that is
        none, and as `do`.
        """
        with self.whole:
            if lease.state == "ended":
                self._refuse(lease)
            last = self.holdings.last(lease.row)
            if key and key == last.key:
                match = self.prefix.find(hashes, last.result)
                if match.num_tokens != last.result:
                    raise Conflict(f"the answer to step {key} is not known any more; ask for all that the lease holds")
                return match
            match = self.prefix.find(hashes, at_most_tokens)
            retain = {group: ids for group, ids in enumerate(match.blocks) if len(ids)}
            self._do(lease, Step(key=key, retain=retain), match.num_tokens)
            self.prefix.count(match, at_most_tokens)
            return match
