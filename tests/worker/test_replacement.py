"""A new worker takes over from one that runs: pools, clients, holds and socket. And draining one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.errors import Conflict, Draining, NotFound, PermissionDenied, WorkerLost
from kvpage.exit_status import TRY_AGAIN
from kvpage.memory.host import HostMemory
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages, succession
from kvpage.wire.channel import close_fds, header
from kvpage.wire.client import WorkerClient
from kvpage_server.worker_device import host_memory
from kvpage_server.worker_endpoint import Endpoint
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_takeover import Takeover
from support.api_service import kill_process, worker_pids
from support.eventually import until
from support.pools import PLAN, PLAN_ID, attach_pool, contents, create_pool
from support.raw_client import RawClient
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess, run_refused_worker
from support.worker_thread import WorkerThread

COMMAND = [sys.executable, "-m", "kvpage_server", "worker"]


def command(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = [*COMMAND, *arguments, "--run-dir", str(run_dir)]
    return subprocess.run(done, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def replaced_at_end(worker: WorkerProcess, run_dir: Path) -> Iterator[None]:
    """`kvpage worker replace` leaves a worker that is nobody's child."""
    yield
    for pid in worker_pids(RunDirectory(run_dir)):
        kill_process(pid)


def holders(client: WorkerClient) -> list[str]:
    return [holder.client_name for holder in client.ask(messages.FindPool(name="mimo"), messages.PoolState).holders]


@pytest.mark.usefixtures("replaced_at_end")
def test_the_command_leaves_clients_as_they_were(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client(client_name="engine") as client, RemoteClient() as remote:
        pool = create_pool(client)
        _, mapping = attach_pool(client)
        remote.do("connect", socket=str(worker.socket_path), name="other")
        remote.do("attach", name="mimo")
        remote.do("write", offset=0, data="as it was")
        done = command(run_dir, "replace")
        assert done.returncode == 0, done.stderr
        assert worker.wait() == 0
        assert "1 pools, 2 clients" in done.stderr
        state = client.ask(messages.DescribeDevice(), messages.DeviceState)
        assert state.worker_pid != worker.pid
        assert state.epoch == pool.epoch
        assert bytes(contents(mapping)[:9]) == b"as it was"
        assert sorted(holders(client)) == ["engine", "other"]
        with pytest.raises(Conflict):
            client.request(messages.DeletePool(pool_id=pool.pool_id))
        remote.kill()
        until(lambda: holders(client) == ["engine"])
        attached, again = attach_pool(client)
        assert attached.hold_id == 3  # numbers go on, so no old one names a new hold
        for mapped in (again, mapping):
            mapped.close()


def successor(run_dir: Path, *arguments: str) -> WorkerProcess:
    return WorkerProcess(run_dir, "--replace", *arguments)


def test_what_is_half_said_is_said_to_the_end(worker: WorkerProcess, run_dir: Path) -> None:
    """A request cut in two, and replies that nobody has read, go to the successor with the connection."""
    request = messages.encode(messages.RequestFrame(id=7, body=messages.ListPools()))
    with worker.client() as creator, RawClient(worker.socket_path) as half, RawClient(worker.socket_path) as slow:
        for number in range(20):
            create_pool(creator, f"{number}" + "n" * 250, size_bytes=4096)
        data = header(len(request), 0) + request
        half.socket.sendall(data[:11])
        unread = [slow.send(messages.ListPools()) for _ in range(60)]  # more than the socket takes
        creator.ask(messages.ListPools(), messages.PoolList)
        with successor(run_dir):
            assert worker.wait() == 0
            half.socket.sendall(data[11:])
            reply = half.answer(7).body
            assert isinstance(reply, messages.PoolList)
            assert len(reply.pools) == 20
            for request_id in unread:
                assert slow.answer(request_id).body == reply


def test_who_connects_meanwhile_waits_and_is_served(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client() as client, worker.client(role="api") as taker:
        create_pool(client)
        reply = taker.request(succession.TakeOver())
        assert isinstance(reply.body, succession.TakenOver)
        with RawClient(worker.socket_path, hello=False) as late:
            asked = late.send(messages.Hello(version=messages.PROTOCOL_VERSION, role="client"))
            taker.close()  # it has changed its mind
            assert late.answer(asked).error is None
        close_fds(reply.fds)
        assert holders(client) == []


def test_a_taker_that_dies_leaves_everything_as_it_was(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client(client_name="engine") as client:
        pool = create_pool(client)
        _, mapping = attach_pool(client)
        for num_steps in range(4):
            with worker.client(role="api") as taker:
                fds = taker.request(succession.TakeOver()).fds
                steps: list[messages.RequestBody] = [
                    messages.ExportPool(pool_id=pool.pool_id),
                    succession.TakeConnection(number=0),
                    succession.TakeConnection(number=0),
                ]
                for step in steps[:num_steps]:
                    fds += taker.request(step).fds
            close_fds(fds)
            assert holders(client) == ["engine"]
            assert client.ask(messages.DescribeDevice(), messages.DeviceState).worker_pid == worker.pid
        mapping.close()


def test_a_worker_that_dies_while_it_hands_over_is_replaced_all_the_same(worker: WorkerProcess, run_dir: Path) -> None:
    """Whoever takes over has the lock and the socket, so there is no second attempt: it serves with what it got."""
    with worker.client() as client:
        create_pool(client)
    os.kill(worker.pid, signal.SIGSTOP)
    ready_out, ready_in = os.pipe()
    taking = subprocess.Popen(
        [*COMMAND, "--replace", "--device", "host", "--run-dir", str(run_dir), "--ready-fd", str(ready_in)],
        pass_fds=[ready_in], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(ready_in)
    worker.kill()
    with taking, open(ready_out, "rb") as ready:
        told = ready.read()  # nothing was handed over, so it does not serve
        assert b"no worker" in told
        assert taking.stderr is not None
        assert taking.stderr.read() == b"kvpage worker: " + told
    assert taking.returncode == 1


def test_nobody_is_replaced_where_nobody_runs(no_leaks: None, run_dir: Path) -> None:
    done = command(run_dir, "replace", "--json")
    assert (done.returncode, done.stdout) == (TRY_AGAIN, "")
    told = json.loads(done.stderr)
    assert (told["code"], told["retryable"]) == ("worker-lost", True)
    assert not (run_dir / "worker-host.sock").exists()


def test_a_pool_that_is_being_made_is_waited_for(worker: WorkerProcess, run_dir: Path) -> None:
    create = messages.CreatePool(name="big", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=256 << 20)
    with worker.client() as client:
        pool = client.ask(create, messages.PoolCreated).pool
        with successor(run_dir), successor(run_dir):
            assert client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).state == "ready"


def test_a_request_that_waits_is_told_to_ask_again(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client() as client, RawClient(worker.socket_path) as waiting:
        pool = create_pool(client)
        _, mapping = attach_pool(client)
        asked = waiting.send(messages.DeletePool(pool_id=pool.pool_id, timeout_s=600))
        waiting.ask(messages.ListPools())
        with successor(run_dir):
            error = waiting.answer(asked).error
            assert error is not None
            assert error.code == Draining.code
            mapping.close()


@pytest.mark.parametrize(
    "body",
    [succession.TakeOver(), succession.DrainWorker(), succession.FinishAdoption()],
    ids=lambda b: type(b).__name__,
)
def test_ordinary_clients_may_not(worker: WorkerProcess, body: messages.RequestBody) -> None:
    with worker.client() as client, pytest.raises(PermissionDenied):
        client.request(body)


def test_one_worker_at_a_time_takes_over(worker: WorkerProcess) -> None:
    with worker.client(role="api") as taker, worker.client(role="api") as other:
        close_fds(taker.request(succession.TakeOver()).fds)
        with pytest.raises(NotFound):
            taker.request(succession.TakeConnection(number=1))
        with pytest.raises(Conflict):
            taker.request(succession.TakeOver())
        taker.close()
        with pytest.raises(Conflict):
            other.request(succession.FinishTakeOver())
        with pytest.raises(Conflict):
            other.request(succession.TakeConnection(number=0))


def test_the_budget_is_that_of_the_worker_before(run_dir: Path, no_leaks: None) -> None:
    with WorkerProcess(run_dir, "--memory", "64MiB") as worker, worker.client() as client:
        create_pool(client)
        for arguments, expected in [((), 64 << 20), (("--memory", "32MiB"), 32 << 20)]:
            with WorkerProcess(run_dir, "--replace", *arguments) as next_worker:
                state = client.ask(messages.DescribeDevice(), messages.DeviceState)
                assert (state.worker_pid, state.memory_limit_bytes) == (next_worker.pid, expected)
                if not arguments:
                    continue_with = successor(run_dir)
                    continue_with.__enter__()
            if not arguments:
                worker = continue_with
        worker.kill()


def test_a_taker_that_hangs_does_not_stop_the_service(no_leaks: None, run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(handover_s=0.05)) as worker, worker.client() as client:
        with worker.client(role="api") as taker:
            close_fds(taker.request(succession.TakeOver()).fds)
            assert client.ask(messages.ListPools(), messages.PoolList).pools == []  # answered when time is over
            with pytest.raises(WorkerLost):
                taker.request(succession.FinishTakeOver())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_steps", range(4))
def test_a_taker_that_hangs_keeps_nobody_out(worker: WorkerProcess, run_dir: Path, num_steps: int) -> None:
    """Stuck with everything it has got, while the worker dies and another is started."""
    with worker.client(role="api") as taker, worker.client():
        pool = create_pool(taker)
        steps: list[messages.RequestBody] = [
            succession.TakeOver(),
            messages.ExportPool(pool_id=pool.pool_id),
            succession.TakeConnection(number=0),
        ]
        fds = [fd for step in steps[:num_steps] for fd in taker.request(step).fds]
        worker.kill()
        with WorkerProcess(run_dir) as next_worker, next_worker.client() as client:
            assert client.welcome.worker_pid == next_worker.pid
        close_fds(fds)


def test_a_taker_that_asks_on_has_all_the_time_it_needs(no_leaks: None, run_dir: Path) -> None:
    now_s = [0.0]
    with (
        WorkerThread(run_dir, limits=Limits(handover_s=5), clock=lambda: now_s[0]) as worker,
        worker.client(role="api") as taker,
        worker.client(),
        worker.client(),
    ):
        fds = taker.request(succession.TakeOver()).fds
        for number in range(2):
            with worker.paused():
                now_s[0] += 4
            fds += taker.request(succession.TakeConnection(number=number)).fds
        assert len(fds) == 3  # the listening socket and two clients; the lock comes last
        close_fds(fds)


def test_a_worker_that_dies_before_it_gives_its_lock_away_leaves_it_to_its_taker(worker: WorkerProcess) -> None:
    with contextlib.closing(Takeover(worker.socket_path, "host", host_memory(), HostMemory())) as takeover:
        estate = takeover.fetch()
        worker.kill()
        assert takeover.finish() is None
        endpoint = Endpoint.inherit(worker.run_directory, "host", estate.listening_fd)
        endpoint.take_lock(None)
        endpoint.own(None)
        outcome = run_refused_worker(worker.run_directory.path, "--device", "host")
        assert f"(pid {os.getpid()})" in outcome.stderr
        endpoint.close()
        for sock, _ in estate.connections:
            sock.close()


def test_the_lock_is_said_to_be_with_whoever_has_it(no_leaks: None, run_dir: Path) -> None:
    lock_fd = os.open(RunDirectory(run_dir).worker_lock("host"), os.O_RDWR | os.O_CREAT, 0o600)
    os.write(lock_fd, f"{2**22}\n-\n".encode())  # a process id that the system does not give
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    outcome = run_refused_worker(run_dir, "--device", "host")
    assert outcome.returncode == 1
    assert f"(pid {os.getpid()})" in outcome.stderr
    os.close(lock_fd)


def test_a_worker_told_to_end_while_it_hands_over_ends_when_that_is_taken_back(worker: WorkerProcess) -> None:
    with worker.client(role="api") as taker:
        close_fds(taker.request(succession.TakeOver()).fds)
        os.kill(worker.pid, signal.SIGTERM)
        assert taker.ask(messages.ListPools(), messages.PoolList).pools == []
        assert worker.socket_path.exists()
    assert worker.wait() == 0
    assert not worker.socket_path.exists()


# --- draining --------------------------------------------------------------------------------------------------------


def test_draining_waits_for_the_last_hold_and_takes_nothing_new(worker: WorkerProcess) -> None:
    with worker.client() as client, worker.client(role="api"), RawClient(worker.socket_path, role="api") as asking:
        create_pool(client)
        attached, mapping = attach_pool(client)
        asked = asking.send(succession.DrainWorker(timeout_s=600))
        asking.ask(messages.ListPools())
        assert client.ask(messages.DescribeDevice(), messages.DeviceState).state == "draining"
        for body in (
            messages.Attach(name="mimo"),
            messages.CreatePool(name="new", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=4096),
        ):
            with pytest.raises(Draining):
                client.request(body)
        mapping.close()
        client.ask(messages.Detach(hold_id=attached.hold_id), messages.Detached)
        assert asking.answer(asked).body == succession.WorkerDrained(num_pools=1)
        assert worker.wait() == 0


def test_draining_is_taken_back_when_holders_stay(worker: WorkerProcess) -> None:
    with worker.client(client_name="engine") as client, worker.client(role="api"), worker.client(role="api") as asking:
        create_pool(client)
        _, mapping = attach_pool(client)
        with pytest.raises(Conflict) as caught:
            asking.request(succession.DrainWorker())
        assert caught.value.details["holders"][0]["client_name"] == "engine"
        _, again = attach_pool(client)
        for mapped in (mapping, again):
            mapped.close()


def test_draining_is_taken_back_when_whoever_asked_leaves(worker: WorkerProcess) -> None:
    with worker.client() as client, worker.client(role="api"):
        create_pool(client)
        _, mapping = attach_pool(client)
        with RawClient(worker.socket_path, role="api") as asking:
            asking.send(succession.DrainWorker(timeout_s=600))
            asking.ask(messages.ListPools())
        until(lambda: client.ask(messages.DescribeDevice(), messages.DeviceState).state == "ready")
        mapping.close()


def test_pools_that_nobody_else_keeps_are_lost_only_on_request(worker: WorkerProcess, run_dir: Path) -> None:
    with worker.client() as client:
        create_pool(client)
    done = command(run_dir, "drain")
    assert done.returncode == 1
    assert "--lose-pools" in done.stderr
    done = command(run_dir, "drain", "--lose-pools", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"device": "host", "num_pools": 1}
    assert worker.wait() == 0
