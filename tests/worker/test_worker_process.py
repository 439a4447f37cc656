"""The worker as a process: pools through a real socket, from start to SIGTERM."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpage.errors import (
    Conflict,
    NotEnoughMemory,
    NotFound,
    PoolNotFound,
    SpecInvalid,
    StaleHandle,
    TooLarge,
    WorkerLost,
)
from kvpage.wire import messages
from kvpage.wire.channel import close_fds
from kvpage.wire.client import WorkerClient
from support.pools import OTHER_PLAN_ID, OVERHEAD_BYTES, PLAN, PLAN_ID, SIZE_BYTES, attach_pool, contents, create_pool
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess, run_refused_worker


def describe(client: WorkerClient) -> messages.DeviceState:
    return client.ask(messages.DescribeDevice(), messages.DeviceState)


def holders(client: WorkerClient, name: str = "mimo") -> list[messages.Holder]:
    return client.ask(messages.FindPool(name=name), messages.PoolState).holders


def test_a_fresh_worker_describes_itself(worker: WorkerProcess) -> None:
    with worker.client() as client:
        state = describe(client)
        assert (state.device, state.worker_pid, state.state) == ("host", worker.pid, "ready")
        assert state.handle_kinds == ["memfd"]
        assert (state.num_pools, state.num_clients, state.reserved_bytes) == (0, 1, 0)
        assert state.memory_limit_bytes > 0
        assert state.epoch == client.welcome.epoch == client.epoch


def test_two_unrelated_processes_write_and_read_the_same_bytes(worker: WorkerProcess) -> None:
    socket = str(worker.socket_path)
    with RemoteClient() as writer, RemoteClient() as reader:
        writer.do("connect", socket=socket)
        writer.do("create", name="mimo", plan_id=PLAN_ID, size_bytes=SIZE_BYTES)
        for client in (writer, reader):
            client.do("connect", socket=socket, name=f"client {client.pid}")
            client.do("attach", name="mimo")
        writer.do("write", offset=SIZE_BYTES - 5, data="hello")
        assert reader.do("read", offset=SIZE_BYTES - 5, size_bytes=5) == {"data": "hello"}
        with worker.client() as asking:
            found = {(holder.pid, holder.client_name) for holder in holders(asking)}
        assert found == {(client.pid, f"client {client.pid}") for client in (writer, reader)}


def test_an_attachment_brings_the_plan_and_the_whole_buffer(worker: WorkerProcess) -> None:
    with worker.client() as client:
        pool = create_pool(client)
        assert (pool.state, pool.committed_bytes, pool.error) == ("ready", SIZE_BYTES, None)
        attached, mapping = attach_pool(client)
        assert attached.plan == PLAN
        assert attached.pool.pool_id == pool.pool_id
        assert bytes(contents(mapping)) == bytes(SIZE_BYTES)
        mapping.close()


def test_a_plan_the_client_knows_is_not_sent_again(worker: WorkerProcess) -> None:
    with worker.client() as client:
        create_pool(client)
        for known, plan in [(PLAN_ID, None), (OTHER_PLAN_ID, PLAN)]:
            reply = client.request(messages.Attach(name="mimo", known_plan_id=known))
            assert isinstance(reply.body, messages.Attached)
            assert reply.body.plan == plan
            close_fds(reply.fds)


def test_creating_the_same_pool_again_finds_it(worker: WorkerProcess) -> None:
    with worker.client() as client:
        pool = create_pool(client)
        body = messages.CreatePool(name="mimo", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=SIZE_BYTES)
        again = client.ask(body, messages.PoolCreated)
        assert (again.created, again.pool.pool_id) == (False, pool.pool_id)
        assert describe(client).reserved_bytes == SIZE_BYTES + OVERHEAD_BYTES


@pytest.mark.parametrize(("plan_id", "size_bytes"), [(OTHER_PLAN_ID, SIZE_BYTES), (PLAN_ID, SIZE_BYTES + 1)])
def test_a_name_that_another_plan_has_is_a_conflict(worker: WorkerProcess, plan_id: str, size_bytes: int) -> None:
    with worker.client() as client:
        create_pool(client)
        body = messages.CreatePool(name="mimo", plan_id=plan_id, plan=PLAN, buffer_size_bytes=size_bytes)
        with pytest.raises(Conflict):
            client.request(body)


def test_pools_are_found_by_id_by_name_and_in_the_list(worker: WorkerProcess) -> None:
    with worker.client() as client:
        pools = [create_pool(client, name) for name in ("one", "two")]
        assert client.ask(messages.ListPools(), messages.PoolList).pools == pools
        for pool in pools:
            assert client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState) == pool
            assert client.ask(messages.FindPool(name=pool.name), messages.PoolState) == pool
        for body in (messages.GetPool(pool_id="pool-" + "0" * 16), messages.FindPool(name="three")):
            with pytest.raises(PoolNotFound):
                client.request(body)


def test_a_pool_that_is_held_is_not_deleted_and_the_refusal_names_the_holders(worker: WorkerProcess) -> None:
    with worker.client(client_name="engine 7") as holder, worker.client() as other:
        pool = create_pool(holder)
        attached, mapping = attach_pool(holder)
        with pytest.raises(Conflict) as caught:
            other.request(messages.DeletePool(pool_id=pool.pool_id))
        [named] = caught.value.details["holders"]
        assert named["client_name"] == "engine 7"
        holder.ask(messages.Detach(hold_id=attached.hold_id), messages.Detached)
        mapping.close()
        other.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
        with pytest.raises(PoolNotFound):
            other.request(messages.GetPool(pool_id=pool.pool_id))
        assert describe(other).reserved_bytes == 0


def test_a_hold_belongs_to_its_connection(worker: WorkerProcess) -> None:
    with worker.client() as client, worker.client() as other:
        create_pool(client)
        attached, mapping = attach_pool(client)
        with pytest.raises(NotFound):
            other.request(messages.Detach(hold_id=attached.hold_id))
        mapping.close()


def test_a_one_way_detach_releases_the_hold(worker: WorkerProcess) -> None:
    with worker.client() as client:
        create_pool(client)
        attached, mapping = attach_pool(client)
        mapping.on_unmapped(lambda: client.send_later(messages.Detach(hold_id=attached.hold_id)))
        assert len(holders(client)) == 1
        mapping.close()
        assert holders(client) == []


@pytest.mark.parametrize(
    "handle",
    [{"plan_id": OTHER_PLAN_ID}, {"epoch": "0" * 32}],
    ids=["another plan", "another epoch"],
)
def test_a_handle_of_another_plan_or_epoch_is_stale(worker: WorkerProcess, handle: dict[str, str]) -> None:
    with worker.client() as client:
        pool = create_pool(client)
        with pytest.raises(StaleHandle):
            client.request(messages.Attach(pool_id=pool.pool_id, **handle))
        reply = client.request(messages.Attach(pool_id=pool.pool_id, plan_id=PLAN_ID, epoch=client.epoch))
        close_fds(reply.fds)


def test_more_than_the_budget_is_refused_at_once_and_what_is_deleted_counts_again(
    run_dir: Path, no_leaks: None
) -> None:
    with WorkerProcess(run_dir, "--memory", "3MiB") as worker, worker.client() as client:
        pool = create_pool(client, "one", size_bytes=2 << 20)
        with pytest.raises(NotEnoughMemory) as caught:
            create_pool(client, "two", size_bytes=2 << 20)
        assert caught.value.details["needed_bytes"] == (2 << 20) + OVERHEAD_BYTES
        assert caught.value.details["available_bytes"] == (1 << 20) - OVERHEAD_BYTES
        create_pool(client, "small", size_bytes=(1 << 20) - 2 * OVERHEAD_BYTES)
        client.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
        assert create_pool(client, "two", size_bytes=2 << 20).state == "ready"


@pytest.mark.parametrize("name", ["n" * 257, "ä" * 129, "line\nbreak", "\x00"])
def test_a_name_that_cannot_be_shown_is_refused(worker: WorkerProcess, name: str) -> None:
    with worker.client() as client:
        with pytest.raises(SpecInvalid):
            create_pool(client, name)
        assert describe(client).num_pools == 0


def test_a_plan_as_large_as_allowed_survives_and_a_larger_one_is_refused(worker: WorkerProcess) -> None:
    plan = bytes(range(256)) * (messages.MAX_PLAN_BYTES // 256)
    body = messages.CreatePool(name="large", plan_id=PLAN_ID, plan=plan, buffer_size_bytes=SIZE_BYTES)
    with worker.client() as client:
        pool = client.ask(body, messages.PoolCreated).pool
        client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        attached, mapping = attach_pool(client, "large")
        assert attached.plan == plan
        mapping.close()
        larger = messages.CreatePool(name="larger", plan_id=PLAN_ID, plan=plan + b"x", buffer_size_bytes=SIZE_BYTES)
        with pytest.raises(TooLarge):
            client.request(larger)


def test_no_descriptor_leaks_over_many_pools_and_clients(worker: WorkerProcess) -> None:
    with worker.client() as client:
        create_pool(client, "first")
        before = worker.num_fds()
        for number in range(200):
            pool = create_pool(client, f"pool {number}", size_bytes=4096)
            with worker.client() as other:
                _, mapping = attach_pool(other, f"pool {number}")
                mapping.close()
            client.ask(messages.DeletePool(pool_id=pool.pool_id, timeout_s=60), messages.PoolDeleted)
        assert worker.settles_at(before, client)


def test_a_pool_just_deleted_may_be_created_again(worker: WorkerProcess) -> None:
    with worker.client() as client:
        first = create_pool(client)
        client.ask(messages.DeletePool(pool_id=first.pool_id), messages.PoolDeleted)
        second = create_pool(client)
        assert second.pool_id != first.pool_id


# --- the process -----------------------------------------------------------------------------------------------------


def test_folder_socket_and_lock_are_for_the_owner_alone(worker: WorkerProcess, run_dir: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run_dir.iterdir()}
    assert modes["worker-host.sock"] == 0o600
    assert modes["worker-host.lock"] == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_second_worker_for_the_device_refuses_and_harms_nobody(worker: WorkerProcess, run_dir: Path) -> None:
    second = run_refused_worker(run_dir, "--device", "host")
    assert second.returncode == 1
    assert f"pid {worker.pid}" in second.stderr
    with worker.client() as client:
        assert describe(client).worker_pid == worker.pid


def test_the_socket_of_a_dead_worker_is_replaced(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client() as client:
        epoch = client.epoch
    worker.kill()
    assert worker.socket_path.exists()
    with WorkerProcess(run_dir) as successor, successor.client() as client:
        assert client.welcome.worker_pid == successor.pid
        assert client.epoch != epoch


def test_a_signal_to_end_removes_the_socket_and_gives_status_0(worker: WorkerProcess) -> None:
    with worker.client() as client:
        create_pool(client)
        assert worker.terminate() == 0
        assert not worker.socket_path.exists()
        with pytest.raises(WorkerLost):
            client.request(messages.ListPools())
    with pytest.raises(WorkerLost):
        worker.client()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--device", "cuda:0"), "install the driver"),
        (("--device", "../x"), "not a device name"),
        (("--device", "host", "--memory", "lots"), "neither a size in bytes"),
        (("--device", "host", "--group", "no-such-group-here"), "there is no group"),
        (("--device", "host", "--group", "99999999999"), "the largest group id"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_line(
    run_dir: Path, arguments: tuple[str, ...], expected: str
) -> None:
    outcome = run_refused_worker(run_dir, *arguments)
    assert outcome.returncode == (1 if "cuda:0" in arguments else 2)  # 2 for what no second try can help
    assert expected in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert not list(run_dir.iterdir())


LIGHT_PROGRAM = """
import sys
import kvpage_server.worker
heavy = {"torch", "numpy", "pydantic", "fastapi", "starlette", "uvicorn", "httpx", "asyncio", "typer"}
print(sorted(heavy & set(sys.modules)))
"""


def test_the_worker_loads_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", LIGHT_PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_worker_needs_little_memory_of_its_own(worker: WorkerProcess) -> None:
    with worker.client() as client:
        create_pool(client, size_bytes=64 << 20)
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines())
    assert int(fields["VmRSS"].split()[0]) < 40 << 10  # kB: interpreter and msgspec, and no page of the pool
