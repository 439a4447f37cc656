"""The block state of a pool that a worker serves, copied out of the control block and proved there.

A worker proves nothing while it serves. What it keeps in shared memory is looked at from outside: while it is quiet or
stopped, or right after it was killed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Self

import numpy as np

from kvpage.pages.arrays import Arrays
from kvpage.pages.clearing import Clearing
from kvpage.pages.geometry import Geometry
from kvpage.pages.holdings import Holdings
from kvpage.pages.lease_records import LeaseRecords
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.pool_buffer import PoolBuffer
from kvpage.plans import Plan
from kvpage.wire import leasing
from kvpage.wire.channel import close_fds
from kvpage.wire.client import WorkerClient
from support.leased_pools import held_of
from support.pools import export_pool

Book = dict[int, dict[int, int]]
"""What one lease holds: by group and block, how often."""

_STATE = struct.Struct("<QQ")
_STATE_AT = 24  # of the control block's header: where the block state begins, and its size


class ControlView:
    """The block state of a pool, for a test to copy: the same memory, whichever worker serves it."""

    def __init__(self, keeper: WorkerClient, pool_id: str) -> None:
        """`keeper`: of role `api`."""
        _, fds = export_pool(keeper, pool_id)
        self._fd = fds.pop()
        close_fds(fds)

    def copy(self) -> bytearray:
        start, size_bytes = _STATE.unpack(os.pread(self._fd, _STATE.size, _STATE_AT))
        assert size_bytes, "the pool keeps no block state"
        state = bytearray(size_bytes)
        assert os.preadv(self._fd, [state], start) == size_bytes
        return state

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prove(plan: Plan, state: bytearray, *, is_quiet: bool = True) -> dict[str, Book]:
    """What each lease holds, by its name. Raises `KvpageError` or AssertionError for a state that is not sound.

    `is_quiet`: nothing was under way, so that the pool's counts and its leases must say the same as they stand. Else
    whatever was under way is taken back first, as the next worker would do.
    """
    if not any(state[:8]):
        return {}  # no block of it was ever leased
    if is_quiet:
        fault = quiet_fault(plan, state)
        assert fault is None, fault
    with LeasedPool(plan, state) as pool:
        pool.check()
        return {lease.record.name: held_of(pool, lease) for lease in pool.book}


def quiet_fault(plan: Plan, state: bytearray) -> str | None:
    """What is not as a worker leaves it after each answer, if anything."""
    geometry = Geometry.of(plan)
    parts = PoolBuffer.of(geometry, state)
    if parts.holdings.cast("q")[1]:
        return "an operation is under way"
    holdings, records = Holdings(geometry, parts.holdings), LeaseRecords(parts.records)
    arrays = Arrays(geometry, parts.blocks, Clearing.of(plan))
    fault = holdings.check()
    if fault:
        return fault
    if arrays.num_logged:
        return "blocks are being changed"
    times = holdings.times_held()
    if not np.array_equal(arrays.refs, times):
        slot = int(np.flatnonzero(arrays.refs != times)[0])
        return f"block slot {slot} is counted {arrays.refs[slot]} times, and its holders hold it {times[slot]} times"
    if not holdings.holders() <= records.rows():
        return f"rows {sorted(holdings.holders() - records.rows())[:8]} have blocks and are no leases"
    owners, is_used = holdings.owners(), holdings.owners() > 0
    if not np.array_equal(arrays.owners[is_used], owners[is_used]):
        return "a slab is another group's than those who hold blocks of it say"
    return None


def numbers_fault(told: leasing.BlocksState, books: Mapping[str, Book]) -> str | None:
    """Where what a worker tells of a pool is not what leases hold, if anywhere; nothing is reserved."""
    names = {lease.name: lease for lease in told.leases}
    if set(names) != set(books) or told.num_leases != len(books):
        return f"{sorted(names)} are told of, and leases are {sorted(books)}"
    for name, book in books.items():
        counted = [len(book.get(group, ())) for group in range(len(told.groups))]
        if names[name].blocks != counted or any(names[name].reserved):
            return f"{name} is said to hold {names[name].blocks} and {names[name].reserved}, and holds {counted}"
    for group, said in enumerate(told.groups):
        used = len({block for book in books.values() for block in book.get(group, ())})
        leased = sum(len(book.get(group, ())) for book in books.values())
        if (said.used, said.leased + said.quarantined) != (used, leased):
            return f"group {group} is said to be used {said.used} and {said.leased}, and is {used} and {leased}"
    if sum(group.slabs for group in told.groups) + told.free_slabs + 1 != told.num_slabs:
        return f"slabs do not add up: {told}"
    return None
