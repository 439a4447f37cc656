"""Pools coming and going: create, wait, delete."""

from __future__ import annotations

from collections.abc import Callable

from kvpage.errors import Draining, KvpageError, PoolNotFound, TooLarge, TooManyClients
from kvpage.wire import messages
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_limits import FDS_PER_POOL, Limits
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pool_entry import Pool, PoolMemory, held
from kvpage_server.worker_pools import PoolTable
from kvpage_server.worker_waiting import Waiting


class PoolLifecycle:
    """Starts slow work on the keeper and finishes it when its outcome comes back."""

    def __init__(
        self,
        pools: PoolTable,
        keeper: MemoryKeeper,
        loop: Loop,
        limits: Limits,
        *,
        num_clients: Callable[[], int],
        on_unheld: Callable[[], None],
    ) -> None:
        """`on_unheld` is called when all holds on a pool have ended at once: its memory was lost, or it is deleted by
        force."""
        self._pools = pools
        self._keeper = keeper
        self._limits = limits
        self._num_clients = num_clients
        self._waiting = Waiting(loop)
        self._until_free = Waiting(loop)
        """Requests to delete pools that are held."""
        self._on_unheld = on_unheld
        for pool in pools:  # those of a worker before this one
            self.watch(pool)

    def watch(self, pool: Pool) -> None:
        """Notice when the memory of a pool that has become ready is lost."""
        if pool.memory is not None:
            self._keeper.watch(pool.memory, lambda error: self._lost(pool, error))

    def create(self, connection: Connection, request_id: int, body: messages.CreatePool) -> None:
        _check_create(body)
        if not self._pools.is_there(body.name):  # to find a pool that is there takes no room
            self._check_room()
            self._limits.check_plans(sum(len(pool.plan) for pool in self._pools) + len(body.plan))
        chunk = self._keeper.device.chunk(body.handle_kind, body.buffer_size_bytes)
        pool, created = self._pools.create(body.name, body.plan_id, body.plan, [chunk])
        if created:
            log("pool_creating", pool_id=pool.pool_id, name=pool.name, size_bytes=pool.size_bytes)
            self._keeper.commit(
                pool,
                self._pools.record(pool),
                progress=lambda committed_bytes: self._pools.committed(pool, committed_bytes),
                done=lambda outcome: self._committed(pool, outcome),
            )
        connection.reply(request_id, messages.PoolCreated(pool=self._pools.describe(pool), created=created))

    def wait(self, connection: Connection, request_id: int, body: messages.WaitPool) -> None:
        pool = self._pools.get(body.pool_id)
        if pool.state in ("ready", "failed"):
            connection.reply(request_id, self._pools.describe(pool))
            return
        self._waiting.add(
            pool,
            connection,
            request_id,
            on_removed=PoolNotFound(f"pool {pool.pool_id} was deleted", details={"pool_id": pool.pool_id}),
            timeout_s=body.timeout_s,
            on_timeout=lambda: self._pools.describe(pool),
        )

    def delete(self, connection: Connection, request_id: int, body: messages.DeletePool) -> None:
        pool = self._pools.get(body.pool_id)
        connection.require_room_to_wait()
        if pool.is_held and body.force and body.timeout_s == 0:
            answer = self._force(pool, connection, request_id)
            if answer is not None:
                connection.reply(request_id, answer)
            return
        if not pool.is_held or body.timeout_s == 0:
            self._delete(pool, [(connection, request_id)])
            return
        self._until_free.add(
            pool,
            connection,
            request_id,
            on_removed=messages.PoolDeleted(pool_id=pool.pool_id),
            timeout_s=body.timeout_s,
            on_timeout=lambda: self._force(pool, connection, request_id) if body.force else held(pool),
        )

    def released(self, pool: Pool) -> None:
        """A hold on the pool has ended; if it was the last one, a deletion may go on."""
        if not pool.is_held and (asked := self._until_free.take(pool)):
            self._delete(pool, asked)

    def _force(self, pool: Pool, connection: Connection, request_id: int) -> messages.PoolDeleted | None:
        """Leases end; a pool that is held all the same is forgotten. None: the answer comes when it is deleted."""
        self._pools.end_leases(pool)
        if pool.is_held:
            deleted = self._forget(pool)
        else:
            deleted = None
            self._delete(pool, [(connection, request_id), *self._until_free.take(pool)])
        self._on_unheld()
        return deleted

    def _forget(self, pool: Pool) -> messages.PoolDeleted:
        """The pool is gone, its memory is not: say who keeps it."""
        memory = self._pools.forget(pool)
        reply = messages.PoolDeleted(
            pool_id=pool.pool_id,
            pinned_bytes=pool.reserved_bytes or None,  # none where leases were all that held it
            num_holders=len(pool.holders),
            holders=list(pool.holders.values())[: messages.MAX_HOLDERS_NAMED],
        )
        log(
            "pool_forgotten", level="warning", pool_id=pool.pool_id, name=pool.name, pinned_bytes=pool.reserved_bytes,
            pids=[holder.pid for holder in reply.holders],
        )  # fmt: skip
        if memory is not None:
            self._keeper.close(memory, lambda: None)
        for other, other_id in self._until_free.take(pool):
            other.reply(other_id, reply)
        return reply

    def _delete(self, pool: Pool, asked: list[tuple[Connection, int]]) -> None:
        previous = pool.state
        memory = self._pools.begin_delete(pool)
        for connection, request_id in asked:
            self._waiting.add(pool, connection, request_id, on_removed=messages.PoolDeleted(pool_id=pool.pool_id))
        if memory is not None:
            self._close(pool, memory)
        elif previous == "failed":
            self._removed(pool)
        # A pool that was creating is removed when the thread that commits it has noticed.

    def disconnected(self, connection: Connection) -> None:
        self._waiting.forget(connection)
        self._until_free.forget(connection)

    def drain(self) -> None:
        for pool in self._pools:
            pool.abandoned.set()
        self.end_waiting()

    def end_waiting(self) -> None:
        """Leave nobody waiting."""
        for waiting in (self._waiting, self._until_free):
            waiting.end_all(Draining("the worker is ending; ask its successor"))

    def _check_room(self) -> None:
        self._limits.check_pools(len(self._pools))
        limit = self._limits.max_fds_with_pools
        if self._num_clients() + FDS_PER_POOL * (len(self._pools) + 1) > limit:
            raise TooManyClients(
                f"{self._num_clients()} clients and {len(self._pools)} pools use up the {limit} descriptors this worker"
                " may open for them; delete pools, or raise its limit of open files (ulimit -Hn)",
                details={"num_clients": self._num_clients(), "num_pools": len(self._pools)},
            )

    def _committed(self, pool: Pool, outcome: PoolMemory | KvpageError) -> None:
        if pool.state == "deleting":
            if isinstance(outcome, PoolMemory):
                self._close(pool, outcome)
            else:
                self._removed(pool)
            return
        if isinstance(outcome, PoolMemory):
            self._pools.become_ready(pool, outcome)
            self.watch(pool)
            log("pool_ready", pool_id=pool.pool_id, name=pool.name)
        else:
            self._pools.become_failed(pool, outcome)
            log("pool_failed", level="warning", pool_id=pool.pool_id, name=pool.name, reason=outcome.message)
        self._waiting.settled(pool, self._pools.describe(pool))

    def _lost(self, pool: Pool, error: KvpageError) -> None:
        memory = self._pools.lose(pool, error)
        log("pool_lost", level="error", pool_id=pool.pool_id, name=pool.name, reason=error.message)
        if memory is not None:
            self._keeper.close(memory, lambda: None)
        self.released(pool)  # nothing is left that could be held
        self._on_unheld()

    def _close(self, pool: Pool, memory: PoolMemory) -> None:
        self._keeper.close(memory, lambda: self._removed(pool))

    def _removed(self, pool: Pool) -> None:
        self._pools.remove(pool)
        log("pool_deleted", pool_id=pool.pool_id, name=pool.name)
        self._waiting.removed(pool)


def _check_create(body: messages.CreatePool) -> None:
    """What the types of the message cannot say."""
    messages.check_name("pool name", body.name)
    if len(body.plan) > messages.MAX_PLAN_BYTES:
        raise TooLarge(
            f"a plan of {len(body.plan)} bytes; a worker keeps at most {messages.MAX_PLAN_BYTES}",
            details={"length_bytes": len(body.plan), "limit_bytes": messages.MAX_PLAN_BYTES},
        )
