"""What leases do with blocks: take steps, find prefixes, reserve."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvpage.errors import KvpageError, OutOfBlocks
from kvpage.wire import leasing
from kvpage.wire.messages import ReplyBody
from kvpage_server.lease_table import ServedLease, Waiter
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_leasing import Leasing
from kvpage_server.worker_loop import Loop

if TYPE_CHECKING:  # NumPy: not for workers without leases
    from kvpage.pages.leases import Lease


MAX_IDS_LISTED = 500_000  # with how often each is held, half of what a frame takes


class Steps:
    def __init__(self, leases: Leasing, loop: Loop) -> None:
        self._leases, self._loop = leases, loop

    def take_step(self, connection: Connection, request_id: int, body: leasing.TakeStep) -> None:
        from kvpage_server.worker_blocks import granted, step_of

        served = self._leases.table.get(body.lease_id, connection)
        began_s = perf_counter()
        pool, lease = served.blocks.pool, served.lease
        step = step_of(body)

        def work() -> Any:
            return granted(pool.do(lease, step))

        try:
            reply = served.blocks.room.now(lease, body.allocate, work)
        except OutOfBlocks:
            if not body.wait_s:
                raise
            self._wait(served, connection, request_id, body.wait_s, body.allocate, work)
            return
        served.blocks.took(perf_counter() - began_s)
        connection.reply(request_id, reply)
        if body.free:
            served.blocks.room.room_was_made()

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
        from kvpage_server.worker_blocks import hashes_of, packed

        served = self._leases.table.get(body.lease_id, connection)
        hashes = [hashes_of(some) for some in body.hashes]
        match = served.blocks.pool.take_prefix(served.lease, hashes, body.at_most_tokens, body.key)
        reply = leasing.PrefixTaken(
            era=served.blocks.pool.book.era, num_tokens=match.num_tokens, ids=[packed(ids) for ids in match.blocks]
        )
        connection.reply(request_id, reply)

    def find_prefix(self, connection: Connection, request_id: int, body: leasing.FindPrefix) -> None:
        from kvpage_server.worker_blocks import hashes_of, packed

        served = self._leases.table.get(body.lease_id, connection)
        prefix = served.blocks.pool.prefix
        match = prefix.find([hashes_of(some) for some in body.hashes], body.at_most_tokens)
        reply = leasing.PrefixFound(
            era=served.blocks.pool.book.era,
            num_tokens=match.num_tokens,
            ids=[packed(ids) for ids in match.blocks],
            num_revived=list(prefix.cache.num_revived(match)),
        )
        connection.reply(request_id, reply)

    # --- reservations -------------------------------------------------------------------------------------------------

    def reserve(self, connection: Connection, request_id: int, body: leasing.Reserve) -> None:
        from kvpage.pages.reservations import reserve

        served = self._leases.table.get(body.lease_id, connection)

        def work() -> leasing.Reserved:
            return self._reserved(served, reserve(served.blocks.pool, served.lease, body.blocks), body.ttl_s)

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
        from kvpage.pages.reservations import commit_reservation
        from kvpage.pages.steps import Step
        from kvpage_server.worker_blocks import granted

        served = self._leases.table.get(body.lease_id, connection)
        pool, lease = served.blocks.pool, served.lease
        if body.key and body.key == pool.holdings.last(lease.row).key:
            connection.reply(request_id, granted(pool.do(lease, Step(key=body.key))))
            return
        reservation = self._leases.reservation(served, body.reservation_id)
        grant = commit_reservation(pool, reservation, body.blocks, body.key)
        if body.reservation_id not in lease.reservations:
            served.reservation_timers.pop(body.reservation_id).cancel()
        connection.reply(request_id, granted(grant))

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
        from kvpage_server.worker_blocks import packed

        served = self._leases.table.get(body.lease_id, connection)
        held = served.blocks.pool.held(served.lease).get(body.group)
        if held is None:
            connection.reply(request_id, leasing.HeldList(ids=b"", times=b"", is_last=True))
            return
        start = int(held.ids.searchsorted(body.after, side="right")) if body.after else 0
        end = start + MAX_IDS_LISTED
        ids, times = held.ids[start:end], held.times[start:end]
        is_last = end >= len(held.ids)
        connection.reply(request_id, leasing.HeldList(ids=packed(ids), times=packed(times), is_last=is_last))

    def inspect(self, connection: Connection, request_id: int, body: leasing.InspectBlocks) -> None:
        from kvpage_server.worker_blocks import ids_of, packed

        pool = self._leases.table.get(body.lease_id, connection).blocks.pool
        ids = ids_of(body.ids)
        times = packed(pool.blocks.times_held(body.group, ids))
        is_cached = bytes(pool.index.hash_of(body.group, block) is not None for block in ids.tolist())
        connection.reply(request_id, leasing.BlocksInspected(times=times, is_cached=is_cached))

    def find_contents(self, connection: Connection, request_id: int, body: leasing.FindContents) -> None:
        from kvpage_server.worker_blocks import hashes_of

        pool = self._leases.table.get(body.lease_id, connection).blocks.pool
        pool.blocks.counts(body.group)
        found = pool.index.blocks_of(body.group, hashes_of(body.hashes))
        ids = b"".join(block.to_bytes(4, "little") for block in found)
        connection.reply(request_id, leasing.ContentsFound(ids=ids))
