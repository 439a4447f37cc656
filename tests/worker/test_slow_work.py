"""While memory is being committed: who may do what, and what happens when it fails or nobody wants it any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.errors import Conflict, Draining, NotEnoughMemory, PoolNotFound, RateLimited, WorkerLost
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from kvpage_server.worker_limits import Limits
from support.pools import OVERHEAD_BYTES, PLAN, PLAN_ID, SIZE_BYTES, create_pool
from support.raw_client import RawClient
from support.worker_thread import Gate, WorkerThread

pytestmark = pytest.mark.usefixtures("no_leaks")

CREATE = messages.CreatePool(name="mimo", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=SIZE_BYTES)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def held_up(no_leaks: None, run_dir: Path, gate: Gate) -> Iterator[WorkerThread]:
    """A worker whose committing thread waits at the gate."""
    with WorkerThread(run_dir, gate=gate) as worker:
        yield worker


def begin(client: WorkerClient, gate: Gate) -> messages.PoolState:
    """A pool whose memory is being committed at this moment."""
    pool = client.ask(CREATE, messages.PoolCreated).pool
    assert gate.arrived.wait(60)
    return pool


def wait_for(client: WorkerClient, pool: messages.PoolState, timeout_s: float) -> messages.PoolState:
    return client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=timeout_s), messages.PoolState)


def test_creating_answers_before_the_memory_is_there(held_up: WorkerThread, gate: Gate) -> None:
    with held_up.client() as client:
        pool = begin(client, gate)
        assert (pool.state, pool.committed_bytes) == ("creating", 0)
        assert wait_for(client, pool, 0).state == "creating"
        with pytest.raises(Conflict) as caught:
            client.request(messages.Attach(pool_id=pool.pool_id))
        assert caught.value.details["state"] == "creating"
        gate.open()
        ready = wait_for(client, pool, 60)
        assert (ready.state, ready.committed_bytes) == ("ready", SIZE_BYTES)


def test_a_budget_that_is_promised_is_not_promised_again(held_up: WorkerThread, gate: Gate) -> None:
    with held_up.client() as client:
        begin(client, gate)
        rest = held_up.memory.available - SIZE_BYTES - 2 * OVERHEAD_BYTES
        for size_bytes, allowed in [(rest + 1, False), (rest, True)]:
            body = messages.CreatePool(name="other", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=size_bytes)
            if allowed:
                assert client.ask(body, messages.PoolCreated).created
            else:
                with pytest.raises(NotEnoughMemory):
                    client.request(body)


def test_creating_it_again_meanwhile_finds_the_pool_that_is_being_made(held_up: WorkerThread, gate: Gate) -> None:
    with held_up.client() as client, held_up.client() as other:
        pool = begin(client, gate)
        again = other.ask(CREATE, messages.PoolCreated)
        assert (again.created, again.pool.pool_id) == (False, pool.pool_id)
        gate.open()
        assert wait_for(other, pool, 60).state == "ready"


def test_deleting_it_meanwhile_stops_the_creation_and_tells_who_waits(held_up: WorkerThread, gate: Gate) -> None:
    with held_up.client() as client, RawClient(held_up.socket_path) as raw:
        pool = begin(client, gate)
        asked = raw.send(messages.DeletePool(pool_id=pool.pool_id))
        while wait_for(client, pool, 0).state != "deleting":
            pass
        with pytest.raises(Conflict):
            client.request(CREATE)
        waiting = raw.send(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60))
        gate.open()
        assert raw.answer(asked).body == messages.PoolDeleted(pool_id=pool.pool_id)
        refused = raw.answer(waiting).error
        assert refused is not None
        assert refused.code == PoolNotFound.code
    assert held_up.calls.counts["seal"] == 0
    assert not held_up.calls.open_fds


def test_a_pool_deleted_when_its_memory_is_all_but_ready_is_given_back(run_dir: Path) -> None:
    gate = Gate("seal")  # behind the last look at whether anybody still wants the pool
    with WorkerThread(run_dir, gate=gate) as worker, worker.client() as client, RawClient(worker.socket_path) as raw:
        pool = begin(client, gate)
        asked = raw.send(messages.DeletePool(pool_id=pool.pool_id))
        while wait_for(client, pool, 0).state != "deleting":
            pass
        gate.open()
        assert raw.answer(asked).body == messages.PoolDeleted(pool_id=pool.pool_id)
    assert worker.calls.counts["seal"] == 1
    assert not worker.calls.open_fds


def test_memory_that_cannot_be_committed_leaves_a_failed_pool_that_says_why(run_dir: Path) -> None:
    with WorkerThread(run_dir, fail_at=2) as worker, worker.client() as client:
        pool = create_pool(client)
        assert (pool.state, pool.committed_bytes) == ("failed", 0)
        assert pool.error is not None
        assert pool.error.code == "internal"
        device = client.ask(messages.DescribeDevice(), messages.DeviceState)
        assert (device.num_pools, device.reserved_bytes) == (1, 0)
        with pytest.raises(Conflict):
            client.request(messages.Attach(name="mimo"))
        client.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
        assert client.ask(messages.ListPools(), messages.PoolList).pools == []


def test_creating_a_failed_pool_again_is_a_new_attempt(run_dir: Path) -> None:
    with WorkerThread(run_dir, fail_at=2) as worker, worker.client() as client:
        failed = create_pool(client)
        ready = create_pool(client)
        assert (failed.state, ready.state) == ("failed", "ready")
        assert client.ask(messages.ListPools(), messages.PoolList).pools == [ready]


def test_whichever_call_fails_the_worker_goes_on_and_holds_nothing(run_dir: Path) -> None:
    """Committing a pool makes four calls of the system; each fails once, and no descriptor is left."""
    for fail_at in range(1, 5):
        with WorkerThread(run_dir, fail_at=fail_at) as worker, worker.client() as client:
            assert create_pool(client).state == "failed"
            assert not worker.calls.open_fds
            assert create_pool(client).state == "ready"


def test_ending_the_worker_stops_the_creation_and_tells_who_waits(held_up: WorkerThread, gate: Gate) -> None:
    with held_up.client() as client, RawClient(held_up.socket_path) as raw:
        pool = begin(client, gate)
        waiting = raw.send(messages.WaitPool(pool_id=pool.pool_id, timeout_s=600))
        raw.ask(messages.ListPools())  # requests are taken in order, so by now the worker knows who waits
        held_up.begin_drain()
        refused = raw.answer(waiting).error
        assert refused is not None
        assert refused.code == Draining.code
        with pytest.raises(WorkerLost):
            client.request(messages.ListPools())
    held_up.close()
    assert held_up.calls.counts["seal"] == 0


def test_one_connection_may_have_only_so_many_requests_waiting(run_dir: Path, gate: Gate) -> None:
    limits = Limits(max_waits=2)
    with WorkerThread(run_dir, gate=gate, limits=limits) as worker, RawClient(worker.socket_path) as raw:
        with worker.client() as client:
            pool = begin(client, gate)
        body = messages.WaitPool(pool_id=pool.pool_id, timeout_s=600)
        waiting = [raw.send(body) for _ in range(3)]
        refused = raw.answer(waiting[2]).error
        assert refused is not None
        assert refused.code == RateLimited.code
        with worker.client() as other:  # the limit is each connection's own
            assert wait_for(other, pool, 0).state == "creating"
        gate.open()
        assert raw.answer(waiting[0]).body == raw.answer(waiting[1]).body


def test_who_leaves_while_waiting_is_forgotten(held_up: WorkerThread, gate: Gate) -> None:
    with held_up.client() as staying:
        pool = begin(staying, gate)
        with RawClient(held_up.socket_path) as leaving:
            leaving.send(messages.WaitPool(pool_id=pool.pool_id, timeout_s=600))
        gate.open()
        assert wait_for(staying, pool, 60).state == "ready"
