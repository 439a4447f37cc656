"""A new worker's side of replacing one that runs: it fetches everything, then says that it serves from now on."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvpage.errors import Conflict, DeviceUnavailable, PoolNotFound, ProtocolError, WorkerLost
from kvpage.memory.host import HostMemory
from kvpage.wire import messages, succession
from kvpage.wire.channel import close_fds
from kvpage.wire.client import Reply, WorkerClient
from kvpage.wire.credentials import pidfd_of
from kvpage_server.control_block import ControlRecord
from kvpage_server.worker_device import DeviceMemory
from kvpage_server.worker_import import import_pool
from kvpage_server.worker_log import log
from kvpage_server.worker_pool_entry import PoolMemory

SETTLE_S = 120.0
"""How long pools that are being created or deleted may take before anything is taken."""
DEATH_S = 5.0


@dataclass(slots=True, kw_only=True)
class Estate:
    """What a worker leaves to its successor. Whoever takes something out of it owns that."""

    epoch: str
    memory_limit_bytes: int
    next_hold_id: int
    listening_fd: int
    pools: list[tuple[ControlRecord, PoolMemory]] = field(default_factory=list)
    connections: list[tuple[socket.socket, succession.ConnectionTaken]] = field(default_factory=list)


class Takeover:
    """The connection to the predecessor. Closing it before `finish` leaves everything with the predecessor."""

    def __init__(self, socket_path: Path, device: str, memory: DeviceMemory, control_memory: HostMemory) -> None:
        """Raises `WorkerLost` when no worker listens."""
        self._client = WorkerClient(socket_path, role="api", client_name="kvpage worker --replace")
        self._pidfd = pidfd_of(self._client.fileno())
        self._device = device
        self._memory = memory
        self._control_memory = control_memory
        self._began_s = 0.0

    def close(self) -> None:
        """May be called twice."""
        self._client.close()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def fetch(self) -> Estate:
        """Stop the predecessor and fetch what it has. If it dies meanwhile, what has been fetched is what there is:
        the rest is with whoever else keeps it.
        """
        taken, listening_fd = self._begin()
        estate = Estate(
            epoch=self._client.epoch,
            memory_limit_bytes=taken.memory_limit_bytes,
            next_hold_id=taken.next_hold_id,
            listening_fd=listening_fd,
        )
        try:
            estate.pools.extend(self._pool(pool_id) for pool_id in taken.pool_ids)
            for number in range(taken.num_connections):
                self._fetch_connection(number, estate)
        except WorkerLost as error:
            self._require_dead(error)
        return estate

    def finish(self) -> int | None:
        """From here on the caller is the worker, with the lock whose descriptor this returns; None when the predecessor
        has died, and its lock with it. Raises `DeviceUnavailable` when the predecessor goes on instead.
        """
        lock_fd = None
        try:
            reply = self._client.request(succession.FinishTakeOver())
            if not isinstance(reply.body, succession.TakeOverFinished) or len(reply.fds) != 1:
                raise _wrong(reply)
            [lock_fd] = reply.fds
        except WorkerLost as error:
            self._require_dead(error)
        log("took_over", pause_s=round(time.monotonic() - self._began_s, 4))
        self.close()
        return lock_fd

    def _begin(self) -> tuple[succession.TakenOver, int]:
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            self._began_s = time.monotonic()
            try:
                reply = self._client.request(succession.TakeOver())
            except Conflict as error:
                pool_id, left_s = error.details.get("pool_id"), deadline_s - time.monotonic()
                if pool_id is None or left_s <= 0:
                    raise
                self._settle(str(pool_id), left_s)
                continue
            if not isinstance(reply.body, succession.TakenOver) or len(reply.fds) != 1:
                raise _wrong(reply)
            return reply.body, reply.fds[0]

    def _settle(self, pool_id: str, timeout_s: float) -> None:
        with contextlib.suppress(PoolNotFound):  # it was being deleted
            self._client.ask(messages.WaitPool(pool_id=pool_id, timeout_s=timeout_s), messages.PoolState)

    def _pool(self, pool_id: str) -> tuple[ControlRecord, PoolMemory]:
        reply = self._client.request(messages.ExportPool(pool_id=pool_id))
        if not isinstance(reply.body, messages.Exported) or len(reply.fds) != len(reply.body.chunks) + 1:
            raise _wrong(reply)
        return import_pool(
            reply.body.chunks,
            reply.fds,
            device=self._device,
            memory=self._memory,
            control_memory=self._control_memory,
        )

    def _fetch_connection(self, number: int, estate: Estate) -> None:
        reply = self._client.request(succession.TakeConnection(number=number))
        if not isinstance(reply.body, succession.ConnectionTaken) or len(reply.fds) > 1:
            raise _wrong(reply)
        for fd in reply.fds:  # none: the client has left
            estate.connections.append((socket.socket(fileno=fd), reply.body))

    def _require_dead(self, error: WorkerLost) -> None:
        """A connection that ends may mean that the predecessor has changed its mind, and then it serves."""
        poll = select.poll()
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(DEATH_S * 1000):
                log("predecessor_died", level="warning")
                return
        raise DeviceUnavailable(f"the worker did not hand over, and goes on: {error.message}") from error


def _wrong(reply: Reply) -> ProtocolError:
    close_fds(reply.fds)
    return ProtocolError(f"the worker answered with {type(reply.body).__name__} and {len(reply.fds)} descriptors")
