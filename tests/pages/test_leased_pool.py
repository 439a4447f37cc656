"""Leases of a pool hold its blocks: what is refused changes nothing, and what is wrong is found."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import pytest

from kvpage.errors import (
    Conflict,
    InternalError,
    KvpageError,
    NotFound,
    OutOfBlocks,
    PermissionDenied,
    SpecInvalid,
    StaleHandle,
    TooManyClients,
)
from kvpage.pages.events import EventLog
from kvpage.pages.holding_arrays import MAX_HOLDERS
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease, QuotaExceeded
from kvpage.pages.pool_buffer import PoolBuffer, pool_buffer_bytes
from kvpage.pages.reservations import reserve
from kvpage.pages.steps import Content, Step
from kvpage.pages.tenants import Tenant
from support.interrupting import interrupted
from support.leased_pools import LAYERS, content, held_of, new_buffer, plan_of, state_of
from support.leased_scenarios import NUM_SLABS, TOKEN, furnish

BLOCK_BYTES = 4096  # of the plan "flat"


def flat(num_slabs: int = 9, buffer: object = None) -> LeasedPool:
    return LeasedPool(plan_of("flat", num_slabs), buffer)


def ids(pool: LeasedPool, lease: Lease, count: int) -> list[int]:
    taken: list[int] = pool.do(lease, Step(allocate={0: count})).ids[0].tolist()
    return taken


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_retains_before_it_frees_and_frees_before_it_allocates() -> None:
    pool = flat(5)
    lease = pool.open("a").lease
    blocks = ids(pool, lease, 4)
    grant = pool.do(lease, Step(retain={0: blocks[:1]}, free={0: [blocks[0], *blocks]}, allocate={0: 4}))
    assert sorted(grant.ids[0].tolist()) == [1, 2, 3, 4]
    assert held_of(pool, lease) == {0: {1: 1, 2: 1, 3: 1, 4: 1}}
    pool.check()


def test_every_block_may_be_retained_freed_and_allocated_in_one_step() -> None:
    pool = flat(600)
    lease = pool.open("a").lease
    blocks = ids(pool, lease, 599)
    grant = pool.do(lease, Step(key=1, retain={0: blocks}, free={0: blocks + blocks}, allocate={0: 599}))
    assert sorted(grant.ids[0].tolist()) == blocks
    pool.check()


def test_runs_that_are_refused_leave_slabs_with_the_group_whose_blocks_are_in_them() -> None:
    """The first group's run takes the slab of a block that the step frees, and the second group has no run left."""
    pool = LeasedPool(plan_of("flat groups", 5))
    lease = pool.open("a").lease
    first = pool.do(lease, Step(allocate={0: 1, 1: 3}))
    before = state_of(pool)
    step = Step(free={0: first.ids[0]}, allocate={1: 1, 0: 1}, as_runs=True)
    with pytest.raises(OutOfBlocks):
        pool.do(lease, step)
    pool.check()
    assert state_of(pool) == before


def test_prefix_counts_and_events_go_on_when_a_pool_was_mended() -> None:
    events = EventLog()
    pool = LeasedPool(plan_of("flat groups", 5), events=events)
    lease = pool.open("a").lease
    first = pool.do(lease, Step(allocate={0: 1, 1: 3}))
    pool.do(lease, Step(commit={0: Content(first.ids[0], [content(1)])}))
    counts, told = pool.prefix.counts, len(events.read(events.cursor._replace(number=0)).events)
    with pytest.raises(OutOfBlocks):  # mended: see above
        pool.do(lease, Step(free={0: first.ids[0]}, allocate={1: 1, 0: 1}, as_runs=True))
    assert counts is not None
    assert pool.prefix.counts is not None
    assert pool.prefix.counts.stored == counts.stored == 1
    kinds = [event.kind for event in events.read(events.cursor._replace(number=0)).events[told:]]
    assert kinds.count("removed") == 1  # the block that was given up for the run
    assert state_of(pool).content[0] == frozenset()


def test_one_content_is_committed_to_a_block_at_once() -> None:
    pool = flat()
    lease = pool.open("a").lease
    [block] = ids(pool, lease, 1)
    pool.do(lease, Step(retain={0: [block]}))
    with pytest.raises(SpecInvalid):
        pool.do(lease, Step(commit={0: Content([block, block], [content(1), content(2)])}))
    pool.check()


def test_more_than_is_held_cannot_be_freed_nor_what_another_holds() -> None:
    pool = flat()
    one, other = pool.open("a").lease, pool.open("b").lease
    blocks = ids(pool, one, 3)
    before = state_of(pool)
    for lease, freed in ((one, [blocks[0]] * 2), (other, blocks[:1]), (one, [*blocks, 7])):
        with pytest.raises(Conflict):
            pool.do(lease, Step(key=4, free={0: freed}, allocate={0: 1}))
        with pytest.raises(Conflict):
            pool.free_one(other, 0, blocks[0], 4)
        assert state_of(pool) == before
    pool.check()


def test_blocks_of_a_group_cannot_be_freed_as_those_of_another() -> None:
    pool = LeasedPool(plan_of("flat groups"))
    lease = pool.open("a").lease
    [block] = pool.do(lease, Step(allocate={0: 1})).ids[0].tolist()
    before = state_of(pool)
    acts: list[Callable[[], object]] = [
        lambda: pool.do(lease, Step(free={1: [block]})),
        lambda: pool.free_one(lease, 1, block),
        lambda: pool.do(lease, Step(retain={1: [block]})),
    ]
    for act in acts:
        with pytest.raises(Conflict):
            act()
        pool.check()
        assert state_of(pool) == before


def test_a_key_is_of_the_last_step_only() -> None:
    pool = flat()
    lease = pool.open("a").lease
    first = pool.do(lease, Step(key=1, allocate={0: 1}))
    assert pool.again(lease, 1) is first
    pool.do(lease, Step(key=2, allocate={0: 1}))
    assert pool.again(lease, 1) is None
    assert pool.again(lease, 0) is None
    assert len(pool.do(lease, Step(key=1, allocate={0: 1})).ids[0]) == 1
    assert pool.blocks.counts(0).used == 3


def test_an_answer_of_the_process_before_is_found_again_or_said_to_be_lost() -> None:
    buffer = new_buffer(plan_of("flat"))
    pool = flat(buffer=buffer)
    lease = pool.open("a", token=TOKEN).lease
    first = pool.do(lease, Step(key=1, allocate={0: 3}))
    pool.close()
    pool = flat(buffer=buffer)
    lease = pool.adopt("a", TOKEN)
    assert set(pool.do(lease, Step(key=1)).ids[0].tolist()) == set(first.ids[0].tolist())
    other = pool.open("b").lease
    pool.do(other, Step(retain={0: first.ids[0][:1]}))  # by one who has no business with it
    pool.close()
    pool = flat(buffer=buffer)
    with pytest.raises(Conflict):
        pool.do(pool.adopt("a", TOKEN), Step(key=1))


def test_a_lease_in_the_row_of_another_does_not_know_the_keys_of_that() -> None:
    pool = flat()
    first = pool.open("a").lease
    pool.do(first, Step(key=7, free={}))
    pool.close_lease(first)
    second = pool.open("b").lease
    assert second.row == first.row
    assert len(pool.do(second, Step(key=7, allocate={0: 2})).ids[0]) == 2


def test_what_must_be_cleared_is_said_once_or_anew_by_the_next_process() -> None:
    plan = plan_of("states")
    buffer = new_buffer(plan)
    pool = LeasedPool(plan, buffer)
    lease = pool.open("a", token=TOKEN).lease
    first = pool.do(lease, Step(allocate={1: 1}))
    assert first.clear == {}
    pool.free_one(lease, 1, int(first.ids[1][0]))
    second = pool.do(lease, Step(key=5, allocate={1: 8}))
    assert second.clear[1].tolist() == first.ids[1].tolist()
    pool.close()
    pool = LeasedPool(plan, buffer)
    again = pool.do(pool.adopt("a", TOKEN), Step(key=5))
    assert set(again.clear[1].tolist()) == set(second.ids[1].tolist())


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_a_quota_counts_each_block_once_for_each_lease() -> None:
    pool = flat()
    pool.book.set_tenants([Tenant(name="t", quota_bytes=3 * BLOCK_BYTES)])
    lease, other = (pool.open(name, tenant="t").lease for name in "ab")
    blocks = ids(pool, lease, 2)
    pool.do(lease, Step(retain={0: blocks + blocks}))  # it has them already
    pool.do(other, Step(retain={0: blocks[:1]}))
    acts: list[Callable[[], object]] = [
        lambda: pool.allocate_one(lease, 0),
        lambda: pool.do(other, Step(retain={0: blocks[1:]})),
        lambda: pool.do(lease, Step(free={0: blocks}, allocate={0: 1})),  # it holds them still
    ]
    for act in acts:
        with pytest.raises(QuotaExceeded):
            act()
        pool.check()
    pool.do(other, Step(free={0: blocks[:1]}, allocate={0: 1}))
    assert pool.usage.used_bytes("t") == 3 * BLOCK_BYTES


def test_a_quota_that_became_smaller_refuses_only_what_is_more_than_before() -> None:
    pool = flat()
    lease = pool.open("a", tenant="t").lease
    blocks = ids(pool, lease, 4)
    pool.book.set_tenants([Tenant(name="t", quota_bytes=BLOCK_BYTES)])
    with pytest.raises(QuotaExceeded):
        pool.allocate_one(lease, 0)
    pool.do(lease, Step(free={0: blocks[:2]}, allocate={0: 2}))
    pool.do(lease, Step(free={0: blocks[2:]}))
    assert pool.blocks.counts(0).used == 2


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_adopted_by_name_and_token_only() -> None:
    pool = flat()
    lease, token = pool.open("a")
    blocks = ids(pool, lease, 2)
    for name, wrong, error in (("a", token + "x", PermissionDenied), ("b", token, NotFound)):
        with pytest.raises(error):
            pool.adopt(name, wrong)
    assert pool.book.get(lease.lease_id) is lease
    adopted = pool.adopt("a", token)
    assert adopted.record.generation == 2
    assert held_of(pool, adopted) == {0: dict.fromkeys(blocks, 1)}
    with pytest.raises(StaleHandle):
        pool.do(lease, Step())
    with pytest.raises(Conflict):
        pool.open("a")
    pool.check()


def test_leases_and_reservations_are_as_many_as_there_are_rows() -> None:
    pool = flat()
    leases = [pool.open(f"lease {number}").lease for number in range(MAX_HOLDERS)]
    with pytest.raises(TooManyClients):
        pool.open("one more")
    pool.close_lease(leases[500])
    pool.open("one more")
    pool.check()


def test_a_closed_pool_lets_go_of_its_buffer_and_says_so() -> None:
    size = pool_buffer_bytes(flat().geometry)
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as mapped:  # whose end fails while somebody refers to it
        with flat(buffer=mapped) as pool:
            lease = pool.open("a").lease
            ids(pool, lease, 2)
            assert interrupted(lambda: pool.do(lease, Step(allocate={0: 1})), 20)  # mended
        pool.close()
        assert pool.closed
        assert repr(pool) == "<LeasedPool, closed>"
        acts: list[Callable[[], object]] = [
            lambda: pool.do(lease, Step()),
            lambda: pool.allocate_one(lease, 0),
            lambda: pool.open("b"),
            lambda: pool.adopt("a", TOKEN),
            lambda: pool.close_lease(lease),
            lambda: pool.held(lease),
            lambda: reserve(pool, lease, {0: 1}),
            pool.check,
        ]
        for act in acts:
            with pytest.raises(Conflict):
                act()
    os.close(descriptor)


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    size = pool_buffer_bytes(flat().geometry)
    for buffer in (bytearray(size - 1), bytearray(size + 1), bytes(size)):
        with pytest.raises(SpecInvalid):
            flat(buffer=buffer)


def test_a_buffer_of_another_pool_is_refused() -> None:
    buffer = new_buffer(plan_of("mixed"))
    furnished = LeasedPool(plan_of("mixed"), buffer)
    furnished.do(furnished.open("a").lease, Step(allocate={0: 2}))
    furnished.close()
    other = new_buffer(plan_of("states"))
    size = min(len(buffer), len(other))
    other[:size] = buffer[:size]
    with pytest.raises(KvpageError):
        LeasedPool(plan_of("states"), other)


# --- what is found to be wrong ----------------------------------------------------------------------------------------

Spoil = Callable[[LeasedPool], object]


def row(pool: LeasedPool) -> int:
    return next(iter(pool.book)).row


def spoil_holding(pool: LeasedPool, change: int) -> None:
    holding = pool.holdings._holding
    holding[np.flatnonzero(holding)[0]] += change


FAULTS: dict[str, Spoil] = {
    "a null block is held": lambda pool: pool.holdings._holding.__setitem__(0, 1),
    "an operation is under way": lambda pool: pool.holdings.begin(1),
    "one holds who is no lease": lambda pool: pool.holdings._holding.__setitem__(
        np.flatnonzero(pool.holdings._holding & 2047 < 2000)[-1], 900
    ),
    "one holds who cannot": lambda pool: pool.holdings._holding.__setitem__(
        np.flatnonzero(pool.holdings._holding & 2047 < 2000)[-1], 1500
    ),
    "a shared block has no rows": lambda pool: pool.holdings._holding.__setitem__(
        np.flatnonzero(pool.holdings._holding & 2047 < 2000)[-1], 2047
    ),
    "a row of shares is lost": lambda pool: pool.holdings._unused.append(99),
    "a share is of nothing": lambda pool: pool.holdings._shares.__setitem__((0, 1), 0),
    "a share that is not found": lambda pool: pool.holdings._shares.__setitem__(0, 0),
    "a held block is free": lambda pool: pool.blocks.free(0, pool.held(next(iter(pool.book)))[0].ids[-1:]),
    "a block is held by nobody": lambda pool: pool.blocks.allocate_one(0),
    "a held block is of another group": lambda pool: spoil_holding(pool, 1 << 11),
    "blocks are counted that nobody holds": lambda pool: next(iter(pool.book)).blocks.__setitem__(0, 9),
    "bytes are counted that nobody holds": lambda pool: pool.usage._used_bytes.update(one=1),
    "a lease has no row": lambda pool: pool.book._records._rows.__setitem__(2 * row(pool), 0),
    "a row has no lease": lambda pool: pool.book._records._rows.__setitem__(2 * 50, 1),
    "a row is lost": lambda pool: pool.book._records._unused.pop(),
    "a record is another": lambda pool: pool.book._records.change(
        row(pool), next(iter(pool.book)).record.__class__(lease_id="x", name="y")
    ),
    "a name is lost": lambda pool: pool.book._by_name.popitem(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds(fault: str) -> None:
    pool = furnish("three", new_buffer(plan_of("three", NUM_SLABS))).pool
    pool.check()
    FAULTS[fault](pool)
    with pytest.raises(InternalError):
        pool.check()


def test_held_blocks_of_slabs_that_nobody_owns_are_found() -> None:
    pool = flat()
    lease = pool.open("a").lease
    pool.holdings.begin(lease.row)
    pool.holdings.give(lease.row, 0, np.array([5]))
    pool.holdings.end()
    with pytest.raises(InternalError, match="nobody owns"):
        pool.check()


# --- memory -----------------------------------------------------------------------------------------------------------

MANY_BLOCKS = 1_000_000


def test_a_large_pool_takes_memory_only_for_what_is_used() -> None:
    plan = plan_of("flat", MANY_BLOCKS + 1)
    geometry = flat(MANY_BLOCKS + 1).geometry
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, pool_buffer_bytes(geometry))
    with mmap.mmap(descriptor, pool_buffer_bytes(geometry)) as mapped:
        pool = LeasedPool(plan, mapped)
        lease = pool.open("a", token=TOKEN).lease
        opened = taken_bytes(descriptor)
        assert opened < 7 * MANY_BLOCKS  # owners 2, refs 4
        pool.do(lease, Step(allocate={0: MANY_BLOCKS}))
        used = taken_bytes(descriptor)
        assert used < opened + 30 * MANY_BLOCKS  # their log 8; holding 8, its log 12
        pool.close()
        LeasedPool(plan, mapped).close()
        assert taken_bytes(descriptor) < used + (1 << 20)
    os.close(descriptor)


def taken_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


@pytest.mark.parametrize("name", LAYERS)
def test_the_parts_of_a_buffer_begin_at_pages(name: str) -> None:
    geometry = LeasedPool(plan_of(name)).geometry
    buffer = bytearray(pool_buffer_bytes(geometry))
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    for part in PoolBuffer.of(geometry, buffer):
        assert (np.frombuffer(part, np.uint8).ctypes.data - start) % 4096 == 0
