"""Ctrl-C at any moment of an attach: nothing is left behind, and a connection that it ended says so."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count

import pytest

import kvpage
from kvpage.errors import WorkerLost
from kvpage.owned import Descriptors, keep
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.eventually import until
from support.interrupting import interrupted, quick_holdings
from support.leaks import Holdings
from support.plan_requests import small_request
from support.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with WorkerProcess(tmp_path_factory.mktemp("run")) as process, process.client() as client:
        plan = kvpage.plan(small_request())
        body = messages.CreatePool(
            name="mimo", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
        )
        pool = client.ask(body, messages.PoolCreated).pool
        client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        yield process


def num_holders(client: WorkerClient) -> int:
    return client.ask(messages.FindPool(name="mimo"), messages.PoolState).num_holders


@pytest.fixture(params=[5, pytest.param(1, marks=pytest.mark.long)], ids=["each fifth", "each"])
def moments(request: pytest.FixtureRequest, seed: int) -> Iterable[int]:
    """At which to interrupt, without an end: each, or each fifth, others in each run."""
    return count(1 + seed % request.param, request.param)


def leaves_nothing(work: Callable[[], object], moments: Iterable[int], observer: WorkerClient) -> int:
    """Interrupt `work` at these of its moments; how many there are."""
    work()
    gc.collect()
    before = quick_holdings()
    for moment in moments:
        if not interrupted(work, moment):
            return moment - 1
        if quick_holdings() != before:
            gc.collect()
        assert quick_holdings() == before, f"interrupted at moment {moment}: descriptors, mappings"
        until(lambda: num_holders(observer) == 0)
    raise AssertionError


def test_attaching(worker: WorkerProcess, no_leaks: None, moments: Iterable[int]) -> None:
    run_dir = str(worker.run_directory.path)
    with worker.client() as observer:
        assert leaves_nothing(lambda: kvpage.attach("mimo", run_dir=run_dir).close(), moments, observer) > 100


def test_attaching_over_a_connection_that_has_other_attachments(
    worker: WorkerProcess, no_leaks: None, moments: Iterable[int]
) -> None:
    run_dir = str(worker.run_directory.path)
    num_ended = 0
    with worker.client() as observer:
        for moment in moments:
            connection = kvpage.connect(run_dir=run_dir)
            kept = connection.attach("mimo")
            before = quick_holdings()
            is_over = not interrupted(lambda connection=connection: connection.attach("mimo").close(), moment)  # type: ignore[misc]
            assert kept.detached == connection.closed
            if connection.closed:
                num_ended += 1
                with pytest.raises(WorkerLost, match="KeyboardInterrupt came in the middle"):
                    connection.attach("mimo")
                assert quick_holdings() == (before[0] - 1, before[1]), f"moment {moment}: its socket, and no more"
                until(lambda: num_holders(observer) == 0)
            else:
                assert quick_holdings() == before, f"moment {moment}"
                until(lambda: num_holders(observer) == 1)
            kept.close()
            connection.close()
            if is_over:
                break
    assert 0 < num_ended < moment


def test_connecting(worker: WorkerProcess, no_leaks: None, moments: Iterable[int]) -> None:
    run_dir = str(worker.run_directory.path)
    with worker.client() as observer:
        assert leaves_nothing(lambda: kvpage.connect(run_dir=run_dir).close(), moments, observer) > 30


def test_letting_go(worker: WorkerProcess, no_leaks: None, moments: Iterable[int]) -> None:
    run_dir = str(worker.run_directory.path)
    with worker.client() as observer:
        for moment in moments:
            with kvpage.connect(run_dir=run_dir) as connection:
                attachment = connection.attach("mimo")
                before = quick_holdings()
                is_over = not interrupted(attachment.close, moment)
                attachment.close()
                assert quick_holdings() == (before[0] - connection.closed, before[1] - 1), f"moment {moment}"
                until(lambda: num_holders(observer) == 0)
            if is_over:
                return


def test_the_check_sees_a_descriptor_that_has_no_owner() -> None:
    def careless() -> None:
        os.close(os.open("/dev/null", os.O_RDONLY))

    def careful() -> None:
        owner = Descriptors()
        keep(owner, os.open, "/dev/null", os.O_RDONLY)
        owner.close()

    assert left_by(careful) == []
    leaked = left_by(careless)
    for fd in leaked:
        os.close(fd)
    assert len(leaked) == 1


def left_by(work: Callable[[], None]) -> list[int]:
    before = Holdings.now()
    moment = 1
    while interrupted(work, moment):
        moment += 1
    return [int(name.split()[0]) for name in Holdings.now().descriptors - before.descriptors]
