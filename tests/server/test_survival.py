"""No single process's death loses a pool: kill -9 of the worker, of the API, and orderly ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kvpage
from kvpage.client.http import Client
from kvpage.client.resources import Device, Pool
from kvpage.errors import DeviceUnavailable, PoolNotFound, WorkerLost
from kvpage.run_directory import RunDirectory
from kvpage.wire.messages import DescribeDevice, DeviceState
from support.api_service import ApiService, is_alive, kill_process, run_refused, worker_pids
from support.eventually import until
from support.plan_requests import small_request
from support.pools import create_pool
from support.remote_client import RemoteClient
from support.worker_process import WorkerProcess

TEXT = "written before the worker died"


@pytest.fixture
def engine(service: ApiService) -> Iterator[RemoteClient]:
    """An unrelated process that has pool `mimo` attached and has written `TEXT` to it."""
    with service.client() as client:
        client.create_pool(small_request(), name="mimo")
    with RemoteClient() as engine:
        engine.do("connect", socket=str(service.run_directory.worker_socket("host")))
        engine.do("attach", name="mimo")
        engine.do("write", offset=4096, data=TEXT)
        yield engine


def create_when_possible(client: Client, name: str) -> Pool:
    """Create a pool on a device whose worker was just killed: repeated while the server has not noticed yet."""

    def attempt() -> Pool | None:
        try:
            return client.create_pool(small_request(), name=name)
        except WorkerLost:
            return None

    return until(attempt)


def ready_device(client: Client) -> Device:
    [device] = client.devices()
    assert device.state == "ready", device
    return device


def test_pools_survive_the_death_of_their_worker(service: ApiService, engine: RemoteClient) -> None:
    with service.client() as client:
        before, old_worker = client.find_pool("mimo"), service.worker_pid()
        kill_process(old_worker)
        create_when_possible(client, "after")
        after = client.find_pool("mimo")
        device = ready_device(client)
        assert device.worker_pid not in (None, old_worker)
        assert device.num_pools == 2
        assert (after.id, after.epoch, after.plan_id, after.state) == (before.id, before.epoch, before.plan_id, "ready")
        assert all(check.ok for check in client.health().checks)
    assert engine.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT
    with RemoteClient() as other:
        other.do("connect", socket=str(service.run_directory.worker_socket("host")))
        other.do("attach", name="mimo", epoch=before.epoch)
        assert other.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT
        other.do("write", offset=0, data="from another")
        assert engine.do("read", offset=0, size_bytes=12)["data"] == "from another"


def test_pools_survive_one_death_after_another(service: ApiService, engine: RemoteClient) -> None:
    with service.client() as client:
        epoch = client.find_pool("mimo").epoch
        for number in range(3):
            kill_process(service.worker_pid())
            create_when_possible(client, f"after {number}")
        assert client.find_pool("mimo").epoch == epoch
        assert len(client.pools()) == 4
    assert engine.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT


def test_the_worker_outlives_the_api_and_the_next_api_takes_it_over(service: ApiService, engine: RemoteClient) -> None:
    worker = service.worker_pid()
    service.kill()
    assert is_alive(worker)
    with RemoteClient() as late:  # attaching needs only the worker
        late.do("connect", socket=str(service.run_directory.worker_socket("host")))
        late.do("attach", name="mimo")
        assert late.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT
    with ApiService(service.run_directory.path) as successor, successor.client() as client:
        assert successor.worker_pid() == worker
        assert client.find_pool("mimo").num_holders == 1
        kill_process(worker)  # the new API holds the memory too
        create_when_possible(client, "after")
        assert client.find_pool("mimo").state == "ready"
        assert engine.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT
        second_worker = successor.worker_pid()
        assert successor.terminate() == -signal.SIGTERM
    assert not is_alive(second_worker)


def test_a_plan_in_a_pool_is_never_forgotten(service: ApiService, engine: RemoteClient) -> None:
    plan = kvpage.plan(small_request())
    service.kill()  # and with it every cache
    with ApiService(service.run_directory.path) as successor, successor.client() as client:
        assert client.get_plan(plan.plan_id) == plan
        assert client.pool_tensors(client.find_pool("mimo").id).plan_id == plan.plan_id


def test_a_worker_of_an_earlier_server_ends_with_the_next_one(service: ApiService) -> None:
    worker = service.worker_pid()
    service.kill()
    with ApiService(service.run_directory.path) as successor:
        assert successor.worker_pid() == worker
        successor.terminate()
    assert not is_alive(worker)


def test_only_the_death_of_both_loses_a_pool_and_the_epoch_tells(service: ApiService, engine: RemoteClient) -> None:
    with service.client() as client:
        old = client.find_pool("mimo")
    worker = service.worker_pid()
    os.kill(service.pid, signal.SIGSTOP)  # so that it cannot notice, as if both died at once
    kill_process(worker)
    service.kill()
    with ApiService(service.run_directory.path) as successor, successor.client() as client:
        with pytest.raises(PoolNotFound):
            client.find_pool("mimo")
        new = client.create_pool(small_request(), name="mimo")
        assert new.epoch != old.epoch
        with RemoteClient() as late:
            late.do("connect", socket=str(service.run_directory.worker_socket("host")))
            assert late.do("attach", name="mimo", epoch=old.epoch)["error"] == "stale-handle"
    assert engine.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT  # its own mapping goes on


def test_while_there_is_no_worker_pools_are_shown_as_they_were(no_leaks: None, run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker, ApiService(run_dir, "--external-workers") as service:
        with service.client() as client:
            before = client.create_pool(small_request(), name="mimo")
            worker.kill()
            until(lambda: client.devices()[0].state == "lost")
            assert client.pools() == [before]
            assert client.get_pool(before.id) == before
            assert client.health().status == "not-ready"
            for refused in (
                lambda: client.create_pool(small_request(), name="x", wait_s=0),
                lambda: client.delete_pool(before.id),
                lambda: client.get_pool("pool-" + "0" * 16),
            ):
                with pytest.raises(DeviceUnavailable):
                    refused()
            with WorkerProcess(run_dir) as successor:
                create_when_possible(client, "after")
                assert ready_device(client).worker_pid == successor.pid
                assert client.find_pool("mimo") == before
                assert service.terminate() == -signal.SIGTERM
                assert is_alive(successor.pid)  # it belongs to whoever started it


def test_a_pool_the_next_worker_refuses_stays_visible_and_can_be_deleted(no_leaks: None, run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker, ApiService(run_dir, "--external-workers") as service:
        with service.client() as client:
            pool = client.create_pool(small_request(), name="mimo")
            worker.kill()
            until(lambda: client.devices()[0].state == "lost")
            os.kill(service.pid, signal.SIGSTOP)  # the successor gets a pool of its own, and so an epoch, first
            with WorkerProcess(run_dir, "--adopt-within", "0") as successor, successor.client() as direct:
                own = create_pool(direct, "own")
                os.kill(service.pid, signal.SIGCONT)
                until(lambda: client.devices()[0].state == "ready")
                shown = client.get_pool(pool.id)
                assert shown.state == "failed"
                assert shown.error is not None
                assert shown.error.code == "stale-handle"
                assert {listed.id for listed in client.pools()} == {pool.id, own.pool_id}
                assert client.health().status == "not-ready"
                client.delete_pool(pool.id)
                assert [listed.id for listed in client.pools()] == [own.pool_id]
                assert client.health().status == "ready"


def test_a_worker_somebody_else_started_is_used_and_left_alone(no_leaks: None, run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker, ApiService(run_dir) as service:
        assert service.worker_pid() == worker.pid
        service.terminate()
        assert is_alive(worker.pid)


def test_workers_can_be_left_running(service: ApiService) -> None:
    service.terminate()
    with ApiService(service.run_directory.path, "--leave-workers") as leaving:
        worker = leaving.worker_pid()
        with leaving.client() as client:
            client.create_pool(small_request(), name="mimo")
        leaving.terminate()
        assert is_alive(worker)
        with ApiService(service.run_directory.path) as successor, successor.client() as client:
            assert client.find_pool("mimo").state == "ready"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_leaves_no_process_and_no_socket(service: ApiService, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, and so in every child")
    worker = service.worker_pid()
    service.ask_to_end(number)
    assert service.wait() == -number
    assert not is_alive(worker)
    assert worker_pids(service.run_directory) == []
    assert sorted(path.name for path in service.run_directory.path.glob("*.sock")) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_one_that_is_told_again_and_again_ends_in_its_order_all_the_same(
    service: ApiService, number: signal.Signals
) -> None:
    """A terminal that is closed tells more than once, and a person may be impatient: no worker is left behind."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, and so in every child")
    worker = service.worker_pid()

    def tell_again() -> bool:
        service.ask_to_end(number)
        return service.has_ended()

    until(tell_again)
    assert not is_alive(worker)
    assert worker_pids(service.run_directory) == []
    assert sorted(path.name for path in service.run_directory.path.glob("*.sock")) == []


def test_the_hang_up_of_a_terminal_is_ignored_under_nohup(no_leaks: None, run_dir: Path) -> None:
    ignoring = "import signal, runpy; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    program = f"{ignoring}; runpy.run_module('kvpage_server', run_name='__main__')"
    with ApiService(run_dir, command=[sys.executable, "-c", program, "serve"]) as service:
        service.ask_to_end(signal.SIGHUP)
        with service.client() as client:
            assert client.health().status == "ready"


@pytest.mark.parametrize("leave", [False, True])
def test_the_log_of_a_server_that_ends_names_the_pools_and_their_holders(
    no_leaks: None, run_dir: Path, leave: bool
) -> None:
    with ApiService(run_dir, *["--leave-workers"] * leave) as service:
        with service.client() as client:
            held, free = (client.create_pool(small_request(), name=name) for name in ("held", "free"))
        with kvpage.attach("held", run_dir=str(run_dir), client_name="the engine"):
            service.terminate()
        fate = "stays with its worker" if leave else "ends with this server"
        lines = [line for line in service.log().splitlines() if fate in line]
        assert any(
            held.id in line and f"held by pid {os.getpid()} " in line and "(the engine)" in line for line in lines
        )
        assert any(free.id in line and "held by nobody" in line for line in lines)


def test_control_c_ends_it_quietly(service: ApiService) -> None:
    worker = service.worker_pid()
    os.kill(service.pid, signal.SIGINT)
    assert service.wait() == 128 + signal.SIGINT
    assert not is_alive(worker)
    assert "Traceback" not in service.log()


def test_sigterm_does_not_wait_for_those_who_wait(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir, "--external-workers", wait_ready=False) as service, service.client() as client:
        until(lambda: answers(client))
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(service.run_directory.api_socket))
            waiting.sendall(raw_creation(wait_s=30))
            client.devices()  # answered after the request above was taken in
            assert service.terminate() == -signal.SIGTERM
            answer = waiting.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"draining"' in answer


def raw_creation(*, wait_s: int) -> bytes:
    body = json.dumps({"name": "mimo", "request": small_request()}).encode()
    head = (
        f"POST /v1/pools HTTP/1.1\r\nHost: kvpage\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nPrefer: wait={wait_s}\r\n\r\n"
    )
    return head.encode() + body


def answers(client: Client) -> bool:
    try:
        client.health()
    except DeviceUnavailable:
        return False
    return True


def test_a_second_server_is_refused(service: ApiService) -> None:
    done = run_refused(service.run_directory.path)
    assert done.returncode == 1
    assert "already" in done.stderr
    with service.client() as client:
        assert client.health().status == "ready"


def test_a_worker_that_cannot_start_is_reported(no_leaks: None, run_dir: Path) -> None:
    lock = RunDirectory(run_dir).worker_lock("host")
    with contextlib.ExitStack() as stack:
        fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        service = stack.enter_context(ApiService(run_dir, wait_ready=False))
        client = stack.enter_context(service.client())
        until(lambda: answers(client))
        device = until(lambda: next((device for device in client.devices() if device.state == "lost"), None))
        assert "status 1" in device.detail
        assert "already serves device host" in device.detail
        with pytest.raises(DeviceUnavailable):
            client.create_pool(small_request(), name="mimo", wait_s=0)


def test_a_worker_that_was_replaced_by_hand_may_die_too(service: ApiService, engine: RemoteClient) -> None:
    old_worker = service.worker_pid()
    command = [sys.executable, "-m", "kvpage_server", "worker", "replace", "--run-dir", str(service.run_directory.path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    with service.client() as client:
        new_worker = until(lambda: next((pid for pid in [ready_worker(client)] if pid not in (None, old_worker)), None))
        before = client.find_pool("mimo")
        assert before.num_holders == 1
        kill_process(new_worker)
        create_when_possible(client, "after")
        assert client.find_pool("mimo").epoch == before.epoch
    assert engine.do("read", offset=4096, size_bytes=len(TEXT))["data"] == TEXT


def ready_worker(client: Client) -> int | None:
    """None while the server looks for the worker."""
    return client.devices()[0].worker_pid


def test_while_the_next_worker_is_awaited_no_answer_is_final(no_leaks: None, run_dir: Path) -> None:
    """It serves nobody before it has been handed the pools, neither over HTTP nor at its own socket."""
    with WorkerProcess(run_dir) as worker, ApiService(run_dir, "--external-workers") as service:
        with service.client() as client:
            pool = client.create_pool(small_request(), name="mimo")
            os.kill(service.pid, signal.SIGSTOP)
            worker.kill()
            with WorkerProcess(run_dir) as successor, ThreadPoolExecutor(1) as threads:
                attaching = threads.submit(kvpage.attach, "mimo", run_dir=str(run_dir), epoch=pool.epoch)
                with successor.client() as direct:
                    until(lambda: direct.ask(DescribeDevice(), DeviceState).num_clients == 2)
                assert not attaching.done()
                os.kill(service.pid, signal.SIGCONT)
                with attaching.result(60) as attachment:
                    assert (attachment.pool_id, attachment.detached) == (pool.id, False)


def test_a_pool_whose_control_block_was_spoilt_is_refused_and_shown(no_leaks: None, run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker, ApiService(run_dir, "--external-workers") as service:
        with service.client() as client:
            spoilt = client.create_pool(small_request(), name="spoilt")
            sound = client.create_pool(small_request(), name="sound")
            worker.kill()
            until(lambda: client.devices()[0].state == "lost")
            spoil_control_block(service.pid, spoilt.id)
            with WorkerProcess(run_dir):
                until(lambda: client.devices()[0].state == "ready")
                shown = client.get_pool(spoilt.id)
                assert shown.state == "failed"
                assert shown.error is not None
                assert shown.error.code == "protocol-error"
                assert "checksum" in shown.error.message
                assert client.find_pool("sound") == sound
                with pytest.raises(PoolNotFound):
                    kvpage.attach("spoilt", run_dir=str(run_dir))
                client.delete_pool(spoilt.id)
                assert client.pools() == [sound]


def spoil_control_block(pid: int, pool_id: str) -> None:
    """Change one byte of it, through the descriptor that process `pid` has."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(link).startswith("/memfd:"):
            with link.open("r+b") as block:
                at = block.read(1 << 16).find(pool_id.encode())
                if at >= 0:
                    block.seek(at)
                    block.write(b"q")
                    return
    raise AssertionError(f"process {pid} has no control block of {pool_id}")


def test_a_client_whose_worker_died_reads_on_and_attaches_again(no_leaks: None, run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker, ApiService(run_dir, "--external-workers") as service:
        with service.client() as client:
            pool = client.create_pool(small_request(), name="mimo")
            old = kvpage.attach("mimo", run_dir=str(run_dir))
            old.buffer[:4] = torch.tensor([1, 2, 3, 4])
            assert not old.detached
            worker.kill()
            assert old.detached
            assert old.buffer[:4].tolist() == [1, 2, 3, 4]
            with WorkerProcess(run_dir):
                with kvpage.attach("mimo", run_dir=str(run_dir), epoch=old.epoch, timeout_s=60) as new:
                    assert new.buffer[:4].tolist() == [1, 2, 3, 4]
                    new.buffer[0] = 9
                    assert int(old.buffer[0]) == 9
                    until(lambda: client.find_pool("mimo").num_holders == 1)
                until(lambda: client.find_pool("mimo").num_holders == 0)
                client.delete_pool(pool.id)  # the new worker knows nothing of the old attachment
                assert old.buffer[:4].tolist() == [9, 2, 3, 4]  # which keeps its bytes until it is closed
                old.close()
                assert old.detached
