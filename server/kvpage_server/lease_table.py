"""All leases that a worker serves, by id: whose they are, and when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpage.errors import KvpageError, PermissionDenied, StaleHandle, shorten
from kvpage.wire import leasing
from kvpage.wire.values import as_name
from kvpage_server.lease_owners import Departure, born
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_loop import Timer
from kvpage_server.worker_pool_entry import Pool

if TYPE_CHECKING:  # NumPy: not for workers without leases
    from kvpage.pages.leases import Lease, Owner
    from kvpage.pages.waiting_room import Ticket
    from kvpage_server.worker_blocks import PoolBlocks


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A request that waits for blocks."""

    connection: Connection
    request_id: int
    ticket: Ticket | None = None
    timer: Timer | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ServedLease:
    pool: Pool
    blocks: PoolBlocks
    lease: Lease
    connection: Connection | None = None
    """Its owner's; None: it lives by time, or its owner is not there."""
    hold_id: int | None = None
    """While somebody is there to whom the pool must not be taken away."""
    departure: Departure | None = None
    """What tells that its owner is gone, which several leases may wait for."""
    timer: Timer | None = None
    """Ends it, or has it renewed by then."""
    waiters: list[Waiter] = field(default_factory=list)
    reservation_timers: dict[str, Timer] = field(default_factory=dict)

    def opened(self, token: str | None) -> leasing.LeaseOpened:
        """For its owner. `token`: where it was made here."""
        lease, blocks = self.lease, self.blocks
        return leasing.LeaseOpened(
            pool_id=self.pool.pool_id,
            lease_id=lease.lease_id,
            token=token,
            generation=lease.record.generation,
            tenant=lease.tenant,
            salt=blocks.pool.book.tenant(lease.tenant).salt,
            blocks=list(lease.blocks),
            clears_on_reuse=[blocks.clearing.is_on_reuse(group) for group in range(len(lease.blocks))],
        )

    def done_waiting(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)
        waiter.connection.num_waits -= 1
        if waiter.timer is not None:
            waiter.timer.cancel()

    def give_up(self, waiter: Waiter) -> KvpageError | None:
        """It waits no more. Returns why it was not served; None where it has just been. Others may be served then, of
        the same lease too."""
        self.done_waiting(waiter)
        return None if waiter.ticket is None else self.blocks.room.give_up(waiter.ticket)

    def give_up_all(self, of: Connection | None = None) -> list[Waiter]:
        """Nobody waits for it any more (with `of`: nobody of this connection), and none of them has been served."""
        given_up = [waiter for waiter in self.waiters if of is None or waiter.connection is of]
        for waiter in given_up:
            self.done_waiting(waiter)
        self.blocks.room.give_up_all([waiter.ticket for waiter in given_up if waiter.ticket is not None])
        return given_up

    def await_end(self, departure: Departure, gone: Callable[[ServedLease], None]) -> None:
        """Have `gone` called when its owner is."""
        self.departure = departure
        departure.add(self, lambda: gone(self))

    def stop(self) -> None:
        """Wait for nothing any more that would end it."""
        if self.timer is not None:
            self.timer.cancel()
        if self.departure is not None:
            self.departure.forget(self)
        self.departure = self.timer = None

    def stop_all(self) -> None:
        """As `stop`, and its reservations end by no time either."""
        self.stop()
        for timer in self.reservation_timers.values():
            timer.cancel()
        self.reservation_timers.clear()


class LeaseTable:
    def __init__(self) -> None:
        self._leases: dict[str, ServedLease] = {}

    def __iter__(self) -> Iterator[ServedLease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_fds(self) -> int:
        """Descriptors that waiting for owners takes."""
        departures = {served.departure for served in self._leases.values() if served.departure is not None}
        return sum(departure.num_fds for departure in departures)

    def of_pool(self, pool: Pool) -> list[ServedLease]:
        return [served for served in self if served.pool is pool]

    def add(self, served: ServedLease) -> None:
        self._leases[served.lease.lease_id] = served

    def pop(self, lease_id: str) -> ServedLease | None:
        return self._leases.pop(lease_id, None)

    def quick(self, connection: Connection, body: leasing.TakeStep) -> leasing.Granted | None:
        """The answer to a step of one block of a lease that is bound to the connection, where nothing is in its way."""
        served = self._leases.get(body.lease_id)
        if served is None or served.connection is not connection:
            return None
        return served.blocks.quick(served.lease, body)

    def get(self, lease_id: str, connection: Connection) -> ServedLease:
        """Raises `StaleHandle` where there is none, `PermissionDenied` where it is another connection's."""
        served = self._leases.get(lease_id)
        if served is None:
            raise stale(lease_id)
        if served.connection is not connection and served.connection is not None:
            raise PermissionDenied(
                f"{lease_id} is bound to another connection; use that one, or adopt the lease by its name and token"
            )
        if served.connection is None and not served.lease.record.ttl_s:
            raise stale(lease_id)  # its owner is not there, so this is somebody else
        return served


def stale(lease_id: str) -> KvpageError:
    return StaleHandle(
        f"there is no {shorten(lease_id)} for you: it was closed, its time ran out, or another has adopted it; open a"
        " lease, or adopt this one by its name and token",
        details={"lease_id": shorten(lease_id)},
    )


def owner_of(connection: Connection, key: int) -> Owner:
    """The process at the other end."""
    from kvpage.pages.leases import Owner

    pid = connection.peer.pid
    return Owner(pid=pid, born=born(pid) if pid else 0, client_name=connection.client_name, key=key)


def holder_name(lease_name: str) -> str:
    """How the hold is shown that a lease is."""
    return as_name(f"lease {lease_name}")
