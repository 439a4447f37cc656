"""One client used where it must not be: by a signal handler or finaliser in the middle of a request of its thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpage.errors import Conflict, KvpageError, RateLimited, WorkerLost
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import Detach, ListPools, PoolList
from kvpage.wire.turns import Turns
from support.scripted_worker import Peer, scripted_worker

pytestmark = pytest.mark.usefixtures("no_leaks")


@contextmanager
def on_signal(work: Callable[[], object]) -> Iterator[list[KvpageError]]:
    """`work` is done by a signal handler; the errors it ends with."""
    errors: list[KvpageError] = []

    def handle(number: int, frame: object) -> None:
        try:
            work()
        except KvpageError as error:
            errors.append(error)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield errors
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt_main_thread() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGUSR1)


@pytest.fixture
def path(run_dir: Path) -> Path:
    return run_dir / "worker-host.sock"


def test_a_request_of_a_signal_handler_is_refused_and_the_one_it_interrupted_goes_on(path: Path) -> None:
    handled = threading.Event()

    def script(peer: Peer) -> None:
        request = peer.receive()
        interrupt_main_thread()
        assert handled.wait(60)
        peer.reply(request.id, PoolList(pools=[]))
        peer.reply(peer.receive().id, PoolList(pools=[]))

    def ask() -> None:
        try:
            client.request(ListPools())
        finally:
            handled.set()

    with scripted_worker(path, script), WorkerClient(path, timeout_s=60) as client, on_signal(ask) as errors:
        assert client.ask(ListPools(), PoolList) == PoolList(pools=[])
        assert client.ask(ListPools(), PoolList) == PoolList(pools=[])
    [error] = errors
    assert type(error) is Conflict
    assert "signal handler" in error.message


def test_what_a_signal_handler_sends_later_goes_out_after_the_request(path: Path) -> None:
    received: list[object] = []

    def script(peer: Peer) -> None:
        request = peer.receive()
        interrupt_main_thread()
        assert handled.wait(60)
        peer.reply(request.id, PoolList(pools=[]))
        received.append(peer.receive().body)

    handled = threading.Event()

    def let_go() -> None:
        client.send_later(Detach(hold_id=7))
        handled.set()

    with scripted_worker(path, script), WorkerClient(path, timeout_s=60) as client, on_signal(let_go):
        client.request(ListPools())
    assert received == [Detach(hold_id=7)]


def test_a_signal_handler_may_close_and_the_request_it_interrupted_ends(path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        interrupt_main_thread()
        while True:
            peer.receive()

    with scripted_worker(path, script), WorkerClient(path, timeout_s=60) as client, on_signal(client.close):
        with pytest.raises(WorkerLost):
            client.request(ListPools())
        assert client.closed
        assert client.fileno() == -1


def test_waiting_for_other_threads_is_bounded(path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        request = peer.receive()
        asked.set()
        answer.wait()
        peer.reply(request.id, PoolList(pools=[]))

    with scripted_worker(path, script), WorkerClient(path, timeout_s=60) as client:
        requesting = threading.Thread(target=client.request, args=(ListPools(),))
        requesting.start()
        assert asked.wait(60)
        client.timeout_s = 0.01
        with pytest.raises(RateLimited, match="other threads"):
            client.request(ListPools())
        assert not client.closed
        answer.set()
        requesting.join()


def test_a_turn_ends_with_its_work_whatever_that_raises() -> None:
    turns = Turns()

    def fail() -> None:
        assert turns.is_mine
        assert not turns.take(lambda: None, wait_s=0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.take(fail, wait_s=0)
    assert not turns.is_mine
    assert turns.take(lambda: None, wait_s=0)
