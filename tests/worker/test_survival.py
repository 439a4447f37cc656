"""Who may die, and what is left: processes end by SIGKILL here, in every role."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage.errors import Conflict, StaleHandle, WorkerLost
from kvpage.wire import messages
from kvpage.wire.channel import close_fds
from kvpage.wire.client import WorkerClient
from support.eventually import until
from support.pools import PLAN, PLAN_ID, SIZE_BYTES, attach_pool, contents, create_pool, export_pool, finish_adoption
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess


def holder_names(client: WorkerClient) -> list[str]:
    return [holder.client_name for holder in client.ask(messages.FindPool(name="mimo"), messages.PoolState).holders]


def test_a_killed_client_lets_go_of_what_it_held(worker: WorkerProcess) -> None:
    with worker.client() as client, RemoteClient() as remote:
        pool = create_pool(client)
        remote.do("connect", socket=str(worker.socket_path), name="engine")
        remote.do("attach", name="mimo")
        assert holder_names(client) == ["engine"]
        with pytest.raises(Conflict):
            client.request(messages.DeletePool(pool_id=pool.pool_id))
        remote.kill()
        until(lambda: holder_names(client) == [])
        client.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)


def test_a_killed_client_leaves_the_others_their_holds_and_its_bytes(worker: WorkerProcess) -> None:
    with worker.client(client_name="survivor") as client, RemoteClient() as remote:
        create_pool(client)
        _, mapping = attach_pool(client)
        remote.do("connect", socket=str(worker.socket_path))
        remote.do("attach", name="mimo")
        remote.do("write", offset=10, data="last words")
        remote.kill()
        assert bytes(contents(mapping)[10:20]) == b"last words"
        until(lambda: holder_names(client) == ["survivor"])
        mapping.close()


def test_a_pool_outlives_the_process_that_asked_for_it(worker: WorkerProcess) -> None:
    with RemoteClient() as creator:
        creator.do("connect", socket=str(worker.socket_path))
        creator.do("create", name="mimo", plan_id=PLAN_ID, size_bytes=SIZE_BYTES)
        creator.do("attach", name="mimo")
        creator.do("write", offset=0, data="legacy")
        creator.kill()
    with worker.client() as client:
        _, mapping = attach_pool(client)
        assert bytes(contents(mapping)[:6]) == b"legacy"
        mapping.close()


def test_a_pool_being_made_is_finished_for_those_who_stay(worker: WorkerProcess) -> None:
    create = messages.CreatePool(name="big", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=128 << 20)
    with worker.client() as leaving:
        pool = leaving.ask(create, messages.PoolCreated).pool
    with worker.client() as client:
        wait = messages.WaitPool(pool_id=pool.pool_id, timeout_s=60)
        assert client.ask(wait, messages.PoolState).state == "ready"


def test_a_killed_worker_leaves_its_clients_their_bytes(worker: WorkerProcess) -> None:
    with worker.client() as client, RemoteClient() as remote:
        create_pool(client)
        _, mapping = attach_pool(client)
        remote.do("connect", socket=str(worker.socket_path))
        remote.do("attach", name="mimo")
        worker.kill()
        contents(mapping)[:5] = b"hello"
        assert remote.do("read", offset=0, size_bytes=5) == {"data": "hello"}
        with pytest.raises(WorkerLost):
            client.request(messages.ListPools())
        assert remote.do("create", name="x", plan_id=PLAN_ID, size_bytes=1)["error"] == "worker-lost"
        mapping.close()


def test_a_killed_worker_ends_a_request_that_waits(worker: WorkerProcess) -> None:
    create = messages.CreatePool(name="big", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=1 << 30)
    with worker.client() as client:
        pool = client.ask(create, messages.PoolCreated).pool
        worker.kill()
        with pytest.raises(WorkerLost):
            client.request(messages.WaitPool(pool_id=pool.pool_id, timeout_s=600))


def test_when_nobody_kept_the_descriptors_old_handles_are_stale(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client() as client:
        pool = create_pool(client)
    worker.kill()
    with WorkerProcess(run_dir) as successor, successor.client() as client:
        assert client.epoch != pool.epoch
        with pytest.raises(StaleHandle):
            client.request(messages.Attach(pool_id=pool.pool_id, epoch=pool.epoch))


def test_a_successor_that_is_handed_the_descriptors_goes_on_with_the_same_bytes_and_epoch(
    worker: WorkerProcess, run_dir: Path
) -> None:
    with worker.client(role="api") as keeper, worker.client() as client:
        pool = create_pool(client)
        _, old_mapping = attach_pool(client)
        contents(old_mapping)[:8] = b"survives"
        chunks, fds = export_pool(keeper, pool.pool_id)
        worker.kill()
    with WorkerProcess(run_dir) as successor, successor.client(role="api") as keeper, successor.client() as client:
        adopted = keeper.ask(messages.AdoptPool(chunks=chunks), messages.PoolState, fds)
        close_fds(fds)
        finish_adoption(keeper)
        assert adopted == pool
        assert keeper.epoch == pool.epoch
        attached, mapping = attach_pool(client)
        assert (attached.plan, attached.pool.epoch) == (PLAN, pool.epoch)
        assert bytes(contents(mapping)[:8]) == b"survives"
        contents(old_mapping)[:8] = b"the same"
        assert bytes(contents(mapping)[:8]) == b"the same"
        reply = client.request(messages.Attach(pool_id=pool.pool_id, epoch=pool.epoch, plan_id=pool.plan_id))
        close_fds(reply.fds)
        old_mapping.close()
        mapping.close()


def test_an_adopted_pool_can_be_handed_on_and_deleted(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client(role="api") as keeper:
        pool = create_pool(keeper)
        chunks, fds = export_pool(keeper, pool.pool_id)
        worker.kill()
    with WorkerProcess(run_dir) as second, second.client(role="api") as keeper:
        keeper.ask(messages.AdoptPool(chunks=chunks), messages.PoolState, fds)
        close_fds(fds)
        finish_adoption(keeper)
        chunks, fds = export_pool(keeper, pool.pool_id)
        second.kill()
    with WorkerProcess(run_dir) as third, third.client(role="api") as keeper:
        assert keeper.ask(messages.AdoptPool(chunks=chunks), messages.PoolState, fds) == pool
        close_fds(fds)
        finish_adoption(keeper)
        keeper.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
        assert keeper.ask(messages.DescribeDevice(), messages.DeviceState).reserved_bytes == 0
