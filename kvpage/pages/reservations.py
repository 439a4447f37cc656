"""Blocks set aside for a lease before it says what for: reserved on several pools, then committed on all or given back.

reservation = reserve(pool, lease, {0: 12})
grant = commit_reservation(pool, reservation)       # or pool.close_lease(reservation)
"""

from __future__ import annotations

import numpy as np

from kvpage.errors import OutOfBlocks
from kvpage.pages.batches import whole_number
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease
from kvpage.pages.steps import Counts, Grant, Step


def reserve(pool: LeasedPool, lease: Lease, counts: Counts) -> Lease:
    """Blocks that nobody else is given, for `commit_reservation` or `close_lease`. Nobody is told which they are, so
    they are given back when the process ends. Raises as `LeasedPool.do`.
    """
    reservation = pool.book.reserve(lease)
    try:
        grant = pool.do(reservation, Step(allocate=counts))
    except BaseException:
        pool.book.remove(reservation)
        raise
    reservation.reserved = grant.ids
    return reservation


def commit_reservation(pool: LeasedPool, reservation: Lease, counts: Counts | None = None, key: int = 0) -> Grant:
    """So many of its blocks (None: all) are the lease's from now on; the rest stays reserved. A reservation of which
    nothing is left ends. Raises `OutOfBlocks` for more than are left of it.
    """
    lease = reservation.parent
    assert lease is not None
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
    with pool.operation(lease, key, sum(map(len, taken.values()))) as serial:
        for group, ids in taken.items():
            pool.holdings.give(lease.row, pool.geometry.slots_of(group, ids.astype(np.intp)), serial)
    reservation.reserved = left
    pool.usage.change(reservation, {group: -len(ids) for group, ids in taken.items()})
    pool.usage.change(lease, {group: len(ids) for group, ids in taken.items()})
    # What was to be cleared was told to the reservation, whose grant nobody has seen.
    stale = {} if reservation.last_grant is None else reservation.last_grant.clear
    clear = {group: np.intersect1d(ids, taken[group]) for group, ids in stale.items() if group in taken}
    lease.last_grant = Grant(ids=taken, clear={group: ids for group, ids in clear.items() if len(ids)})
    if not any(map(len, left.values())):
        pool.close_lease(reservation)
    return lease.last_grant
