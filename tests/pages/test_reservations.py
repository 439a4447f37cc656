"""Blocks that are set aside go to the lease, all or some at a time, or back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvpage.errors import NotFound, OutOfBlocks, SpecInvalid, StaleHandle, TooManyClients
from kvpage.pages.holding_arrays import MAX_HOLDERS
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import QuotaExceeded
from kvpage.pages.reservations import commit_reservation, reserve
from kvpage.pages.steps import Step
from kvpage.pages.tenants import Tenant
from support.leased_pools import held_of, new_buffer, plan_of, state_of
from support.leased_scenarios import TOKEN

NONE = np.empty(0, np.int32)


def flat(buffer: object = None) -> LeasedPool:
    return LeasedPool(plan_of("flat"), buffer)


def test_reserved_blocks_are_nobody_elses() -> None:
    pool = flat()
    lease, other = pool.open("a").lease, pool.open("b").lease
    reservation = reserve(pool, lease, {0: 6})
    assert held_of(pool, lease) == {}
    with pytest.raises(OutOfBlocks):
        pool.do(other, Step(allocate={0: 3}))
    grant = commit_reservation(pool, reservation)
    assert held_of(pool, lease) == {0: dict.fromkeys(grant.ids[0].tolist(), 1)}
    assert not lease.reservations
    pool.check()


def test_a_part_is_committed_and_the_rest_stays() -> None:
    pool = flat()
    lease = pool.open("a").lease
    reservation = reserve(pool, lease, {0: 5})
    first = commit_reservation(pool, reservation, {0: 2}, key=1)
    again = commit_reservation(pool, reservation, {0: 2}, key=1)
    assert again is first
    second = commit_reservation(pool, reservation, {0: 1}, key=2)
    assert not set(first.ids[0]) & set(second.ids[0])
    with pytest.raises(OutOfBlocks):
        commit_reservation(pool, reservation, {0: 3}, key=3)
    with pytest.raises(SpecInvalid):
        commit_reservation(pool, reservation, {0: -1})
    with pytest.raises(OutOfBlocks):
        commit_reservation(pool, reservation, {5: 1})
    pool.check()
    pool.close_lease(reservation)
    assert pool.blocks.counts(0).used == 3
    with pytest.raises(StaleHandle):
        commit_reservation(pool, reservation)
    pool.check()


def test_the_answer_to_a_commit_that_was_lost_is_given_by_the_next_process() -> None:
    buffer = new_buffer(plan_of("flat"))
    pool = flat(buffer)
    lease = pool.open("a", token=TOKEN).lease
    reservation = reserve(pool, lease, {0: 5})
    grant = commit_reservation(pool, reservation, {0: 3}, key=9)
    pool.close()
    pool = flat(buffer)
    lease = pool.adopt("a", TOKEN)
    assert not lease.reservations
    again = pool.again(lease, 9)
    assert again is not None
    assert set(again.ids[0].tolist()) == set(grant.ids[0].tolist())
    assert pool.blocks.counts(0).used == 3


def test_a_reserved_block_that_others_retain_goes_to_the_lease_all_the_same() -> None:
    """They cannot know of it, but may guess."""
    pool = flat()
    lease, other = pool.open("a").lease, pool.open("b").lease
    reservation = reserve(pool, lease, {0: 2})
    pool.do(other, Step(retain={0: [1, 2]}))
    pool.do(lease, Step(retain={0: [1]}))
    commit_reservation(pool, reservation)
    assert held_of(pool, lease) == {0: {1: 2, 2: 1}}
    assert held_of(pool, other) == {0: {1: 1, 2: 1}}
    pool.check()


def test_a_lease_that_ends_takes_its_reservations_along() -> None:
    pool = flat()
    lease, token = pool.open("a")
    acts: list[Callable[[], object]] = [lambda: pool.adopt("a", token), lambda: pool.close_lease(pool.book.named("a"))]
    for act in acts:
        reservation = reserve(pool, pool.book.named("a"), {0: 4})
        act()
        assert pool.blocks.counts(0).used == 0
        with pytest.raises(StaleHandle):
            commit_reservation(pool, reservation)
        pool.check()
    with pytest.raises(StaleHandle):
        reserve(pool, lease, {0: 1})
    with pytest.raises(NotFound):
        pool.book.named("a")


def test_what_cannot_be_reserved_leaves_nothing_behind() -> None:
    pool = flat()
    pool.book.set_tenants([Tenant(name="t", quota_bytes=4096)])
    lease, poor = pool.open("a").lease, pool.open("b", tenant="t").lease
    before = state_of(pool)
    for holder, counts, error in (
        (lease, {0: 9}, OutOfBlocks), (poor, {0: 2}, QuotaExceeded), (lease, {3: 1}, SpecInvalid)
    ):  # fmt: skip
        with pytest.raises(error):
            reserve(pool, holder, counts)
        assert not holder.reservations
        assert state_of(pool) == before
        pool.check()
    reserve(pool, poor, {0: 1})
    with pytest.raises(QuotaExceeded):
        pool.allocate_one(poor, 0)


def test_reservations_take_rows_as_leases_do() -> None:
    pool = flat()
    lease = pool.open("a").lease
    for _ in range(MAX_HOLDERS - 1):
        reserve(pool, lease, {})
    with pytest.raises(TooManyClients):
        reserve(pool, lease, {})
    pool.close_lease(lease)
    assert len(pool.book) == 0
    pool.check()


def test_what_is_committed_is_to_be_cleared_as_what_is_allocated() -> None:
    pool = LeasedPool(plan_of("states"))
    lease = pool.open("a").lease
    used = pool.do(lease, Step(allocate={1: 3})).ids
    pool.do(lease, Step(free=used))
    reservation = reserve(pool, lease, {1: 8})
    grants = [commit_reservation(pool, reservation, counts) for counts in ({1: 5}, None)]
    clear = sorted(block for grant in grants for block in grant.clear.get(1, NONE).tolist())
    assert clear == sorted(used[1].tolist())
    for grant in grants:
        assert set(grant.clear.get(1, NONE).tolist()) <= set(grant.ids[1].tolist())
    pool.do(lease, Step(free={1: grants[0].ids[1]}))
    reservation = reserve(pool, lease, {1: 5})
    pool.close_lease(reservation)  # nobody cleared them
    assert len(pool.do(lease, Step(allocate={1: 5})).clear[1]) == 5
