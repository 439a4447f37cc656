"""Handing memory out and taking it over: attach, detach, export, adopt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from kvpage.errors import Conflict, NotFound, SpecInvalid, StaleHandle, TooManyClients
from kvpage.memory.base import Chunk
from kvpage.wire import messages
from kvpage.wire.channel import close_fds
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_import import files_of, import_pool
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_log import log
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pool_entry import Pool, PoolMemory
from kvpage_server.worker_pools import PoolTable


class PoolSharing:
    """Everything that moves descriptors between processes."""

    def __init__(
        self,
        pools: PoolTable,
        keeper: MemoryKeeper,
        limits: Limits,
        *,
        on_released: Callable[[Pool], None],
        on_adopted: Callable[[Pool], None],
        on_kept: Callable[[], None],
    ) -> None:
        """`on_kept` is called before another process gets what it takes to keep a pool."""
        self._pools = pools
        self._keeper = keeper
        self._limits = limits
        self._on_released = on_released
        self._on_adopted = on_adopted
        self._on_kept = on_kept

    def attach(self, connection: Connection, request_id: int, body: messages.Attach) -> None:
        connection.require_acknowledged()
        if len(connection.holds) >= self._limits.max_holds:
            raise TooManyClients(f"this connection has {len(connection.holds)} holds, the limit; detach some")
        pool = self._chosen(body)
        fds = _exported(pool.require_ready().chunks)
        peer = connection.peer
        hold_id = self._pools.hold(pool, pid=peer.pid, uid=peer.uid, client_name=connection.client_name)
        connection.holds[hold_id] = pool
        reply = messages.Attached(
            hold_id=hold_id,
            pool=self._pools.describe(pool),
            plan=None if body.known_plan_id == pool.plan_id else pool.plan,
            chunks=list(pool.chunks),
        )
        connection.reply(request_id, reply, fds)

    def _chosen(self, body: messages.Attach) -> Pool:
        if (body.pool_id is None) == (body.name is None):
            raise SpecInvalid("Attach takes either a pool_id or a name")
        if body.epoch is not None and body.epoch != self._pools.epoch:
            raise StaleHandle(
                f"the handle is of epoch {body.epoch}; this worker serves epoch {self._pools.epoch}: the memory the"
                " handle meant is lost, look the pool up again",
                details={"epoch": self._pools.epoch},
            )
        pool = self._pools.find(body.name) if body.name is not None else self._pools.get(str(body.pool_id))
        if body.plan_id is not None and body.plan_id != pool.plan_id:
            raise StaleHandle(
                f"pool {pool.pool_id} has plan {pool.plan_id}, not {body.plan_id}; read its plan again",
                details={"plan_id": pool.plan_id},
            )
        return pool

    def detach(self, connection: Connection, request_id: int, body: messages.Detach) -> None:
        pool = connection.holds.pop(body.hold_id, None)
        if pool is None:
            raise NotFound(f"this connection has no hold {body.hold_id}", details={"hold_id": body.hold_id})
        self._pools.release(pool, body.hold_id)
        connection.reply(request_id, messages.Detached(hold_id=body.hold_id))
        self._on_released(pool)

    def disconnected(self, connection: Connection) -> None:
        holds = dict(connection.holds)
        connection.holds.clear()
        for hold_id, pool in holds.items():
            self._pools.release(pool, hold_id)
            self._on_released(pool)

    def export(self, connection: Connection, request_id: int, body: messages.ExportPool) -> None:
        connection.require_api()
        connection.require_acknowledged()
        pool = self._pools.get(body.pool_id)
        fds = _exported(pool.require_ready().all)
        self._on_kept()
        reply = messages.Exported(pool=self._pools.describe(pool), chunks=list(pool.chunks))
        connection.reply(request_id, reply, fds)

    def adopt(self, connection: Connection, request_id: int, body: messages.AdoptPool, fds: list[int]) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(close_fds, fds)
            connection.require_api()
            self._limits.check_pools(len(self._pools))
            undo.pop_all()
        keeper = self._keeper
        record, memory = import_pool(
            body.chunks, fds, device=self._pools.device, memory=keeper.device, control_memory=keeper.control_memory
        )
        with contextlib.ExitStack() as undo:
            undo.callback(memory.close)
            self._require_new(memory)
            pool = self._pools.adopt(record, memory)
            undo.pop_all()
        self._on_adopted(pool)
        self._on_kept()
        log("pool_adopted", pool_id=pool.pool_id, name=pool.name, size_bytes=pool.size_bytes, epoch=self._pools.epoch)
        connection.reply(request_id, self._pools.describe(pool))

    def _require_new(self, memory: PoolMemory) -> None:
        """Raises `Conflict` for host memory that another pool has already."""
        if self._pools.device != "host":
            return
        files = files_of(memory)
        for pool in self._pools:
            if pool.memory is not None and files & files_of(pool.memory):
                raise Conflict(f"pool {pool.pool_id} has this memory already", details={"pool_id": pool.pool_id})


def _exported(chunks: Iterable[Chunk]) -> list[int]:
    fds: list[int] = []
    with contextlib.ExitStack() as undo:
        undo.callback(close_fds, fds)
        fds.extend(chunk.export() for chunk in chunks)
        undo.pop_all()
    return fds
