"""The client's end of the protocol, against a worker that follows a script."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpage.errors import (
    Conflict,
    KvpageError,
    NotSupported,
    PermissionDenied,
    ProtocolError,
    TooLarge,
    TooManyClients,
    WorkerLost,
)
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import Detach, Detached, ListPools, PoolDeleted, PoolList, WaitPool
from support.scripted_worker import EPOCH, WELCOME, Peer, scripted_worker

pytestmark = pytest.mark.usefixtures("no_leaks")

PLAN_ID = "sha256:" + "0" * 64
POOL_ID = "pool-" + "0" * 16
ATTACH = messages.Attach(name="x")


@pytest.fixture
def path(run_dir: Path) -> Path:
    return run_dir / "worker-host.sock"


def attached(hold_id: int) -> messages.Attached:
    pool = messages.PoolState(
        pool_id=POOL_ID,
        name="x",
        device="host",
        epoch=EPOCH,
        plan_id=PLAN_ID,
        state="ready",
        buffer_size_bytes=1,
        committed_bytes=1,
        num_holders=1,
        holders=[],
    )
    return messages.Attached(hold_id=hold_id, pool=pool, plan=None, chunks=[])


def open_null() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def until_hang_up(peer: Peer) -> None:
    while True:
        peer.receive()


def test_a_client_says_hello_and_knows_the_worker(path: Path) -> None:
    with scripted_worker(path, until_hang_up), WorkerClient(path, client_name="test") as client:
        assert client.welcome == WELCOME
        assert client.epoch == EPOCH
        assert not client.closed
    assert client.closed
    client.close()


def test_nobody_listening_is_a_lost_worker(path: Path) -> None:
    with pytest.raises(WorkerLost):
        WorkerClient(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(WorkerLost):
        WorkerClient(path)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("too-many-clients", TooManyClients), ("permission-denied", PermissionDenied), ("not-supported", NotSupported)],
)
def test_a_client_that_is_turned_away_learns_why(path: Path, code: str, kind: type[KvpageError]) -> None:
    def turn_away(peer: Peer) -> None:
        peer.fail(0, code)  # before anything was read: the client's hello meets a closed socket

    with scripted_worker(path, turn_away, greet=False), pytest.raises(kind) as caught:
        WorkerClient(path)
    assert caught.value.details == {"by": "script"}


def test_a_client_that_asks_at_once_says_hello_with_its_first_request(path: Path) -> None:
    seen: list[type[messages.RequestBody]] = []

    def script(peer: Peer) -> None:
        hello, asked = peer.receive(), peer.receive()  # both are there before anything is answered
        seen.extend((type(hello.body), type(asked.body)))
        peer.reply(hello.id, WELCOME)
        peer.reply(asked.id, attached(1), [open_null()])
        peer.reply(peer.receive().id, PoolList(pools=[]))

    with scripted_worker(path, script, greet=False), WorkerClient(path, asks_at_once=True) as client:
        assert not hasattr(client, "welcome")
        reply = client.request(ATTACH)
        os.close(*reply.fds)
        assert client.welcome == WELCOME
        assert client.ask(ListPools(), PoolList) == PoolList(pools=[])
    assert seen == [messages.Hello, messages.Attach]


def test_a_hello_that_is_refused_ends_the_first_request_of_who_asks_at_once(path: Path) -> None:
    def refuse(peer: Peer) -> None:
        peer.fail(peer.receive().id, "permission-denied", [open_null()])

    with scripted_worker(path, refuse, greet=False), WorkerClient(path, asks_at_once=True) as client:
        with pytest.raises(PermissionDenied):
            client.request(ATTACH)
        assert client.closed


def test_a_hello_that_is_answered_with_something_else_is_no_welcome(path: Path) -> None:
    def confuse(peer: Peer) -> None:
        peer.reply(peer.receive().id, PoolList(pools=[]))

    with scripted_worker(path, confuse, greet=False), WorkerClient(path, asks_at_once=True) as client:
        with pytest.raises(ProtocolError, match="answered Hello with PoolList"):
            client.request(ATTACH)
        assert client.closed


def test_who_asks_at_once_and_never_does_leaves_nothing(path: Path) -> None:
    with scripted_worker(path, until_hang_up, greet=False):
        WorkerClient(path, asks_at_once=True).close()


def test_an_error_reply_raises_its_class_and_the_client_goes_on(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.fail(peer.receive().id, "conflict", [open_null()])
        peer.reply(peer.receive().id, PoolList(pools=[]))

    with scripted_worker(path, script), WorkerClient(path) as client:
        with pytest.raises(Conflict):
            client.request(ListPools())
        assert client.ask(ListPools(), PoolList) == PoolList(pools=[])


def test_a_reply_brings_descriptors_that_the_caller_owns(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.reply(peer.receive().id, attached(1), [open_null(), open_null()])

    with scripted_worker(path, script), WorkerClient(path) as client:
        reply = client.request(ATTACH)
    for fd in reply.fds:
        os.close(fd)
    assert len(reply.fds) == 2


ADOPT = messages.AdoptPool(chunks=[messages.ChunkInfo(kind="memfd", size_bytes=1)])


def test_descriptors_go_out_as_copies(path: Path) -> None:
    def script(peer: Peer) -> None:
        request = peer.receive()
        os.write(peer.fds[0], b"from the worker")
        os.close(peer.fds[0])
        peer.reply(request.id, PoolList(pools=[]))

    inside, outside = os.pipe()
    with scripted_worker(path, script), WorkerClient(path) as client:
        client.request(ADOPT, [outside])
    os.write(outside, b", and from its owner")
    assert os.read(inside, 100) == b"from the worker, and from its owner"
    os.close(inside)
    os.close(outside)


def test_a_descriptor_that_is_not_open_is_refused_before_anything_is_sent(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.reply(peer.receive().id, PoolList(pools=[]))

    fd = open_null()
    with scripted_worker(path, script), WorkerClient(path) as client:
        with pytest.raises(OSError, match="Bad file descriptor"):
            client.request(ADOPT, [fd, 1 << 20])
        client.request(ListPools())
    os.close(fd)


def test_the_next_request_acknowledges_the_reply_with_descriptors(path: Path) -> None:
    acknowledged: list[int | None] = []

    def script(peer: Peer) -> None:
        first = peer.receive()
        peer.reply(first.id, attached(1), [open_null()])
        second = peer.receive()
        peer.reply(second.id, PoolList(pools=[]))
        acknowledged.extend([first.ack, second.ack])
        assert second.ack == first.id

    with scripted_worker(path, script), WorkerClient(path) as client:
        os.close(client.request(ATTACH).fds[0])
        client.request(ListPools())
    assert acknowledged[0] is None


@pytest.mark.parametrize("reply_id", [0, 1, 99])
def test_an_answer_to_another_request_ends_the_connection(path: Path, reply_id: int) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.reply(reply_id, PoolList(pools=[]), [open_null()])

    with scripted_worker(path, script), WorkerClient(path) as client:
        with pytest.raises(ProtocolError):
            client.request(ListPools())
        assert client.closed


def test_an_answer_of_the_wrong_kind_is_refused_and_its_descriptors_closed(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.reply(peer.receive().id, PoolDeleted(pool_id=POOL_ID), [open_null()])

    with scripted_worker(path, script), WorkerClient(path) as client, pytest.raises(ProtocolError):
        client.ask(ListPools(), PoolList)


def test_bytes_that_are_no_reply_end_the_connection(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(b"\xc1", [open_null()])

    with scripted_worker(path, script), WorkerClient(path) as client:
        with pytest.raises(ProtocolError):
            client.request(ListPools())
        assert client.closed


def test_a_worker_that_goes_away_is_lost_and_so_is_every_later_request(path: Path) -> None:
    with scripted_worker(path, lambda peer: None), WorkerClient(path) as client:
        for _ in range(2):
            with pytest.raises(WorkerLost):
                client.request(ListPools())
        assert client.closed
        assert client.fileno() == -1


def test_a_worker_that_does_not_answer_in_time_is_lost(path: Path) -> None:
    with scripted_worker(path, until_hang_up), WorkerClient(path) as client:
        client.timeout_s = 0.01
        with pytest.raises(WorkerLost):
            client.request(ListPools())
        assert client.closed


def test_the_time_a_request_may_wait_at_the_worker_is_added_to_the_limit(path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        request = peer.receive()
        asked.set()
        answer.wait()
        peer.reply(request.id, PoolList(pools=[]))

    def wait(client: WorkerClient) -> None:
        client.request(WaitPool(pool_id=POOL_ID, timeout_s=600))

    with scripted_worker(path, script), WorkerClient(path) as client:
        client.timeout_s = 0.0
        waiting = threading.Thread(target=wait, args=(client,))
        waiting.start()
        assert asked.wait(60)
        assert not client.closed
        answer.set()
        waiting.join()
        assert not client.closed


def test_a_request_too_large_for_a_frame_is_refused_before_anything_is_sent(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.reply(peer.receive().id, PoolList(pools=[]))

    huge = messages.CreatePool(name="x", plan_id=PLAN_ID, plan=bytes(9 << 20), buffer_size_bytes=1)
    with scripted_worker(path, script), WorkerClient(path) as client:
        with pytest.raises(TooLarge):
            client.request(huge)
        client.request(ListPools())


def test_a_message_sent_later_goes_out_at_once_when_nothing_is_in_the_way(path: Path) -> None:
    received = threading.Event()

    def script(peer: Peer) -> None:
        message = peer.receive()
        assert (message.id, message.body) == (0, Detach(hold_id=7))
        received.set()

    with scripted_worker(path, script), WorkerClient(path) as client:
        client.send_later(Detach(hold_id=7))
        assert received.wait(60)


def test_a_message_sent_later_during_a_request_goes_out_after_it(path: Path) -> None:
    asked, answer, received = threading.Event(), threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        request = peer.receive()
        asked.set()
        answer.wait()
        peer.reply(request.id, PoolList(pools=[]))
        assert peer.receive().body == Detach(hold_id=8)
        received.set()

    with scripted_worker(path, script), WorkerClient(path) as client:
        requesting = threading.Thread(target=client.request, args=(ListPools(),))
        requesting.start()
        assert asked.wait(60)
        client.send_later(Detach(hold_id=8))
        answer.set()
        requesting.join()
        assert received.wait(60)


def test_sending_later_never_blocks_and_keeps_the_order(path: Path) -> None:
    count, go_on = 20_000, threading.Event()

    def script(peer: Peer) -> None:
        go_on.wait()  # reads nothing until the client has sent more than any socket buffer takes
        received = [peer.receive() for _ in range(count + 1)]
        assert [message.body for message in received[:-1]] == [Detach(hold_id=number) for number in range(count)]
        peer.reply(received[-1].id, Detached(hold_id=1))

    with scripted_worker(path, script), WorkerClient(path, timeout_s=60) as client:
        for number in range(count):
            client.send_later(Detach(hold_id=number))
        go_on.set()
        client.request(Detach(hold_id=1))


def test_sending_later_to_a_worker_that_is_gone_raises_nothing(path: Path) -> None:
    with scripted_worker(path, lambda peer: None), WorkerClient(path) as client:
        with pytest.raises(WorkerLost):
            client.request(ListPools())
        client.send_later(Detach(hold_id=1))
    client.send_later(Detach(hold_id=1))


def test_closing_never_waits_for_a_request_and_ends_it(path: Path) -> None:
    asked, lost = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.receive()
        asked.set()
        until_hang_up(peer)

    def wait(client: WorkerClient) -> None:
        with pytest.raises(WorkerLost):
            client.request(WaitPool(pool_id=POOL_ID, timeout_s=600))
        lost.set()

    with scripted_worker(path, script), WorkerClient(path) as client:
        waiting = threading.Thread(target=wait, args=(client,))
        waiting.start()
        assert asked.wait(60)
        client.close()
        assert client.closed
        assert lost.wait(60)
        waiting.join()
        assert client.fileno() == -1


def test_its_descriptor_becomes_readable_when_the_worker_goes_away(path: Path) -> None:
    leave = threading.Event()

    def script(peer: Peer) -> None:
        leave.wait()

    with scripted_worker(path, script), WorkerClient(path) as client:
        poll = select.poll()
        poll.register(client.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        leave.set()
        assert poll.poll(60_000)


FORKING_PROGRAM = """
import os, sys
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import ListPools
from kvpage.errors import WorkerLost
client = WorkerClient(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        client.request(ListPools())
    except WorkerLost:
        os._exit(7 if client.closed else 8)
    os._exit(9)
_, status = os.waitpid(child, 0)
client.request(ListPools())
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_finds_the_client_closed_and_the_parent_keeps_it(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.reply(peer.receive().id, PoolList(pools=[]))

    with scripted_worker(path, script):
        command = [sys.executable, "-c", FORKING_PROGRAM, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "7"


def test_a_client_that_closes_ends_the_connection_whoever_has_a_copy_of_it(path: Path) -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        with pytest.raises(EOFError):
            peer.receive()
        ended.set()

    with scripted_worker(path, script), WorkerClient(path) as client:
        copy = os.dup(client.fileno())
        try:
            client.close()
            assert ended.wait(10)
        finally:
            os.close(copy)
