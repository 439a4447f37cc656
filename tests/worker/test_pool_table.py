"""The pool table alone: any sequence of events keeps its books in order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from kvpage.errors import Conflict, InternalError, NotEnoughMemory
from kvpage.memory.base import Chunk
from kvpage.memory.fake import FakeMemory
from kvpage.wire.messages import ChunkInfo
from kvpage_server.control_block import ControlRecord
from kvpage_server.worker_budget import Budget
from kvpage_server.worker_pool_entry import Pool, PoolMemory
from kvpage_server.worker_pools import PoolTable
from support.pools import OTHER_PLAN_ID, OVERHEAD_BYTES, PLAN, PLAN_ID

OVERHEAD_PAGES = OVERHEAD_BYTES // 4096
LIMIT_BYTES = (10 + 2 * OVERHEAD_PAGES) * 4096


class NoMemory(Chunk):
    """Stands for memory where only the books are looked at."""

    size_bytes = 0
    fd = -1
    closed = False

    def close(self) -> None:
        self.closed = True

    def export(self) -> int:
        raise NotImplementedError

    def map(self, *, writable: bool = True) -> object:  # type: ignore[override]
        raise NotImplementedError


def some_memory() -> PoolMemory:
    return PoolMemory(chunks=(NoMemory(),), control=NoMemory())


def chunk(pages: int) -> list[ChunkInfo]:
    return [ChunkInfo(kind="memfd", size_bytes=pages * 4096)]


class PoolTableMachine(RuleBasedStateMachine):
    """Random events against a table; the model is the list of pools as they should be."""

    holds: Bundle[tuple[Pool, int]] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.table = PoolTable("host", Budget(LIMIT_BYTES, lambda: 1 << 40))
        self.reserved: dict[str, int] = {}

    def pools_in(self, *states: str) -> list[Pool]:
        return [pool for pool in self.table if pool.state in states]

    @rule(name=st.sampled_from("abc"), pages=st.integers(1, 6), plan_id=st.sampled_from([PLAN_ID, OTHER_PLAN_ID]))
    def create(self, name: str, pages: int, plan_id: str) -> None:
        there = next((pool for pool in self.table if pool.name == name and pool.state != "failed"), None)
        fits = sum(self.reserved.values()) + (pages + OVERHEAD_PAGES) * 4096 <= LIMIT_BYTES
        try:
            pool, created = self.table.create(name, plan_id, PLAN, chunk(pages))
        except Conflict:
            assert there is not None
            assert there.state == "deleting" or (there.plan_id, there.size_bytes) != (plan_id, pages * 4096)
            return
        except NotEnoughMemory:
            assert there is None
            assert not fits
            return
        assert created == (there is None)
        if created:
            assert fits
            self.reserved[pool.pool_id] = (pages + OVERHEAD_PAGES) * 4096

    @precondition(lambda self: self.pools_in("creating"))
    @rule(data=st.data(), works=st.booleans())
    def commit(self, data: st.DataObject, works: bool) -> None:
        pool = data.draw(st.sampled_from(self.pools_in("creating")))
        if works:
            self.table.become_ready(pool, some_memory())
        else:
            self.table.become_failed(pool, InternalError("no"))
            self.reserved.pop(pool.pool_id)

    @precondition(lambda self: self.pools_in("ready"))
    @rule(data=st.data(), target=holds)
    def hold(self, data: st.DataObject) -> tuple[Pool, int]:
        pool = data.draw(st.sampled_from(self.pools_in("ready")))
        hold_id = self.table.hold(pool, pid=1, uid=2, client_name="x")
        assert all(hold_id not in other.holders for other in self.table if other is not pool)
        return pool, hold_id

    @rule(hold=holds)
    def release(self, hold: tuple[Pool, int]) -> None:
        pool, hold_id = hold
        if hold_id in pool.holders:
            self.table.release(pool, hold_id)

    @precondition(lambda self: self.pools_in("creating", "ready", "failed"))
    @rule(data=st.data())
    def begin_delete(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.pools_in("creating", "ready", "failed")))
        was_ready = pool.state == "ready"
        if pool.holders:
            with pytest.raises(Conflict) as caught:
                self.table.begin_delete(pool)
            assert caught.value.details["num_holders"] == len(pool.holders)
            return
        memory = self.table.begin_delete(pool)
        assert (memory is not None) == was_ready
        assert pool.abandoned.is_set()

    @precondition(lambda self: self.pools_in("deleting"))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.pools_in("deleting")))
        self.table.remove(pool)
        self.reserved.pop(pool.pool_id, None)

    @precondition(lambda self: self.pools_in("creating", "failed", "deleting"))
    @rule(data=st.data())
    def only_ready_pools_can_be_held(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.pools_in("creating", "failed", "deleting")))
        with pytest.raises(Conflict):
            self.table.hold(pool, pid=1, uid=2, client_name="x")

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.table.check()
        assert self.table.budget.reserved_bytes == sum(self.reserved.values()) <= LIMIT_BYTES
        names = [pool.name for pool in self.table]
        assert len(names) == len(set(names))


TestPoolTable = PoolTableMachine.TestCase


@pytest.fixture
def table() -> PoolTable:
    return PoolTable("host", Budget(LIMIT_BYTES, lambda: 1 << 40))


def test_the_check_sees_a_budget_that_does_not_add_up(table: PoolTable) -> None:
    table.create("a", PLAN_ID, PLAN, chunk(1))
    table.check()
    table.budget.reserved_bytes += 1
    with pytest.raises(AssertionError):
        table.check()


def test_the_check_sees_a_ready_pool_without_memory(table: PoolTable) -> None:
    pool, _ = table.create("a", PLAN_ID, PLAN, chunk(1))
    pool.state = "ready"
    with pytest.raises(AssertionError):
        table.check()


def test_its_text_shows_states_holders_and_bytes(table: PoolTable) -> None:
    pool, _ = table.create("a", PLAN_ID, PLAN, chunk(1))
    table.become_ready(pool, some_memory())
    table.hold(pool, pid=1, uid=2, client_name="x")
    assert "a: ready, 1 holders" in repr(table)
    assert f"{4096 + OVERHEAD_BYTES} of {LIMIT_BYTES} bytes reserved" in repr(table)


def test_an_epoch_is_random_and_an_empty_table_takes_that_of_what_it_adopts(table: PoolTable) -> None:
    other = PoolTable("host", Budget(LIMIT_BYTES, lambda: 1 << 40))
    assert table.epoch != other.epoch
    pool, _ = other.create("a", PLAN_ID, PLAN, chunk(1))
    record: ControlRecord = other.record(pool)
    adopted = table.adopt(record, some_memory())
    assert table.epoch == other.epoch
    assert table.describe(adopted).pool_id == pool.pool_id
    table.check()


def test_a_failed_pool_says_why(table: PoolTable) -> None:
    pool, _ = table.create("a", PLAN_ID, PLAN, chunk(1))
    table.become_failed(pool, NotEnoughMemory("gone", details={"needed_bytes": 4096}))
    error = table.describe(pool).error
    assert error is not None
    assert (error.code, error.details) == ("not-enough-memory", {"needed_bytes": 4096})


def test_closing_a_pools_memory_closes_every_descriptor(no_leaks: None) -> None:
    memory = FakeMemory()
    held = PoolMemory(chunks=(memory.create(4096), memory.create(4096)), control=memory.create(4096))
    assert len(memory.calls.open_fds) == 3
    held.close()
    assert not memory.calls.open_fds
