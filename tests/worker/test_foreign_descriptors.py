"""Descriptors that a client has no reason to send never reach the worker, whatever closing them would take."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvpage.wire import messages
from kvpage.wire.channel import header
from kvpage.wire.client import WorkerClient
from kvpage_server.worker_disposal import MAX_THREADS, Disposal
from kvpage_server.worker_limits import Limits
from support.api_service import ApiService
from support.eventually import until
from support.pools import attach_pool, create_pool
from support.raw_client import RawClient
from support.worker_process import WORKER_COMMAND, WorkerProcess
from support.worker_thread import WorkerThread

pytestmark = pytest.mark.usefixtures("no_leaks")

LINGER_S = 3600
PATIENCE_S = 20.0  # of a bystander, who is answered in milliseconds by a worker that does not wait for the linger


@contextmanager
def lingering() -> Iterator[socket.socket]:
    """A TCP socket whose last close waits for its peer, which takes nothing until this ends."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        with server.accept()[0] as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sender.setblocking(False)
            try:
                while True:
                    sender.send(b"x" * 65536)
            except BlockingIOError:
                pass
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            yield sender


@contextmanager
def stopped(worker: WorkerProcess) -> Iterator[None]:
    """Whatever is sent meanwhile waits for the worker."""
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def send_and_forget(client: RawClient, stranger: socket.socket, data: bytes) -> None:
    """From now on the worker's end of the connection has the last descriptor of `stranger`."""
    socket.send_fds(client.socket, [data], [stranger.fileno()])
    stranger.close()


def half_a_frame(client: RawClient, stranger: socket.socket) -> None:
    send_and_forget(client, stranger, header(100, 1))


def adoption(client: RawClient, stranger: socket.socket) -> None:
    body = messages.AdoptPool(chunks=[messages.ChunkInfo(kind="memfd", size_bytes=4096)])
    payload = messages.encode(messages.RequestFrame(id=9, body=body))
    send_and_forget(client, stranger, header(len(payload), 2) + payload)


def far_behind_a_fault(client: RawClient, stranger: socket.socket) -> None:
    """The descriptor waits behind a broken frame, so the worker hangs up before it sees it."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    client.socket.sendall(bytes(64 << 10))  # as much as the worker reads at once
    send_and_forget(client, stranger, b"x")


def urgent(client: RawClient, stranger: socket.socket) -> None:
    """Which a reader that does not ask for it never sees: the kernel drops it while it reads what follows."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", stranger.fileno()))]
    client.socket.sendmsg([b"!"], rights, socket.MSG_OOB)
    stranger.close()
    client.socket.sendall(header(100, 0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("send", [half_a_frame, adoption, far_behind_a_fault, urgent])
@pytest.mark.parametrize("hello", [False, True], ids=["before hello", "after hello"])
def test_a_socket_that_lingers_blocks_nobody(
    worker: WorkerProcess, hello: bool, send: Callable[[RawClient, socket.socket], None]
) -> None:
    with WorkerClient(worker.socket_path, timeout_s=PATIENCE_S) as bystander:
        create_pool(bystander)
        before = worker.num_fds()
        with lingering() as stranger, RawClient(worker.socket_path, hello=hello) as client:
            with stopped(worker):
                send(client, stranger)
            assert client.hang_up_reason() == "protocol-error"
            for _ in range(3):
                attached, mapping = attach_pool(bystander)
                mapping.close()
                bystander.ask(messages.Detach(hold_id=attached.hold_id), messages.Detached)
        until(lambda: worker.num_fds() == before)


def test_the_linger_is_still_going_on_when_others_are_served(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, WorkerClient(worker.socket_path, timeout_s=PATIENCE_S) as bystander:
        with lingering() as stranger, RawClient(worker.socket_path) as client:
            with worker.paused():
                half_a_frame(client, stranger)
            assert client.hang_up_reason() == "protocol-error"
            bystander.ask(messages.ListPools(), messages.PoolList)
            assert worker.disposal.num_open == 1
        until(lambda: worker.disposal.num_open == 0)


def test_who_is_turned_away_blocks_nobody_either(run_dir: Path) -> None:
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *WORKER_COMMAND]
    with WorkerProcess(run_dir, command=command) as worker, lingering() as stranger, ExitStack() as stack:
        bystander = WorkerClient(worker.socket_path, timeout_s=PATIENCE_S)
        stack.callback(bystander.close)
        num_more = Limits(max_fds=64).max_fds_with_clients - 1
        for _ in range(num_more):
            stack.enter_context(worker.client())
        with stopped(worker):
            refused = stack.enter_context(RawClient(worker.socket_path, hello=False))
            send_and_forget(refused, stranger, header(100, 1))
        assert refused.hang_up_reason() == "too-many-clients"
        bystander.ask(messages.ListPools(), messages.PoolList)


def test_a_worker_ends_while_strangers_linger(worker: WorkerProcess) -> None:
    with lingering() as stranger, lingering() as unaccepted, ExitStack() as stack:
        with stopped(worker):
            for sock in (stranger, unaccepted):
                client = stack.enter_context(RawClient(worker.socket_path, hello=False))
                send_and_forget(client, sock, header(100, 1))
            os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait() == 0


def test_the_server_takes_no_descriptors_over_http(run_dir: Path) -> None:
    """Where the kernel can refuse them: Linux 6.16."""
    with ApiService(run_dir) as service, socket.socket(socket.AF_UNIX) as client, lingering() as stranger:
        if not can_refuse_descriptors(client):
            pytest.skip("this kernel has no SO_PASSRIGHTS")
        client.connect(str(service.run_directory.api_socket))
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"], [stranger.fileno()])
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        stranger.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # it is ours, so we would wait


def can_refuse_descriptors(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, 83))
    except OSError:
        return False


class StuckSocket(socket.socket):
    """Something is left in it, and closing it takes until the test says so."""

    def __init__(self, gate: threading.Event) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        theirs.send(b"x")
        theirs.close()
        self.gate = gate
        self.closing = threading.Event()

    def close(self) -> None:
        self.closing.set()
        assert self.gate.wait(60)
        super().close()


def test_sockets_are_closed_although_others_are_stuck() -> None:
    disposal, gate = Disposal(), threading.Event()
    stuck = [StuckSocket(gate) for _ in range(MAX_THREADS - 1)]
    for sock in stuck:
        disposal.close(sock)
        assert sock.closing.wait(60)
    gate_of_others = threading.Event()
    gate_of_others.set()
    quick = [StuckSocket(gate_of_others) for _ in range(20)]
    for sock in quick:
        disposal.close(sock)
    until(lambda: disposal.num_open == len(stuck))
    assert disposal.num_stuck == 0
    assert all(sock.fileno() == -1 for sock in quick)
    stuck += [StuckSocket(gate), StuckSocket(gate)]
    for sock in stuck[-2:]:
        disposal.close(sock)
    assert stuck[-2].closing.wait(60)
    assert disposal.num_stuck == len(stuck) == MAX_THREADS + 1
    gate.set()
    disposal.stop()
    assert disposal.num_open == 0


def test_a_socket_in_which_nothing_is_left_is_closed_at_once() -> None:
    ours, theirs = socket.socketpair()
    disposal = Disposal()
    disposal.close(ours)
    assert (ours.fileno(), disposal.num_open) == (-1, 0)
    assert theirs.recv(1) == b""
    theirs.close()
    disposal.stop()


def test_stopping_does_not_wait_for_ever() -> None:
    disposal, gate = Disposal(), threading.Event()
    stuck = StuckSocket(gate)
    disposal.close(stuck)
    disposal.stop()
    assert disposal.num_open == 1
    gate.set()
    until(lambda: stuck.fileno() == -1)


def test_descriptors_in_a_clients_socket_are_not_taken_in(worker: WorkerProcess) -> None:
    """Not even for a moment: there is nothing to count and nothing to run out of."""
    with worker.client() as bystander, RawClient(worker.socket_path) as client:
        before = worker.num_fds()
        inside, outside = os.pipe()
        for data in (header(100, 16), b"x"):
            try:
                socket.send_fds(client.socket, [data], [inside] * 16)
            except BrokenPipeError:
                break
        assert client.hang_up_reason() == "protocol-error"
        bystander.ask(messages.ListPools(), messages.PoolList)
        assert worker.num_fds() <= before
        os.close(inside)
        os.close(outside)
