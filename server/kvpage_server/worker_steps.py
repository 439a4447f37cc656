"""What leases do with blocks: take steps, find prefixes, reserve."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvpage.errors import KvpageError, OutOfBlocks, TooLarge
from kvpage.wire import leasing
from kvpage.wire.messages import ReplyBody
from kvpage_server.lease_table import ServedLease, Waiter
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_leasing import Leasing
from kvpage_server.worker_loop import Loop

if TYPE_CHECKING:  # NumPy: not for workers without leases
    from kvpage.pages.leases import Lease


MAX_WAITING_BYTES = 64 << 10


class Steps:
    def __init__(self, leases: Leasing, loop: Loop) -> None:
        self._leases, self._loop = leases, loop

    def take_step(self, connection: Connection, request_id: int, body: leasing.TakeStep) -> None:
        served = self._leases.table.get(body.lease_id, connection)
        blocks, lease = served.blocks, served.lease
        began_s = perf_counter()
        work = blocks.work_of(lease, body)
        try:
            reply = blocks.room.now(lease, body.allocate, work)
        except OutOfBlocks:
            done = blocks.again(lease, body.key)  # which needs no room, and stands behind nobody
            if done is None:
                if not body.wait_s:
                    raise
                self._check_waiting(body)
                self._wait(served, connection, request_id, body.wait_s, body.allocate, work)
                return
            reply = done
        blocks.took(perf_counter() - began_s)
        connection.reply(request_id, reply)
        if body.free:
            blocks.room.room_was_made()

    def _check_waiting(self, body: leasing.TakeStep) -> None:
        """Raises `TooLarge` for more than may be kept for, and tried again with, each block that others give back."""
        size = sum(map(len, (*body.free.values(), *body.retain.values())))
        size += sum(len(some.ids) + len(some.hashes) for some in body.commit.values())
        if size > MAX_WAITING_BYTES:
            raise TooLarge(
                f"a step that waits may have {MAX_WAITING_BYTES} bytes of block ids and hashes, this one has {size};"
                " commit, free and retain first, and then wait for what is to be allocated",
                details={"length_bytes": size, "limit_bytes": MAX_WAITING_BYTES},
            )

    def _wait(
        self,
        served: ServedLease,
        connection: Connection,
        request_id: int,
        wait_s: float,
        counts: leasing.Counts,
        work: Callable[[], Any],
    ) -> None:
        connection.require_room_to_wait()
        waiter = Waiter(connection=connection, request_id=request_id)

        def answer(result: ReplyBody | KvpageError) -> None:
            waiter.ticket = None
            served.give_up(waiter)
            if isinstance(result, KvpageError):
                connection.fail(request_id, result)
            else:
                connection.reply(request_id, result)

        def run_out() -> None:
            shortage = served.give_up(waiter)
            if shortage is not None:
                connection.fail(request_id, shortage)

        connection.num_waits += 1
        served.waiters.append(waiter)
        waiter.timer = self._loop.call_after(wait_s, run_out)
        try:
            waiter.ticket = served.blocks.room.wait(served.lease, counts, work, answer)
        except KvpageError:
            served.give_up(waiter)
            raise

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def take_prefix(self, connection: Connection, request_id: int, body: leasing.TakePrefix) -> None:
        served = self._leases.table.get(body.lease_id, connection)
        connection.reply(request_id, served.blocks.take_prefix(served.lease, body))

    def find_prefix(self, connection: Connection, request_id: int, body: leasing.FindPrefix) -> None:
        connection.reply(request_id, self._leases.table.get(body.lease_id, connection).blocks.find_prefix(body))

    # --- reservations -------------------------------------------------------------------------------------------------

    def reserve(self, connection: Connection, request_id: int, body: leasing.Reserve) -> None:
        served = self._leases.table.get(body.lease_id, connection)

        def work() -> leasing.Reserved:
            return self._reserved(served, served.blocks.reserve(served.lease, body.blocks), body.ttl_s)

        try:
            reply = served.blocks.room.now(served.lease, body.blocks, work)
        except OutOfBlocks:
            if not body.wait_s:
                raise
            self._wait(served, connection, request_id, body.wait_s, body.blocks, work)
            return
        connection.reply(request_id, reply)

    def _reserved(self, served: ServedLease, reservation: Lease, ttl_s: float) -> leasing.Reserved:
        reservation_id = reservation.lease_id
        timer = self._loop.call_after(ttl_s, lambda: self._leases.end_reservation(served, reservation_id))
        served.reservation_timers[reservation_id] = timer
        return leasing.Reserved(reservation_id=reservation_id)

    def commit_reservation(self, connection: Connection, request_id: int, body: leasing.CommitReservation) -> None:
        served = self._leases.table.get(body.lease_id, connection)
        reply = served.blocks.again(served.lease, body.key)
        if reply is None:
            reservation = self._leases.reservation(served, body.reservation_id)
            reply = served.blocks.commit(reservation, body.blocks, body.key)
            if body.reservation_id not in served.lease.reservations:
                served.reservation_timers.pop(body.reservation_id).cancel()
        connection.reply(request_id, reply)

    def end_reservation(self, connection: Connection, request_id: int, body: leasing.EndReservation) -> None:
        served = self._leases.table.get(body.lease_id, connection)
        self._leases.end_reservation(served, body.reservation_id)
        connection.reply(request_id, leasing.ReservationEnded(reservation_id=body.reservation_id))

    # --- looking ------------------------------------------------------------------------------------------------------

    def describe(self, connection: Connection, request_id: int, body: leasing.DescribeLease) -> None:
        from kvpage_server.blocks_state import lease_state

        served = self._leases.table.get(body.lease_id, connection)
        state = lease_state(served.blocks, served.lease, self._loop.clock())
        connection.reply(request_id, leasing.LeaseDescribed(pool_id=served.pool.pool_id, lease=state))

    def list_held(self, connection: Connection, request_id: int, body: leasing.ListHeld) -> None:
        served = self._leases.table.get(body.lease_id, connection)
        connection.reply(request_id, served.blocks.held(served.lease, body.group, body.after))

    def inspect(self, connection: Connection, request_id: int, body: leasing.InspectBlocks) -> None:
        blocks = self._leases.table.get(body.lease_id, connection).blocks
        connection.reply(request_id, blocks.inspect(body.group, body.ids))

    def find_contents(self, connection: Connection, request_id: int, body: leasing.FindContents) -> None:
        blocks = self._leases.table.get(body.lease_id, connection).blocks
        connection.reply(request_id, blocks.find_contents(body.group, body.hashes))
