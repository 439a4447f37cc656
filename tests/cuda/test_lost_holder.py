"""The process that holds memory of kind `cuda_ipc` dies: the memory is lost, which is told, and nothing else is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import kvpage
from kvpage.client.resources import Pool
from kvpage.errors import Conflict, KvpageError, StaleHandle
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService, children_of
from support.eventually import until
from support.fakecuda import FakeDevices
from support.fakecuda_here import wrap_double
from support.plan_requests import small_request
from support.pools import PLAN, PLAN_ID
from support.problems import assert_problem
from support.raw_client import RawClient
from support.worker_process import WorkerProcess

MIB = 1 << 20


def pipes_of(pid: int) -> set[str]:
    targets = (os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return {target for target in targets if target.startswith("pipe:")}


def create(client: WorkerClient, name: str = "mimo") -> messages.PoolState:
    body = messages.CreatePool(name=name, plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=MIB, handle_kind="cuda_ipc")
    pool = client.ask(body, messages.PoolCreated).pool
    return client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)


def state_of(client: WorkerClient, pool: messages.PoolState) -> messages.PoolState:
    return client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState)


def reserved_bytes(client: WorkerClient) -> int:
    return client.ask(messages.DescribeDevice(), messages.DeviceState).reserved_bytes


@pytest.fixture
def worker(devices: FakeDevices, run_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(run_dir, device="cuda:0") as worker:
        yield worker


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[WorkerClient]:
    with worker.client() as client:
        yield client


def kill_holder(worker_pid: int) -> None:
    [holder] = children_of(worker_pid)
    os.kill(holder, signal.SIGKILL)


def test_a_pool_whose_holder_is_killed_has_failed_and_makes_room(
    worker: WorkerProcess, client: WorkerClient, devices: FakeDevices
) -> None:
    pool = create(client)
    assert reserved_bytes(client) == 2 * MIB
    num_fds = worker.num_fds()
    kill_holder(worker.pid)
    lost = until(lambda: (state := state_of(client, pool)).state == "failed" and state)
    assert isinstance(lost, messages.PoolState)
    assert lost.error is not None
    assert lost.error.code == StaleHandle.code
    assert "has ended" in lost.error.message
    assert (lost.committed_bytes, reserved_bytes(client)) == (0, 0)
    until(
        lambda: devices.used_bytes(devices.uuids[0]) == 0
    )  # a process that dies closes its lifeline before it is gone
    until(lambda: worker.settles_at(num_fds - 2, client))  # its lifeline and its control block
    for body in (messages.Attach(name="mimo"), messages.Attach(pool_id=pool.pool_id)):
        with pytest.raises(StaleHandle, match="has ended"):
            client.request(body)
    client.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
    assert create(client).state == "ready"


def test_a_pool_of_the_name_may_be_made_at_once(worker: WorkerProcess, client: WorkerClient) -> None:
    pool = create(client)
    kill_holder(worker.pid)
    until(lambda: state_of(client, pool).state == "failed")
    assert (again := create(client)).state == "ready"
    assert again.pool_id != pool.pool_id


def test_a_holder_is_reaped_when_it_ends(worker: WorkerProcess, client: WorkerClient) -> None:
    pool = create(client)
    assert len(children_of(worker.pid)) == 1
    client.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
    until(lambda: children_of(worker.pid) == [])
    create(client)
    kill_holder(worker.pid)
    until(lambda: children_of(worker.pid) == [])


def test_who_holds_a_lost_pool_keeps_nobody_from_deleting_it(worker: WorkerProcess, client: WorkerClient) -> None:
    pool = create(client)
    with worker.client() as holding, RawClient(worker.socket_path) as deleting:
        held = holding.request(messages.Attach(name="mimo"))
        assert isinstance(held.body, messages.Attached)
        os.close(held.fds[0])
        with pytest.raises(Conflict):
            client.request(messages.DeletePool(pool_id=pool.pool_id))
        waiting = deleting.send(messages.DeletePool(pool_id=pool.pool_id, timeout_s=600))
        deleting.ask(messages.ListPools())
        kill_holder(worker.pid)
        assert deleting.answer(waiting).body == messages.PoolDeleted(pool_id=pool.pool_id)
        holding.ask(messages.Detach(hold_id=held.body.hold_id), messages.Detached)
    assert create(client).state == "ready"


@pytest.mark.usefixtures("devices")
def test_a_successor_that_is_not_the_holders_parent_notices_too(run_dir: Path) -> None:
    with WorkerProcess(run_dir, device="cuda:0") as worker:
        with worker.client() as client:
            pool = create(client)
        [holder] = children_of(worker.pid)
        with WorkerProcess(run_dir, "--replace", device="cuda:0") as successor, successor.client() as client:
            assert worker.wait() == 0
            assert state_of(client, pool).state == "ready"
            os.kill(holder, signal.SIGKILL)
            until(lambda: state_of(client, pool).state == "failed")


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture
def service(devices: FakeDevices, run_dir: Path) -> Iterator[ApiService]:
    with ApiService(run_dir, "--device", "cuda:0") as service:
        yield service


def pool_over_http(service: ApiService) -> Pool:
    with service.client() as client:
        return client.create_pool(small_request(), device="cuda:0", name="mimo", handle_kind="cuda_ipc")


def test_clients_of_the_server_are_told(service: ApiService, run_dir: Path) -> None:
    pool = pool_over_http(service)
    worker = service.worker_pid()
    [lifeline] = pipes_of(service.pid) & pipes_of(worker) & pipes_of(*children_of(worker))
    kill_holder(worker)
    with service.client() as client:
        until(lambda: client.get_pool(pool.id).state == "failed")
        error = client.get_pool(pool.id).error
        assert error is not None
        assert error.code == StaleHandle.code
        until(lambda: lifeline not in pipes_of(service.pid))  # it keeps nothing of the pool any more
        transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
        with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as plain:
            assert_problem(plain.get(f"/v1/pools/{pool.id}/hold"), StaleHandle.code)
        with pytest.raises(StaleHandle, match="has ended"):
            kvpage.attach("mimo", run_dir=str(run_dir), wrap=wrap_double)
        client.delete_pool(pool.id)
        assert client.pools() == []
    assert pool_over_http(service).state == "ready"


def test_a_pool_that_is_lost_together_with_its_worker_is_told_and_deleted(service: ApiService) -> None:
    pool = pool_over_http(service)
    worker = service.worker_pid()
    [holder] = children_of(worker)
    for pid in (worker, holder):
        os.kill(pid, signal.SIGKILL)
    with service.client() as client:
        until(lambda: client.devices()[0].worker_pid not in (None, worker))
        with_error = client.get_pool(pool.id)
        assert with_error.state == "failed"
        assert with_error.error is not None
        assert with_error.error.code == StaleHandle.code
        client.delete_pool(pool.id)
    assert pool_over_http(service).state == "ready"


def test_the_memory_of_an_attachment_is_told_to_be_lost_when_it_attaches_again(
    service: ApiService, run_dir: Path
) -> None:
    pool = pool_over_http(service)
    with kvpage.connect("cuda:0", run_dir=str(run_dir)) as connection, service.client() as client:
        attached = connection.attach("mimo", wrap=wrap_double)
        kill_holder(service.worker_pid())
        until(lambda: client.get_pool(pool.id).state == "failed")
        with pytest.raises(KvpageError) as caught:
            connection.attach("mimo", wrap=wrap_double)
        assert caught.value.code == StaleHandle.code
        attached.close()
