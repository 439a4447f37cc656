"""Leases as a worker serves them: opened, adopted, renewed and closed, and ended when their owners are gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvpage.errors import (
    KvpageError,
    NotFound,
    PoolNotFound,
    StaleHandle,
    TooManyClients,
    shorten,
)
from kvpage.wire import leasing
from kvpage.wire.messages import Holder
from kvpage_server.lease_owners import Departure, pidfd_by_number, pidfd_of_peer
from kvpage_server.lease_table import LeaseTable, ServedLease, holder_name, owner_of, stale
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_pool_blocks import LeasablePools, was_ever_leased
from kvpage_server.worker_pool_entry import Pool
from kvpage_server.worker_pools import PoolTable

if TYPE_CHECKING:  # NumPy: not for workers without leases
    from kvpage.pages.leases import Lease


LeaseOwner: TypeAlias = tuple[Connection, int]
"""Who is still there, and the hold that its lease is."""


END_AGAIN_S = 0.5


class Leasing:
    """The life of leases; what they do with blocks is in `worker_steps`."""

    def __init__(
        self,
        pools: PoolTable,
        loop: Loop,
        limits: Limits,
        *,
        on_released: Callable[[Pool], None],
        on_parted: Callable[[Pool], None],
    ) -> None:
        """`on_released` is called when a lease, and the hold on its pool that it is, has ended; `on_parted` when blocks
        of a pool cannot be leased any more.
        """
        self._pools, self._loop, self._limits = pools, loop, limits
        self._on_released, self._on_parted = on_released, on_parted
        self.blocks = LeasablePools(pools, loop)
        self.table = LeaseTable()
        self._pidfds: dict[Connection, int | None] = {}
        """Of the processes at the other end of connections that have leases."""
        pools.on_parted = self._parted

    @property
    def num_fds(self) -> int:
        """Descriptors that it takes to see owners end."""
        return len(self._pidfds) + self.table.num_fds

    # --- going on -----------------------------------------------------------------------------------------------------

    def found_again(self, pool: Pool, owners: Mapping[str, LeaseOwner]) -> None:
        """A pool of a worker that died or was replaced is served from here on, and so are its leases.

        `owners`: by lease id, of those who have stayed connected.
        """
        if not was_ever_leased(pool):
            return
        try:
            blocks = self.blocks.of(pool)
        except Exception as error:  # noqa: BLE001 - what other processes can write into must not end this one
            log("blocks_lost", level="error", pool_id=pool.pool_id, reason=str(error))
            return
        departures: dict[tuple[int, int], Departure] = {}
        for lease in blocks.pool.book:
            served = ServedLease(pool=pool, blocks=blocks, lease=lease)
            self.table.add(served)
            owner = owners.get(lease.lease_id)
            if owner is not None:
                self._go_on_with(served, *owner)
            else:
                self._go_on_alone(served, departures)

    def _go_on_with(self, served: ServedLease, connection: Connection, hold_id: int) -> None:
        peer, name = connection.peer, holder_name(served.lease.record.name)
        holder = Holder(hold_id=hold_id, pid=peer.pid, uid=peer.uid, client_name=name)
        self._pools.restore_hold(served.pool, holder)
        served.hold_id, served.lease.state = hold_id, "active"
        self._know_process(connection)
        self._bind(served, connection, hold_id)

    def _go_on_alone(self, served: ServedLease, departures: dict[tuple[int, int], Departure]) -> None:
        """A lease that is found again, without its owner's connection."""
        lease, record = served.lease, served.lease.record
        expires_s = served.blocks.pool.book.expires_s(lease)
        if record.ttl_s:
            lease.state = "active"
            name = holder_name(record.name)
            served.hold_id = self._pools.hold(served.pool, pid=record.pid, uid=os.geteuid(), client_name=name)
            self._end_at(served, expires_s or self._loop.clock() + record.ttl_s)
        elif expires_s is not None:
            lease.state = "kept"
            self._end_at(served, expires_s)
        else:
            process = record.pid, record.born
            if process not in departures:  # one for all leases of a process: each takes a descriptor
                departures[process] = self._departure(*process)
            served.await_end(departures[process], self._owner_gone)

    def _departure(self, pid: int, began: int) -> Departure:
        """Of a process that another worker has served."""
        pidfd, grace_s = None, self._limits.lease_grace_s
        if pid:
            try:
                pidfd = pidfd_by_number(pid, began)
            except ProcessLookupError:
                grace_s = 0.0
            except OSError as error:
                log("owner_not_seen", level="warning", pid=pid, reason=str(error))
        return Departure(self._loop, pidfd, grace_s)

    def _parted(self, pool: Pool) -> None:
        """The pool is going: its leases end, and nobody is asked."""
        for served in self.table.of_pool(pool):
            self._forget(served, PoolNotFound(f"pool {pool.pool_id} is not there any more, and none of its leases"))
            hold_id, served.hold_id = served.hold_id, None
            if hold_id is not None:
                self._pools.release(pool, hold_id)
        self.blocks.close(pool)
        self._on_parted(pool)

    def leave(self) -> None:
        """All leases are another worker's from now on: none of them ends here."""
        for served in self.table:
            served.stop_all()
            self.table.pop(served.lease.lease_id)

    # --- beginning ----------------------------------------------------------------------------------------------------

    def open(self, connection: Connection, request_id: int, body: leasing.OpenLease) -> None:
        pool = self.blocks.chosen(body.pool_id, body.pool_name)
        blocks = self.blocks.of(pool)
        if body.token is not None and blocks.pool.book.is_of(body.name, body.key):
            self.adopt(connection, request_id, _same(body, pool))
            return
        self._check_owner(connection, body.ttl_s)
        opened = blocks.pool.open(
            body.name,
            owner_of(connection, body.key),
            tenant=body.tenant,
            token=body.token,
            ttl_s=body.ttl_s,
            keep_s=body.keep_s,
        )
        blocks.num_opened += 1
        served = ServedLease(pool=pool, blocks=blocks, lease=opened.lease)
        self._begin(served, connection)
        connection.reply(request_id, served.opened(opened.token))

    def adopt(self, connection: Connection, request_id: int, body: leasing.AdoptLease) -> None:
        pool = self.blocks.chosen(body.pool_id, body.pool_name)
        blocks = self.blocks.of(pool)
        there = blocks.pool.book.named(body.name)
        before = there.lease_id
        is_same = blocks.pool.book.is_of(body.name, body.key)  # its owner has not heard that it is
        if body.generation not in (None, there.record.generation) and not is_same:
            raise StaleHandle(
                f"lease {shorten(body.name)} is of generation {there.record.generation}, not {body.generation}: another"
                " has adopted it; it is not yours any more"
            )
        self._check_owner(connection, body.ttl_s)
        owner = owner_of(connection, body.key)
        lease = blocks.pool.adopt(body.name, body.token, owner, ttl_s=body.ttl_s, keep_s=body.keep_s)
        old = self.table.pop(before)
        if old is not None:
            self._forget(old, stale(before))
        served = ServedLease(pool=pool, blocks=blocks, lease=lease)
        self._begin(served, connection)
        if old is not None:
            self._release_hold(old)
        log("lease_adopted", pool_id=pool.pool_id, name=body.name, generation=lease.record.generation)
        blocks.room.room_was_made()  # what the owner before had reserved
        connection.reply(request_id, served.opened(None))

    def _begin(self, served: ServedLease, connection: Connection) -> None:
        lease, peer = served.lease, connection.peer
        name = holder_name(lease.record.name)
        served.hold_id = self._pools.hold(served.pool, pid=peer.pid, uid=peer.uid, client_name=name)
        self.table.add(served)
        if lease.record.ttl_s:
            self._end_at(served, self._loop.clock() + lease.record.ttl_s)
        else:
            served.blocks.pool.book.expire_at(lease, None)
            self._bind(served, connection, served.hold_id)

    def _bind(self, served: ServedLease, connection: Connection, hold_id: int) -> None:
        served.connection, connection.quick = connection, self.table.quick
        connection.leases[served.lease.lease_id] = (served.pool, hold_id)

    def _check_owner(self, connection: Connection, ttl_s: float) -> None:
        """Raises `TooManyClients` where the connection can have no further lease that is bound to it."""
        if ttl_s:
            return
        limit = self._limits.max_leases
        if len(connection.leases) >= limit:
            raise TooManyClients(
                f"this connection has {limit} leases, the limit; close some, or open them on another connection",
                details={"limit": limit},
            )
        self._know_process(connection)

    def _know_process(self, connection: Connection) -> None:
        if connection not in self._pidfds:  # not when it ends: who it was is not to be seen then
            self._pidfds[connection] = pidfd_of_peer(connection.fileno())

    def renew(self, connection: Connection, request_id: int, body: leasing.RenewLease) -> None:
        served = self.table.get(body.lease_id, connection)
        ttl_s = served.lease.record.ttl_s
        if ttl_s:
            served.stop()
            self._end_at(served, self._loop.clock() + ttl_s)
        connection.reply(request_id, leasing.LeaseRenewed(lease_id=body.lease_id, ttl_s=ttl_s))

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self, connection: Connection, request_id: int, body: leasing.CloseLease) -> None:
        served = self.table.get(body.lease_id, connection)
        self._end(served, owner_died=False)
        connection.reply(request_id, leasing.LeaseClosed(lease_id=body.lease_id))
        self._release_hold(served)  # after the answer: a worker that is draining may end here

    def disconnected(self, connection: Connection) -> None:
        """Its leases are nobody's now, and their blocks stay until its process is gone."""
        pidfd = self._pidfds.pop(connection, None)
        leases = [self.table.get(lease_id, connection) for lease_id in connection.leases]
        if leases:
            departure = Departure(self._loop, pidfd, self._limits.lease_grace_s)
            for served in leases:  # all of them, before what follows ends one
                served.await_end(departure, self._owner_gone)
            for served in leases:
                if served.connection is connection:
                    self._quarantine(served, connection)
        elif pidfd is not None:
            os.close(pidfd)
        if connection.num_waits:
            for served in self.table:  # requests about leases that live by time
                served.give_up_all(connection)

    def _quarantine(self, served: ServedLease, connection: Connection) -> None:
        connection.leases.pop(served.lease.lease_id)
        served.connection, served.lease.state = None, "quarantined"
        served.give_up_all()
        for reservation_id in list(served.lease.reservations):
            self.end_reservation(served, reservation_id)
        self._release_hold(served)

    def _owner_gone(self, served: ServedLease) -> None:
        served.departure = None
        record = served.lease.record
        log("lease_owner_gone", pool_id=served.pool.pool_id, name=record.name, blocks=served.lease.blocks)
        if not record.keep_s:
            self._end_alone(served)
            return
        served.lease.state = "kept"
        self._end_at(served, self._loop.clock() + record.keep_s)

    def _end_at(self, served: ServedLease, when_s: float) -> None:
        served.blocks.pool.book.expire_at(served.lease, when_s)
        delay_s = max(0.0, when_s - self._loop.clock())
        served.timer = self._loop.call_after(delay_s, lambda: self._run_out(served))

    def _run_out(self, served: ServedLease) -> None:
        log("lease_ran_out", pool_id=served.pool.pool_id, name=served.lease.record.name)
        self._end_alone(served)

    def _end(self, served: ServedLease, *, owner_died: bool) -> None:
        """The hold that it was is still to be released."""
        served.blocks.pool.close_lease(served.lease, owner_died=owner_died)  # first: if it fails, all is as it was
        self._forget(served, stale(served.lease.lease_id))
        served.blocks.room.room_was_made()

    def _end_alone(self, served: ServedLease) -> None:
        """Nobody is there to be told that it failed, for want of memory perhaps: it is tried again."""
        try:
            self._end(served, owner_died=True)
            self._release_hold(served)
        except Exception as error:  # noqa: BLE001 - whatever it is, the blocks must not be lost
            log("lease_not_ended", level="error", name=served.lease.record.name, reason=repr(error))
            served.timer = self._loop.call_after(END_AGAIN_S, lambda: self._end_alone(served))

    def _forget(self, served: ServedLease, why: KvpageError) -> None:
        """It is nobody's, and whoever waits is told so."""
        served.stop_all()
        self._forget_waiters(served, why)
        self.table.pop(served.lease.lease_id)
        if served.connection is not None:
            served.connection.leases.pop(served.lease.lease_id, None)
            served.connection = None

    def _forget_waiters(self, served: ServedLease, why: KvpageError) -> None:
        for waiter in served.give_up_all():
            waiter.connection.fail(waiter.request_id, why)

    def reservation(self, served: ServedLease, reservation_id: str) -> Lease:
        """Raises `NotFound`."""
        reservation = served.lease.reservations.get(reservation_id)
        if reservation is None:
            raise NotFound(f"the lease has no {shorten(reservation_id)}: it was committed, given back, or ran out")
        return reservation

    def end_reservation(self, served: ServedLease, reservation_id: str) -> None:
        """Its blocks are free again. Raises `NotFound`."""
        reservation = self.reservation(served, reservation_id)
        timer = served.reservation_timers.pop(reservation_id, None)
        if timer is not None:
            timer.cancel()
        served.blocks.pool.close_lease(reservation)
        served.blocks.room.room_was_made()

    def _release_hold(self, served: ServedLease) -> None:
        hold_id, served.hold_id = served.hold_id, None
        if hold_id is not None:
            self._pools.release(served.pool, hold_id)
            self._on_released(served.pool)

    def end_waiting(self, error: KvpageError) -> None:
        """Leave nobody waiting."""
        for served in self.table:
            self._forget_waiters(served, error)


def _same(body: leasing.OpenLease, pool: Pool) -> leasing.AdoptLease:
    """By which its owner goes on with a lease that was opened, and who did not hear so."""
    return leasing.AdoptLease(
        pool_id=pool.pool_id,
        name=body.name,
        token=str(body.token),
        ttl_s=body.ttl_s,
        keep_s=body.keep_s,
        key=body.key,
    )
