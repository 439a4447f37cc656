"""Who waits for blocks is served in order, told once, and never overtaken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvpage.errors import KvpageError, OutOfBlocks, SpecInvalid, StaleHandle
from kvpage.pages.holdings import SharesUsedUp
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease, QuotaExceeded
from kvpage.pages.reservations import reserve
from kvpage.pages.steps import Step
from kvpage.pages.tenants import Tenant
from kvpage.pages.waiting_room import Ticket, WaitCounts, WaitingRoom
from support.leased_pools import plan_of

BLOCK_BYTES = 4096


class Scene:
    """A pool of eight blocks, all of which `full` holds, and a room before it."""

    def __init__(self) -> None:
        self.pool = LeasedPool(plan_of("flat", 9))
        self.now_s = 100.0
        self.room = WaitingRoom(self.pool, lambda: self.now_s)
        self.full = self.pool.open("full").lease
        self.blocks: list[int] = self.pool.do(self.full, Step(allocate={0: 8})).ids[0].tolist()
        self.told: list[tuple[str, Any]] = []

    def lease(self, name: str, tenant: str = "") -> Lease:
        return self.pool.open(name, tenant=tenant).lease

    def step(self, lease: Lease, count: int) -> Callable[[], int]:
        return lambda: len(self.pool.do(lease, Step(allocate={0: count})).ids[0])

    def wait(self, lease: Lease, count: int, label: str = "") -> Ticket:
        label = label or lease.record.name
        ticket = self.room.wait(
            lease, {0: count}, self.step(lease, count), lambda told: self.told.append((label, told))
        )
        assert ticket is not None
        return ticket

    def now(self, lease: Lease, count: int) -> Any:
        return self.room.now(lease, {0: count}, self.step(lease, count))

    def free(self, count: int) -> None:
        freed, self.blocks = self.blocks[:count], self.blocks[count:]
        self.pool.do(self.full, Step(free={0: freed}))
        self.room.room_was_made()


def test_where_there_is_room_nobody_waits() -> None:
    here = Scene()
    here.free(3)
    lease = here.lease("a")
    assert here.now(lease, 1) == 1
    assert here.room.wait(lease, {0: 2}, here.step(lease, 2), lambda told: here.told.append(("a", told))) is None
    assert here.told == [("a", 2)]
    assert here.room.counts[""] == WaitCounts()


def test_who_came_first_is_served_first_and_nobody_overtakes() -> None:
    here = Scene()
    leases = [here.lease(name) for name in "abc"]
    for lease, count in zip(leases, (3, 1, 2), strict=True):
        here.wait(lease, count)
    here.free(2)  # enough for the second and the third
    assert here.told == []
    with pytest.raises(OutOfBlocks) as refused:
        here.now(here.full, 1)
    assert refused.value.details == {"num_waiting": 3}
    here.free(2)
    assert here.told == [("a", 3), ("b", 1)]
    here.free(2)
    assert here.told[2:] == [("c", 2)]
    here.pool.check()


def test_what_frees_only_never_waits() -> None:
    here = Scene()
    here.wait(here.lease("a"), 8)
    assert here.room.now(here.full, {}, lambda: "done") == "done"
    assert here.room.now(here.full, {0: 0}, lambda: "done") == "done"


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    here = Scene()
    here.wait(here.lease("large", "large"), 8)
    small = here.lease("small", "small")
    for number in range(8):
        here.wait(small, 1, f"small {number}")
        with pytest.raises(OutOfBlocks):
            here.now(small, 1)
        assert here.told == []
        here.free(1)
    assert here.told[0] == ("large", 8)
    assert here.room.num_waiting() == here.room.num_waiting("small") == 8


def test_who_asks_for_what_there_is_passes_those_who_are_over_their_quota() -> None:
    here = Scene()
    here.pool.book.set_tenants([Tenant(name="t", quota_bytes=BLOCK_BYTES)])
    here.free(4)
    poor = here.lease("poor", "t")
    here.now(poor, 1)
    here.wait(poor, 1)
    assert here.now(here.lease("a"), 2) == 2
    here.pool.book.set_tenants([Tenant(name="t", quota_bytes=2 * BLOCK_BYTES)])
    here.room.room_was_made()
    assert here.told == [("poor", 1)]


def test_a_higher_priority_goes_before() -> None:
    here = Scene()
    here.pool.book.set_tenants([Tenant(name="urgent", priority=5)])
    here.wait(here.lease("a"), 1)
    here.wait(here.lease("b", "urgent"), 1)
    here.free(1)
    assert here.told == [("b", 1)]


@pytest.mark.parametrize("how", ["free", "close", "abort", "quota"])
def test_those_who_wait_are_served_when_room_is_made(how: str) -> None:
    here = Scene()
    here.free(8)
    tenant = "t" if how == "quota" else ""
    other, waiting = here.lease("other", "t"), here.lease("a", tenant)
    blocks = here.pool.do(other, Step(allocate={0: 4})).ids[0]
    reservation = reserve(here.pool, other, {0: 4})
    if how == "quota":
        here.pool.close_lease(reservation)
        here.pool.book.set_tenants([Tenant(name="t", quota_bytes=4 * BLOCK_BYTES)])
    here.wait(waiting, 4)
    if how == "free":
        here.pool.do(other, Step(free={0: blocks}))
    elif how == "close":
        here.pool.close_lease(other)
    elif how == "abort":
        here.pool.close_lease(reservation)
    else:
        here.pool.book.set_tenants([Tenant(name="t")])
    assert here.told == []
    here.room.room_was_made()
    assert here.told == [("a", 4)]


# --- giving up --------------------------------------------------------------------------------------------------------


def test_who_gives_up_is_not_told_and_lets_others_pass() -> None:
    here = Scene()
    large, small = here.wait(here.lease("large"), 6), here.wait(here.lease("small"), 1)
    here.free(2)
    here.now_s = 103.5
    assert isinstance(here.room.give_up(large), OutOfBlocks)
    assert here.told == [("small", 1)]
    here.room.give_up(large)
    here.room.give_up(small)
    assert here.told == [("small", 1)]
    assert here.room.counts[""] == WaitCounts(waited=2, served=1, given_up=1, failed=0, waited_s=7.0)


def test_a_lease_that_ends_is_not_waited_for() -> None:
    here = Scene()
    lease, token = here.pool.open("a")
    tickets = [here.wait(lease, 8, f"a{number}") for number in range(2)]
    here.wait(here.lease("b"), 1)
    here.free(1)
    here.pool.adopt("a", token)
    here.room.give_up_all(tickets)
    assert here.told == [("b", 1)]
    assert here.room.counts[""] == WaitCounts(waited=3, served=1, given_up=2)


def test_a_lease_that_ended_unnoticed_is_told_so_when_its_turn_comes() -> None:
    here = Scene()
    lease = here.lease("a")
    here.wait(lease, 2)
    here.pool.close_lease(lease)
    here.free(1)
    [(_, told)] = here.told
    assert isinstance(told, StaleHandle)


def test_a_step_that_makes_no_sense_is_told_so_when_its_turn_comes() -> None:
    here = Scene()
    lease = here.lease("a")
    wrong = partial(here.pool.do, lease, Step(free={0: here.blocks[:1]}, allocate={0: 2}))
    assert here.room.wait(lease, {0: 2}, wrong, lambda told: here.told.append(("a", told))) is None
    [(_, told)] = here.told
    assert isinstance(told, KvpageError)
    assert here.room.num_waiting() == 0


# --- what can never be done -------------------------------------------------------------------------------------------


def test_what_can_never_be_done_is_refused_at_once() -> None:
    here = Scene()
    here.pool.book.set_tenants([Tenant(name="t", quota_bytes=2 * BLOCK_BYTES)])
    with pytest.raises(OutOfBlocks):
        here.wait(here.lease("a"), 9)
    with pytest.raises(QuotaExceeded):
        here.wait(here.lease("b", "t"), 3)
    assert here.room.num_waiting() == 0


def test_a_pool_of_several_groups_counts_whole_slabs() -> None:
    pool = LeasedPool(plan_of("mixed", 4))  # three slabs, of 1 or 4 blocks
    room, lease = WaitingRoom(pool), pool.open("a").lease
    assert room.wait(lease, {0: 1, 1: 8}, lambda: "done", lambda told: None) is None
    with pytest.raises(OutOfBlocks):
        room.wait(lease, {0: 1, 1: 9}, lambda: "done", lambda told: None)


@pytest.mark.parametrize("counts", [{7: 1}, {-1: 1}, {0: -1}])
def test_what_are_no_counts_of_blocks_is_refused(counts: dict[int, int]) -> None:
    here = Scene()
    lease = here.lease("a")
    here.wait(lease, 1)
    for call in (here.room.now, partial(here.room.wait, answer=lambda told: None)):
        with pytest.raises(SpecInvalid):
            call(lease, counts, work=lambda: None)
    assert here.room.num_waiting() == 1


def test_a_quota_that_became_too_small_ends_the_waiting() -> None:
    here = Scene()
    lease = here.lease("a", "t")
    here.wait(lease, 3)
    here.pool.book.set_tenants([Tenant(name="t", quota_bytes=BLOCK_BYTES)])
    here.room.room_was_made()
    [(_, told)] = here.told
    assert isinstance(told, QuotaExceeded)


# --- answers may do anything ------------------------------------------------------------------------------------------


def test_an_answer_may_ask_again_give_up_and_end_leases() -> None:
    here = Scene()
    first, second, third, fourth = (here.lease(name) for name in "abcd")
    tickets: dict[str, Ticket] = {}

    def answer(told: Any) -> None:
        here.told.append(("a", told))
        here.room.give_up(tickets["c"])  # it was served in this moment, too
        here.pool.close_lease(second)
        here.wait(first, 1, "a again")
        here.free(2)

    here.room.wait(first, {0: 1}, here.step(first, 1), answer)
    here.wait(second, 1)
    tickets["c"] = here.wait(third, 1)
    here.wait(fourth, 2)
    here.free(3)
    assert here.told == [("a", 1), ("d", 2), ("a again", 1), ("b", 1)]
    assert sum(third.blocks) == 1
    here.pool.check()


def test_an_answer_that_raises_keeps_no_other_from_being_told() -> None:
    here = Scene()
    leases = [here.lease(name) for name in "abc"]

    def refuse(told: Any) -> None:
        raise RuntimeError("the connection is gone")

    here.room.wait(leases[0], {0: 1}, here.step(leases[0], 1), refuse)
    here.wait(leases[1], 1)
    with pytest.raises(RuntimeError):
        here.free(2)
    assert here.told == [("b", 1)]


@pytest.mark.parametrize("call", ["now", "wait"])
def test_work_that_breaks_leaves_nobody_in_the_room_who_does_not_know(call: str) -> None:
    here = Scene()
    here.pool.book.set_tenants([Tenant(name="urgent", priority=5)])
    here.wait(here.lease("a"), 1)
    lease = here.lease("b", "urgent")

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        if call == "now":
            here.room.now(lease, {0: 1}, fail)
        else:
            here.room.wait(lease, {0: 1}, fail, lambda told: here.told.append(("b", told)))
    assert here.room.num_waiting() == 1
    here.free(1)
    assert here.told == [("a", 1)]


def test_a_request_of_this_moment_that_cannot_be_served_lets_others_pass() -> None:
    """It is the most urgent, and too large; behind it is one that fits."""
    here = Scene()
    here.pool.book.set_tenants([Tenant(name="urgent", priority=5)])
    here.wait(here.lease("a"), 1)
    freed, here.blocks = here.blocks[:1], here.blocks[1:]
    here.pool.do(here.full, Step(free={0: freed}))  # and nobody was told
    with pytest.raises(OutOfBlocks):
        here.now(here.lease("b", "urgent"), 4)
    assert here.told == [("a", 1)]


def test_the_room_is_seen_at_a_glance() -> None:
    here = Scene()
    here.wait(here.lease("a"), 1)
    assert "1 requests of 1 tenants wait" in repr(here.room)


def test_who_waits_for_a_run_stops_nobody_else() -> None:
    """Blocks that follow each other may never be free at once, while there are others all the time."""
    here = Scene()
    a, b = here.lease("a", "one"), here.lease("b", "two")
    kept, freed = sorted(here.blocks)[::2], sorted(here.blocks)[1::2]
    here.pool.do(here.full, Step(free={0: freed}))
    run = Step(allocate={0: 3}, as_runs=True)
    ticket = here.room.wait(a, {0: 3}, lambda: here.pool.do(a, run), lambda told: here.told.append(("a", told)))
    assert ticket is not None
    assert here.now(b, 1) == 1
    here.pool.do(here.full, Step(free={0: kept}))
    here.room.room_was_made()
    [(name, grant)] = here.told
    assert (name, len(grant.ids[0])) == ("a", 3)


def test_who_shares_more_than_can_be_noted_is_refused_and_stops_nobody() -> None:
    """No block that is given back helps."""
    here = Scene()
    here.free(4)
    shared = here.blocks[:2]
    sharers = [here.lease(f"s{number}", "sharers") for number in range(600)]
    refused = 0
    for lease in sharers:
        try:
            here.pool.do(lease, Step(retain={0: shared}))
        except SharesUsedUp:
            refused += 1
    assert refused
    step = Step(retain={0: shared}, allocate={0: 1})
    told: list[Any] = []
    assert here.room.wait(sharers[-1], {0: 1}, lambda: here.pool.do(sharers[-1], step), told.append) is None
    assert isinstance(told[0], SharesUsedUp)
    assert here.now(here.lease("b", "two"), 1) == 1
    here.pool.check()
