"""A deletion that waits for holders: it ends when the last one lets go, when its time is over, or with its asker."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage.errors import PoolNotFound
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.eventually import until
from support.pools import attach_pool, create_pool
from support.raw_client import RawClient
from support.worker_process import WorkerProcess
from support.worker_thread import WorkerThread

pytestmark = pytest.mark.usefixtures("no_leaks")


def delete(pool: messages.PoolState, timeout_s: float = 60) -> messages.DeletePool:
    return messages.DeletePool(pool_id=pool.pool_id, timeout_s=timeout_s)


def hold(client: WorkerClient) -> messages.Attached:
    attached, mapping = attach_pool(client)
    mapping.close()
    return attached


def state_of(client: WorkerClient, pool: messages.PoolState) -> messages.PoolState:
    return client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState)


def is_gone(client: WorkerClient) -> bool:
    return client.ask(messages.ListPools(), messages.PoolList).pools == []


def test_it_goes_on_when_the_last_holder_detaches(worker: WorkerProcess) -> None:
    with worker.client() as client, RawClient(worker.socket_path) as raw:
        pool = create_pool(client)
        first, second = hold(client), hold(client)
        asked = raw.send(delete(pool))
        client.ask(messages.Detach(hold_id=first.hold_id), messages.Detached)
        assert raw.ask(messages.ListPools()).body == messages.PoolList(pools=[state_of(client, pool)])
        assert state_of(client, pool).state == "ready"
        client.ask(messages.Detach(hold_id=second.hold_id), messages.Detached)
        assert raw.answer(asked).body == messages.PoolDeleted(pool_id=pool.pool_id)
        with pytest.raises(PoolNotFound):
            state_of(client, pool)


def test_it_goes_on_when_the_holder_ends_and_answers_everybody_who_asked(worker: WorkerProcess) -> None:
    with RawClient(worker.socket_path) as raw, RawClient(worker.socket_path) as other:
        with worker.client() as holder:
            pool = create_pool(holder)
            hold(holder)
            hold(holder)
            asked = [raw.send(delete(pool)), raw.send(delete(pool))]
            asked_too = other.send(delete(pool))
            other.ask(messages.ListPools())
            raw.ask(messages.ListPools())
        deleted = messages.PoolDeleted(pool_id=pool.pool_id)
        assert [raw.answer(request).body for request in asked] == [deleted, deleted]
        assert other.answer(asked_too).body == deleted


def test_it_is_refused_with_the_holders_when_its_time_is_over(worker: WorkerProcess) -> None:
    with worker.client(client_name="engine 7") as holder, worker.client() as client:
        pool = create_pool(holder)
        hold(holder)
        reply = None
        with RawClient(worker.socket_path) as raw:
            reply = raw.ask(delete(pool, 0.01))
        assert reply.error is not None
        assert reply.error.code == "conflict"
        assert [named["client_name"] for named in reply.error.details["holders"]] == ["engine 7"]
        assert state_of(client, pool).state == "ready"


def test_meanwhile_others_may_attach_and_are_waited_for_too(worker: WorkerProcess) -> None:
    with worker.client() as client, RawClient(worker.socket_path) as raw:
        pool = create_pool(client)
        first = hold(client)
        asked = raw.send(delete(pool))
        raw.ask(messages.ListPools())
        second = hold(client)
        client.ask(messages.Detach(hold_id=first.hold_id), messages.Detached)
        assert state_of(client, pool).num_holders == 1
        client.ask(messages.Detach(hold_id=second.hold_id), messages.Detached)
        assert raw.answer(asked).error is None


def test_whoever_asked_and_left_has_taken_it_back(worker: WorkerProcess) -> None:
    with worker.client() as client:
        pool = create_pool(client)
        held = hold(client)
        with RawClient(worker.socket_path) as raw:
            raw.send(delete(pool))
            raw.ask(messages.ListPools())
        until(lambda: client.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 1)
        client.ask(messages.Detach(hold_id=held.hold_id), messages.Detached)
        assert state_of(client, pool).state == "ready"


def test_a_connection_that_holds_and_waits_takes_both_back_when_it_ends(worker: WorkerProcess) -> None:
    with worker.client() as client:
        pool = create_pool(client)
        with RawClient(worker.socket_path) as raw:
            raw.ask(messages.Attach(name="mimo"))
            raw.send(delete(pool))
            raw.ask(messages.ListPools())
        until(lambda: state_of(client, pool).num_holders == 0)
        assert state_of(client, pool).state == "ready"


def test_a_worker_that_ends_leaves_nobody_waiting(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, worker.client() as client, RawClient(worker.socket_path) as raw:
        pool = create_pool(client)
        hold(client)
        asked = raw.send(delete(pool))
        raw.ask(messages.ListPools())
        worker.begin_drain()
        refused = raw.answer(asked).error
        assert refused is not None
        assert refused.code == "draining"


def test_only_so_many_may_wait_on_one_connection(worker: WorkerProcess) -> None:
    with worker.client() as client, RawClient(worker.socket_path) as raw:
        pool = create_pool(client)
        held = hold(client)
        asked = [raw.send(delete(pool)) for _ in range(16)]
        refused = raw.ask(delete(pool)).error
        assert refused is not None
        assert refused.code == "rate-limited"
        client.ask(messages.Detach(hold_id=held.hold_id), messages.Detached)
        assert all(raw.answer(request).error is None for request in asked)
        assert is_gone(client)


def test_a_pool_nobody_holds_is_deleted_at_once_however_long_one_would_wait(worker: WorkerProcess) -> None:
    with worker.client() as client:
        pool = create_pool(client)
        client.ask(delete(pool, messages.MAX_WAIT_S), messages.PoolDeleted)
        assert is_gone(client)


@pytest.mark.parametrize("timeout_s", [-1.0, messages.MAX_WAIT_S + 1.0, float("nan")])
def test_the_time_is_bounded(worker: WorkerProcess, timeout_s: float) -> None:
    with RawClient(worker.socket_path) as raw:
        refused = raw.ask(messages.DeletePool(pool_id="pool-" + "0" * 16, timeout_s=timeout_s)).error
        assert refused is not None
        assert refused.code == "spec-invalid"
