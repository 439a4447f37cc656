"""The pools of a worker: who holds what, in which state. Pure bookkeeping; it decides and never waits.

creating ──► ready ──► deleting ──► (gone)
    │          │          │  │
    ├──────► failed ──────┘  │
    └────────────────────────┘

A pool that is held can only be forgotten: it is gone for whoever looks, and counts against the budget until the last
hold has ended, because nobody can take memory back from a process that has mapped it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvpage.errors import Conflict, KvpageError, PoolNotFound, StaleHandle, shorten
from kvpage.wire.messages import MAX_HOLDERS_NAMED, ChunkInfo, Holder, PoolState, WireError
from kvpage_server.control_block import ControlRecord, control_block_bytes
from kvpage_server.worker_budget import Budget, in_pages
from kvpage_server.worker_pool_entry import Pool, PoolMemory, held, with_handles


class PoolTable:
    """All pools of one device."""

    def __init__(
        self,
        device: str,
        budget: Budget,
        epoch: str | None = None,
        *,
        taken_bytes: Callable[[ChunkInfo], int] = lambda chunk: in_pages(chunk.size_bytes),
    ) -> None:
        """`taken_bytes`: what a chunk takes of the device, which gives memory in units of its own."""
        self._taken_bytes = taken_bytes
        self.device = device
        self.epoch = epoch or secrets.token_hex(16)
        self.next_hold_id = 1
        self.budget = budget
        self._pools: dict[str, Pool] = {}
        self.on_parted: Callable[[Pool], None] = lambda pool: None
        """Ends the leases of a pool. Is called before its memory is given away to be closed."""
        self._forgotten: dict[str, Pool] = {}
        """Still held."""

    def __repr__(self) -> str:
        states = ", ".join(f"{pool.name}: {pool.state}, {len(pool.holders)} holders" for pool in self)
        return f"<PoolTable {self.device} [{states}] {self.budget!r}>"

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    def describe(self, pool: Pool, *, max_holders: int = MAX_HOLDERS_NAMED) -> PoolState:
        holders = list(pool.holders.values())
        return PoolState(
            pool_id=pool.pool_id,
            name=pool.name,
            device=self.device,
            epoch=self.epoch,
            plan_id=pool.plan_id,
            state=pool.state,
            buffer_size_bytes=pool.size_bytes,
            committed_bytes=pool.committed_bytes,
            num_holders=len(holders),
            holders=holders[:max_holders],
            error=None if pool.error is None else WireError.from_error(pool.error),
        )

    def record(self, pool: Pool) -> ControlRecord:
        return ControlRecord(
            epoch=self.epoch,
            device=self.device,
            pool_id=pool.pool_id,
            name=pool.name,
            plan_id=pool.plan_id,
            plan=pool.plan,
            chunks=list(pool.chunks),
        )

    def renew_epoch(self) -> None:
        """Whatever handles there are of the epoch before, their memory is lost."""
        assert not self._pools
        self.epoch = secrets.token_hex(16)

    # --- looking up --------------------------------------------------------------------------------------------------

    def get(self, pool_id: str) -> Pool:
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolNotFound(f"device {self.device} has no pool {pool_id}", details={"pool_id": pool_id})
        return pool

    def find(self, name: str) -> Pool:
        pool = self._named(name)
        if pool is None:
            raise PoolNotFound(f"device {self.device} has no pool named {shorten(name)}", details={"name": name})
        return pool

    def is_there(self, name: str) -> bool:
        """Whether a pool of this name would be found, not made, by `create`."""
        pool = self._named(name)
        return pool is not None and pool.state != "failed"

    def _named(self, name: str) -> Pool | None:
        return next((pool for pool in self if pool.name == name), None)

    # --- coming and going --------------------------------------------------------------------------------------------

    def create(self, name: str, plan_id: str, plan: bytes, chunks: Iterable[ChunkInfo]) -> tuple[Pool, bool]:
        """The pool of this name, and whether it is new and its memory has to be committed.

        A failed pool of the name makes room for a new attempt. Raises `Conflict` when the name is taken by another
        plan or by a pool that is being deleted, `NotEnoughMemory` when the budget does not allow the pool.
        """
        chunks = tuple(chunks)
        there = self._named(name)
        if there is not None and self.is_there(name):
            self._require_same(there, plan_id, chunks)
            return there, False
        pool = Pool(pool_id=f"pool-{secrets.token_hex(8)}", name=name, plan_id=plan_id, plan=plan, chunks=chunks)
        promised = sum(pool.reserved_bytes - pool.committed_bytes for pool in self if pool.state == "creating")
        needed_bytes = self._cost_bytes(pool)
        self.budget.reserve(needed_bytes, promised_bytes=promised, buffer_bytes=pool.size_bytes)
        pool.reserved_bytes = needed_bytes
        if there is not None:
            self.remove(there)
        self._pools[pool.pool_id] = pool
        return pool, True

    def _cost_bytes(self, pool: Pool) -> int:
        """What a pool takes of its device: whole units of its memory; of the host also its control block, and the copy
        of its plan that this process keeps.
        """
        if self.device != "host":
            return self._buffer_cost_bytes(pool)
        return self._buffer_cost_bytes(pool) + control_block_bytes(self.record(pool)) + in_pages(len(pool.plan))

    def _buffer_cost_bytes(self, pool: Pool) -> int:
        return sum(self._taken_bytes(chunk) for chunk in pool.chunks)

    def _require_same(self, pool: Pool, plan_id: str, chunks: Sequence[ChunkInfo]) -> None:
        if pool.state == "deleting":
            raise Conflict(f"pool {shorten(pool.name)} is being deleted; try again", details={"state": pool.state})
        there, asked = ([(chunk.kind, chunk.size_bytes) for chunk in some] for some in (pool.chunks, chunks))
        if (pool.plan_id, there) != (plan_id, asked):
            raise Conflict(
                f"pool {shorten(pool.name)} exists with plan {pool.plan_id} and {_sizes(there)}, not with {plan_id} and"
                f" {_sizes(asked)}; delete it or choose another name",
                details={"pool_id": pool.pool_id, "plan_id": pool.plan_id},
            )

    def adopt(self, record: ControlRecord, memory: PoolMemory) -> Pool:
        """Take over a pool of a worker that died; a worker without pools goes on in its epoch.

        Raises `StaleHandle` for a pool of another epoch, `Conflict` when its name or id is taken.
        """
        if len(self) and record.epoch != self.epoch:
            raise StaleHandle(
                f"pool {record.pool_id} is of epoch {record.epoch}; this worker has pools of epoch {self.epoch}",
                details={"epoch": self.epoch},
            )
        if record.pool_id in self._pools or self._named(record.name):
            raise Conflict(f"a pool {record.pool_id} or a pool named {shorten(record.name)} exists already")
        pool = Pool(
            pool_id=record.pool_id,
            name=record.name,
            plan_id=record.plan_id,
            plan=record.plan,
            chunks=tuple(record.chunks),
            state="ready",
            committed_bytes=record.buffer_size_bytes,
            memory=memory,
        )
        self.epoch = record.epoch  # of a table that had none of its own yet
        pool.reserved_bytes = self._cost_bytes(pool)
        self.budget.adopt(pool.reserved_bytes)
        self._pools[pool.pool_id] = pool
        return pool

    def committed(self, pool: Pool, committed_bytes: int) -> None:
        pool.committed_bytes = committed_bytes

    def become_ready(self, pool: Pool, memory: PoolMemory) -> None:
        pool.state, pool.memory, pool.committed_bytes = "ready", memory, pool.size_bytes
        pool.chunks = with_handles(pool.chunks, memory.chunks)

    def become_failed(self, pool: Pool, error: KvpageError) -> None:
        """The pool stays to tell why; what it had reserved is free again."""
        self._release_budget(pool)
        pool.state, pool.error, pool.committed_bytes = "failed", error, 0

    def lose(self, pool: Pool, error: KvpageError) -> PoolMemory | None:
        """The memory of a pool that was ready is gone. Returns what is left of it, to be closed. Holds stay until they
        are ended, and keep nothing any more.
        """
        memory = self._part(pool)
        self.become_failed(pool, error)
        return memory

    def _part(self, pool: Pool) -> PoolMemory | None:
        self.on_parted(pool)
        memory, pool.memory = pool.memory, None
        return memory

    def begin_delete(self, pool: Pool) -> PoolMemory | None:
        """From now on nobody can take hold of the pool. Returns the memory to close, if it is there.

        Raises `Conflict` naming the holders, if there are any.
        """
        if pool.is_held:
            raise held(pool)
        pool.state = "deleting"
        pool.abandoned.set()
        return self._part(pool)

    def end_leases(self, pool: Pool) -> None:
        """Whoever has them."""
        self.on_parted(pool)

    def forget(self, pool: Pool) -> PoolMemory | None:
        """Part with a pool that is held. Returns the worker's own claim to the memory, to be closed."""
        pool.state = "deleting"
        memory = self._part(pool)
        pinned_bytes = min(pool.reserved_bytes, self._buffer_cost_bytes(pool))  # the control block is ours alone
        self.budget.release(pool.reserved_bytes - pinned_bytes)
        pool.reserved_bytes = pinned_bytes
        self._forgotten[pool.pool_id] = self._pools.pop(pool.pool_id)
        return memory

    @property
    def pinned_bytes(self) -> int:
        """What the holders of forgotten pools keep in use."""
        return sum(pool.reserved_bytes for pool in self._forgotten.values())

    def remove(self, pool: Pool) -> None:
        """Forget a pool whose memory is closed."""
        del self._pools[pool.pool_id]
        self._release_budget(pool)

    def _release_budget(self, pool: Pool) -> None:
        self.budget.release(pool.reserved_bytes)
        pool.reserved_bytes = 0

    # --- holds -------------------------------------------------------------------------------------------------------

    def restore_hold(self, pool: Pool, holder: Holder) -> None:
        """A hold of a worker that was replaced goes on."""
        pool.holders[holder.hold_id] = holder
        self.next_hold_id = max(self.next_hold_id, holder.hold_id + 1)

    def hold(self, pool: Pool, *, pid: int, uid: int, client_name: str) -> int:
        """Id of a new hold on a pool that is ready."""
        pool.require_ready()
        hold_id, self.next_hold_id = self.next_hold_id, self.next_hold_id + 1
        pool.holders[hold_id] = Holder(hold_id=hold_id, pid=pid, uid=uid, client_name=client_name)
        return hold_id

    def release(self, pool: Pool, hold_id: int) -> None:
        del pool.holders[hold_id]
        if not pool.holders and pool.pool_id in self._forgotten:
            del self._forgotten[pool.pool_id]
            self._release_budget(pool)

    def check(self) -> None:
        """Re-derive what the budget says from the pools. Raises AssertionError."""
        expected = sum(pool.reserved_bytes for pool in self) + self.pinned_bytes
        if self.budget.reserved_bytes != expected:
            raise AssertionError(f"{self!r}: the pools have reserved {expected} bytes")
        for pool in self:
            may_be_held = pool.state in ("ready", "failed")  # failed: what was held is lost
            if (pool.memory is not None) != (pool.state == "ready") or (pool.holders and not may_be_held):
                raise AssertionError(f"{self!r}: pool {pool.pool_id} has memory or holders in state {pool.state}")
        for pool in self._forgotten.values():
            if pool.memory is not None or not pool.holders:
                raise AssertionError(f"{self!r}: pool {pool.pool_id} is forgotten and has memory or no holders")


def _sizes(chunks: list[tuple[str, int]]) -> str:
    return ", ".join(f"{size_bytes} bytes of {kind}" for kind, size_bytes in chunks)
