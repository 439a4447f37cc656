"""Clients that break the rules lose their connection, and nobody else notices."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpage.errors import TooManyClients
from kvpage.wire import messages
from kvpage.wire.channel import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES, close_fds, header
from kvpage.wire.client import WorkerClient
from kvpage_server.worker_limits import Limits
from support.eventually import until
from support.pools import attach_pool, create_pool
from support.raw_client import RawClient
from support.worker_process import WorkerProcess
from support.worker_thread import WorkerThread

pytestmark = pytest.mark.usefixtures("no_leaks")

HELLO = messages.Hello(version=messages.PROTOCOL_VERSION, role="client")
POOL_ID = "pool-" + "0" * 16
CHUNK = messages.ChunkInfo(kind="memfd", size_bytes=4096)


def null_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def send_with_fds(client: RawClient, body: messages.RequestBody, count: int) -> None:
    fds = null_fds(count)
    client.send(body, fds)
    close_fds(fds)


def send_id_zero(client: RawClient) -> None:
    client.send_payload(messages.encode(messages.RequestFrame(id=0, body=messages.ListPools())))


def send_surplus(client: RawClient) -> None:
    payload = messages.encode(messages.RequestFrame(id=7, body=messages.ListPools()))
    fds = null_fds(1)
    socket.send_fds(client.socket, [header(len(payload), 0) + payload], fds)
    close_fds(fds)


def send_flood_of_fds(client: RawClient) -> None:
    fds = null_fds(MAX_FDS_PER_FRAME + 1)
    socket.send_fds(client.socket, [header(1, 1) + b"x"], fds)
    close_fds(fds)


BREACHES: dict[str, Callable[[RawClient], object]] = {
    "no msgpack": lambda client: client.send_payload(b"\xc1"),
    "no id": lambda client: client.send_payload(b"\x80"),
    "hello twice": lambda client: client.send(HELLO),
    "no answer wanted": send_id_zero,
    "frame too large": lambda client: client.socket.sendall(struct.pack("<IBxxx", MAX_FRAME_BYTES + 1, 0)),
    "empty frame": lambda client: client.socket.sendall(struct.pack("<IBxxx", 0, 0)),
    "reserved bytes": lambda client: client.socket.sendall(struct.pack("<IBxxB", 1, 0, 1)),
    "missing descriptors": lambda client: client.socket.sendall(struct.pack("<IBxxx", 1, 2) + b"x"),
    "surplus descriptor": send_surplus,
    "too many descriptors": send_flood_of_fds,
    "descriptors where none belong": lambda client: send_with_fds(client, messages.ListPools(), 2),
    "one descriptor too few": lambda client: send_with_fds(client, messages.AdoptPool(chunks=[CHUNK]), 1),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES)
def test_a_broken_rule_ends_the_connection_with_a_reason(
    worker: WorkerProcess, breach: Callable[[RawClient], object]
) -> None:
    with worker.client() as bystander:
        create_pool(bystander)
        before = worker.num_fds()
        with RawClient(worker.socket_path) as client:
            breach(client)
            assert client.hang_up_reason() == "protocol-error"
        _, mapping = attach_pool(bystander)
        mapping.close()
        assert worker.settles_at(before, bystander)


def test_the_first_request_must_be_hello(worker: WorkerProcess) -> None:
    with RawClient(worker.socket_path, hello=False) as client:
        client.send(messages.ListPools())
        assert client.hang_up_reason() == "protocol-error"


def test_another_version_of_the_protocol_is_refused(worker: WorkerProcess) -> None:
    with RawClient(worker.socket_path, hello=False) as client:
        reply = client.ask(messages.Hello(version=2, role="client"))
        assert reply.error is not None
        assert reply.error.code == "not-supported"
        assert client.hang_up_reason() == ""


@pytest.mark.parametrize(
    "body",
    [b"\xa4type\xa6nobody", b"\xa4type\xa8get_pool", b"\xa4type\xaclist_poolsxx"],
    ids=["unknown type", "field missing", "another unknown type"],
)
def test_a_request_that_cannot_be_understood_is_answered_and_the_connection_goes_on(
    worker: WorkerProcess, body: bytes
) -> None:
    with RawClient(worker.socket_path) as client:
        client.send_payload(b"\x82\xa2id\x63\xa4body\x81" + body)
        reply = client.answer(0x63)
        assert reply.error is not None
        assert reply.error.code == "spec-invalid"
        assert client.ask(messages.ListPools()).body == messages.PoolList(pools=[])


def test_a_request_cut_off_by_the_end_of_its_client_leaves_nothing(worker: WorkerProcess) -> None:
    with worker.client() as bystander:
        before = worker.num_fds()
        for _ in range(20):
            with RawClient(worker.socket_path) as client:
                fds = null_fds(2)
                socket.send_fds(client.socket, [header(1000, 2) + b"the rest never comes"], fds)
                close_fds(fds)
        assert worker.settles_at(before, bystander)


@pytest.fixture
def bystander(worker: WorkerProcess) -> Iterator[WorkerClient]:
    with worker.client() as client:
        yield client


def test_random_bytes_never_harm_the_worker(worker: WorkerProcess, bystander: WorkerClient) -> None:
    before = worker.num_fds()  # of a fresh worker, once: between clients that come and go it would still change

    @settings(max_examples=200)
    @given(data=st.binary(max_size=300), num_fds=st.integers(0, 3), greet=st.booleans())
    def test(data: bytes, num_fds: int, greet: bool) -> None:
        with RawClient(worker.socket_path, hello=greet) as client:
            fds = null_fds(num_fds if data else 0)
            socket.send_fds(client.socket, [data], fds)
            close_fds(fds)
        assert worker.settles_at(before, bystander)

    test()


# --- acknowledging ---------------------------------------------------------------------------------------------------


def test_descriptors_must_be_acknowledged_before_the_next_ones_come(worker: WorkerProcess) -> None:
    attach = messages.Attach(name="mimo")
    with worker.client() as creator, RawClient(worker.socket_path) as client:
        create_pool(creator)
        first = client.send(attach)
        assert client.answer(first).error is None
        refused = client.ask(attach).error
        assert refused is not None
        assert refused.code == "conflict"
        assert refused.details == {"unacknowledged": first}
        assert client.ask(messages.ListPools()).error is None
        assert client.ask(attach, ack=first).error is None
        holders = creator.ask(messages.FindPool(name="mimo"), messages.PoolState).num_holders
        assert holders == 2


# --- clients that do not read ----------------------------------------------------------------------------------------


def fill(silent: RawClient, bystander: WorkerClient) -> bool:
    """Ask without reading until the worker takes no more even after it had its turn; False when it has hung up."""
    silent.socket.setblocking(False)
    payload = messages.encode(messages.RequestFrame(id=1, body=messages.ListPools()))
    data = header(len(payload), 0) + payload
    rest, refused = data, 0
    while refused < 2:
        try:
            rest = rest[silent.socket.send(rest) :] or data
            refused = 0
        except BlockingIOError:
            refused += 1
            bystander.ask(messages.DescribeDevice(), messages.DeviceState)  # answered in the round that reads the rest
        except BrokenPipeError:
            return False
    return True


def send_until_refused(client: RawClient, body: messages.RequestBody) -> list[int]:
    """Ask without reading until the socket takes no more: how many frames that is depends on the machine's buffers."""
    timeout_s = client.socket.gettimeout()
    client.socket.setblocking(False)
    ids = []
    try:
        while True:
            ids.append(client.send(body))  # a small frame goes whole or not at all
    except BlockingIOError:
        return ids
    finally:
        client.socket.settimeout(timeout_s)


def test_a_client_that_never_reads_blocks_nobody_else(worker: WorkerProcess) -> None:
    with worker.client() as bystander, RawClient(worker.socket_path) as silent:
        for number in range(20):
            create_pool(bystander, f"{number}" + "n" * 250, size_bytes=4096)
        assert fill(silent, bystander), "the worker took every request until it lost patience"
        for _ in range(20):
            _, mapping = attach_pool(bystander, "0" + "n" * 250)
            mapping.close()


def test_a_client_that_never_reads_is_closed_and_its_holds_end(run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(stall_s=0.05)) as worker, worker.client() as bystander:
        create_pool(bystander, "n" * 250, size_bytes=4096)
        with RawClient(worker.socket_path) as silent:
            assert silent.ask(messages.Attach(name="n" * 250)).error is None
            fill(silent, bystander)
            poll = select.poll()
            poll.register(silent.socket, 0)  # only the end of the connection
            assert poll.poll(60_000)
        until(lambda: bystander.ask(messages.ListPools(), messages.PoolList).pools[0].holders == [])


def test_a_client_that_reads_late_but_reads_gets_every_reply(run_dir: Path) -> None:
    with (
        WorkerThread(run_dir, limits=Limits(stall_s=60)) as worker,
        worker.client() as creator,
        RawClient(worker.socket_path) as client,
    ):
        for number in range(20):
            create_pool(creator, f"{number}" + "n" * 250, size_bytes=4096)
        ids = send_until_refused(client, messages.ListPools())  # replies of 9 kB: soon more than the queue takes
        for request_id in ids:
            reply = client.answer(request_id).body
            assert isinstance(reply, messages.PoolList)
            assert len(reply.pools) == 20


def test_a_connection_without_hello_is_closed(run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(hello_s=0.05)) as worker:
        with RawClient(worker.socket_path, hello=False) as client:
            assert client.hang_up_reason() == ""


# --- how much one may have -------------------------------------------------------------------------------------------


def test_clients_beyond_the_limit_are_turned_away_until_one_leaves(run_dir: Path) -> None:
    limits = Limits(max_fds=44)
    assert limits.max_fds_with_clients == 3
    with WorkerThread(run_dir, limits=limits) as worker:
        clients = [worker.client() for _ in range(3)]
        with pytest.raises(TooManyClients):
            worker.client()
        assert clients[1].ask(messages.ListPools(), messages.PoolList).pools == []
        clients.pop().close()
        until(lambda: clients[0].ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 2)
        clients.append(worker.client())
        for client in clients:
            client.close()


def test_pools_beyond_the_limit_of_descriptors_are_refused(run_dir: Path) -> None:
    limits = Limits(max_fds=44)
    assert limits.max_fds_with_pools == 7
    with WorkerThread(run_dir, limits=limits) as worker, worker.client() as client:
        for number in range(3):
            create_pool(client, f"{number}")
        with pytest.raises(TooManyClients):
            create_pool(client, "one too many")


def test_one_connection_may_have_only_so_many_holds(run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(max_holds=2)) as worker, worker.client() as client:
        create_pool(client)
        mappings = [attach_pool(client) for _ in range(2)]
        with pytest.raises(TooManyClients):
            client.request(messages.Attach(name="mimo"))
        client.ask(messages.Detach(hold_id=mappings[0][0].hold_id), messages.Detached)
        mappings.append(attach_pool(client))
        for _, mapping in mappings:
            mapping.close()


def test_a_pool_with_many_holders_names_some_and_counts_all(worker: WorkerProcess) -> None:
    count = messages.MAX_HOLDERS_NAMED + 5
    with worker.client() as client:
        create_pool(client)
        for _ in range(count):
            _, mapping = attach_pool(client)
            mapping.close()
        state = client.ask(messages.FindPool(name="mimo"), messages.PoolState)
        assert (state.num_holders, len(state.holders)) == (count, messages.MAX_HOLDERS_NAMED)


def test_a_worker_may_open_as_many_files_as_the_system_allows_it(worker: WorkerProcess) -> None:
    lines = Path(f"/proc/{worker.pid}/limits").read_text().splitlines()
    [limit] = [line for line in lines if line.startswith("Max open files")]
    soft, hard = limit.split()[3:5]
    assert soft == hard
