"""What clients begin and do not end costs them their connection, and nobody else anything."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from kvpage.wire import messages
from kvpage.wire.channel import header
from kvpage_server.worker_limits import Limits
from support.pools import PLAN_ID, create_pool
from support.raw_client import RawClient
from support.worker_thread import WorkerThread

pytestmark = pytest.mark.usefixtures("no_leaks")

NEVER_S = 3600.0


def create_request(plan_bytes: int) -> bytes:
    """A frame with the request 7."""
    body = messages.CreatePool(name="mimo", plan_id=PLAN_ID, plan=bytes(plan_bytes), buffer_size_bytes=4096)
    payload = messages.encode(messages.RequestFrame(id=7, body=body))
    return header(len(payload), 0) + payload


def test_half_a_request_has_a_deadline(run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(frame_s=0.05)) as worker:
        with RawClient(worker.socket_path) as idle, RawClient(worker.socket_path) as half:
            half.socket.sendall(create_request(100)[:50])
            assert half.hang_up_reason() == "protocol-error"
            assert idle.ask(messages.ListPools()).error is None  # who has begun nothing has all the time it wants


def test_every_request_has_the_whole_time(run_dir: Path) -> None:
    """The end of one and the beginning of the next come together."""
    request = messages.encode(messages.RequestFrame(id=7, body=messages.ListPools()))
    data = header(len(request), 0) + request
    now_s = [0.0]
    with WorkerThread(run_dir, limits=Limits(frame_s=10, hello_s=NEVER_S), clock=lambda: now_s[0]) as worker:
        with RawClient(worker.socket_path) as steady, RawClient(worker.socket_path) as slow, worker.client() as other:
            slow.socket.sendall(data[:5])
            steady.socket.sendall(data[:5])
            for _ in range(2):  # the second is answered in a later turn than that in which these are read
                other.ask(messages.ListPools(), messages.PoolList)
            with worker.paused():
                now_s[0] = 6.0
                steady.socket.sendall(data[5:] + data[:5])
            assert steady.answer(7).error is None
            with worker.paused():
                now_s[0] = 11.0
            assert slow.hang_up_reason() == "protocol-error"
            steady.socket.sendall(data[5:])
            assert steady.answer(7).error is None


def test_what_has_come_of_requests_is_bounded(run_dir: Path) -> None:
    limits = Limits(frame_s=NEVER_S, max_unfinished_bytes=1 << 20)
    with WorkerThread(run_dir, limits=limits) as worker, worker.client() as bystander:
        large, small = create_request(4 << 20), create_request(300 << 10)
        with RawClient(worker.socket_path) as hoarder, RawClient(worker.socket_path) as modest:
            hoarder.socket.sendall(large[: 900 << 10])
            modest.socket.sendall(small[: 200 << 10])
            assert hoarder.hang_up_reason() == "too-many-clients"
            modest.socket.sendall(small[200 << 10 :])
            created = modest.answer(7).body
            assert isinstance(created, messages.PoolCreated)
            bystander.ask(messages.WaitPool(pool_id=created.pool.pool_id, timeout_s=60), messages.PoolState)
        with RawClient(worker.socket_path) as later:  # and what the hoarder had sent counts no more
            later.socket.sendall(small)
            assert later.answer(7).error is None


def test_a_worker_that_ends_waits_only_so_long_for_its_readers(run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(stall_s=NEVER_S, end_s=0.05)) as worker, worker.client() as creator:
        create_pool(creator, "n" * 250)
        with RawClient(worker.socket_path) as slow:
            slow.socket.sendall(_many_requests())
            creator.ask(messages.ListPools(), messages.PoolList)
            worker.begin_drain()
            poll = select.poll()
            poll.register(slow.socket, 0)  # only the end of the connection
            assert poll.poll(60_000)


def _many_requests() -> bytes:
    """Whose replies are more than a socket takes."""
    payload = messages.encode(messages.RequestFrame(id=7, body=messages.ListPools()))
    return 2000 * (header(len(payload), 0) + payload)
