"""Blocks set aside for a lease before it says what for: reserved on several pools, then committed on all or given back.

reservation = reserve(pool, lease, {0: 12})
grant = commit_reservation(pool, reservation)       # or pool.close_lease(reservation)
"""

from __future__ import annotations

import numpy as np

from kvpage.errors import OutOfBlocks, StaleHandle
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import whole_number
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease
from kvpage.pages.steps import Counts, Grant, Step


def reserve(pool: LeasedPool, lease: Lease, counts: Counts) -> Lease:
    """Blocks that nobody else is given, for `commit_reservation` or `close_lease`. Nobody is told which they are, so
    they are given back when the process ends. Raises as `LeasedPool.do`, and `TooManyClients`.
    """
    with pool.whole:
        if lease.state == "ended":
            pool.do(lease, Step())  # says why not
        reservation = pool.book.reserve(lease)
        try:
            reservation.reserved = pool.do(reservation, Step(allocate=counts)).ids
        except BaseException:
            if reservation.state != "ended":
                pool.close_lease(reservation)
            raise
    return reservation


def commit_reservation(pool: LeasedPool, reservation: Lease, counts: Counts | None = None, key: int = 0) -> Grant:
    """So many of its blocks (None: all) are the lease's from now on; the rest stays reserved. A reservation of which
    nothing is left ends. `key`: as of a step. Raises `OutOfBlocks` for more than are left of it, `StaleHandle` where
    it or the lease has ended.
    """
    lease = reservation.parent
    assert lease is not None
    again = pool.again(lease, key)
    if again is not None:
        return again
    if reservation.state == "ended" or lease.state == "ended":
        raise StaleHandle(f"{reservation.lease_id} was committed, given back, or ran out; reserve anew")
    taken, left = _parted(reservation, counts)
    # What was to be cleared was told to the reservation, whose grant nobody has seen.
    clear = {group: np.intersect1d(ids, taken.get(group, ())) for group, ids in reservation.last_grant[1].clear.items()}
    with pool.whole:
        serial = pool.holdings.begin(lease.row, key, sum(map(len, taken.values())))
        for group, ids in taken.items():
            slots = pool.geometry.slots_of(group, ids.astype(np.intp))
            num_new = pool.holdings.move(reservation.row, lease.row, group, slots, serial)
            pool.usage.change(reservation, {group: -len(ids)})
            pool.usage.change(lease, {group: num_new})
        grant = Grant(ids=taken, clear={group: ids for group, ids in clear.items() if len(ids)})
        reservation.reserved = left
        pool.holdings.end()
        lease.last_grant = serial, grant
        if not any(map(len, left.values())):
            pool.close_lease(reservation)
    return grant


def _parted(reservation: Lease, counts: Counts | None) -> tuple[dict[int, Ints], dict[int, Ints]]:
    """By group, the blocks that are taken of it and those that are left."""
    wanted = {group: len(ids) for group, ids in reservation.reserved.items()} if counts is None else counts
    taken, left = {}, dict(reservation.reserved)
    for group, count in wanted.items():
        ids = left.get(group, np.empty(0, np.int32))
        if whole_number(count, "the number of blocks") > len(ids):
            raise OutOfBlocks(
                f"{len(ids)} blocks of group {group} are left of the reservation, not {count}; reserve more",
                details={"group": group, "wanted": count, "available": len(ids)},
            )
        taken[group], left[group] = ids[:count], ids[count:]
    return taken, left
