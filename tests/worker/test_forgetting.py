"""Deleting a pool by force: it is gone, and what its holders keep in use is told until they let go."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage.errors import Conflict, NotEnoughMemory, PoolNotFound, StaleHandle
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.eventually import until
from support.pools import OVERHEAD_BYTES, attach_pool, create_pool
from support.worker_process import WorkerProcess
from support.worker_thread import WorkerThread

SIZE_BYTES = 8192


def device(client: WorkerClient) -> messages.DeviceState:
    return client.ask(messages.DescribeDevice(), messages.DeviceState)


def forget(client: WorkerClient, pool_id: str, timeout_s: float = 0.0) -> messages.PoolDeleted:
    return client.ask(messages.DeletePool(pool_id=pool_id, timeout_s=timeout_s, force=True), messages.PoolDeleted)


def test_a_forgotten_pool_is_gone_and_its_memory_counts_until_it_is_unmapped(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, worker.client() as operator, worker.client(client_name="engine") as engine:
        pool = create_pool(operator, size_bytes=SIZE_BYTES)
        attached, mapping = attach_pool(engine)
        memoryview(mapping.claim).cast("B")[0] = 9
        with pytest.raises(Conflict):
            operator.request(messages.DeletePool(pool_id=pool.pool_id))
        deleted = forget(operator, pool.pool_id)
        assert deleted.pinned_bytes == SIZE_BYTES
        assert [holder.client_name for holder in deleted.holders] == ["engine"]
        with pytest.raises(PoolNotFound):
            operator.request(messages.GetPool(pool_id=pool.pool_id))
        state = device(operator)
        assert (state.num_pools, state.pinned_bytes, state.reserved_bytes) == (0, SIZE_BYTES, SIZE_BYTES)
        assert memoryview(mapping.claim).cast("B")[0] == 9
        mapping.close()
        engine.request(messages.Detach(hold_id=attached.hold_id))
        state = device(operator)
        assert (state.pinned_bytes, state.reserved_bytes) == (0, 0)


def test_the_name_of_a_forgotten_pool_is_free_and_its_bytes_are_not(run_dir: Path) -> None:
    with WorkerThread(run_dir, memory_bytes=2 * SIZE_BYTES + OVERHEAD_BYTES) as worker, worker.client() as client:
        old = create_pool(client, size_bytes=SIZE_BYTES)
        _, mapping = attach_pool(client)
        forget(client, old.pool_id)
        new = create_pool(client, size_bytes=SIZE_BYTES)
        assert new.pool_id != old.pool_id
        with pytest.raises(NotEnoughMemory):
            create_pool(client, "third", size_bytes=SIZE_BYTES)
        mapping.close()


def test_the_end_of_a_holder_gives_its_bytes_back(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, worker.client() as operator:
        pool = create_pool(operator, size_bytes=SIZE_BYTES)
        with worker.client() as engine:
            attach_pool(engine)[1].close()
            assert forget(operator, pool.pool_id).num_holders == 1
        until(lambda: device(operator).pinned_bytes == 0)


def test_a_pool_that_nobody_holds_is_simply_deleted(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, worker.client() as client:
        pool = create_pool(client, size_bytes=SIZE_BYTES)
        assert forget(client, pool.pool_id).pinned_bytes is None
        assert device(client).reserved_bytes == 0


def test_force_waits_first_and_whoever_else_waits_is_told_too(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, worker.client() as operator, worker.client() as engine:
        pool = create_pool(operator, size_bytes=SIZE_BYTES)
        _, mapping = attach_pool(engine)
        deleted = forget(operator, pool.pool_id, timeout_s=0.01)
        assert deleted.pinned_bytes == SIZE_BYTES
        mapping.close()


def test_a_successor_does_not_know_forgotten_pools_and_their_holders_go_on(run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker, worker.client() as client:
        pool = create_pool(client, size_bytes=SIZE_BYTES)
        attached, mapping = attach_pool(client)
        forget(client, pool.pool_id)
        with WorkerProcess(run_dir, "--replace"):
            assert worker.wait() == 0
            assert device(client).pinned_bytes == 0
            memoryview(mapping.claim).cast("B")[0] = 1
            mapping.close()
            client.send_later(messages.Detach(hold_id=attached.hold_id))
            assert device(client).num_pools == 0
    with pytest.raises(StaleHandle):
        _ = mapping.claim
