"""Between the start of a worker and the handing over of its predecessor's pools nobody gets a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.errors import PermissionDenied, PoolNotFound, RateLimited, StaleHandle, WorkerLost
from kvpage.wire import messages, succession
from kvpage.wire.channel import close_fds
from kvpage_server.worker_limits import Limits
from support.eventually import until
from support.pools import PLAN, PLAN_ID, SIZE_BYTES, create_pool, export_pool, finish_adoption
from support.raw_client import RawClient
from support.worker_process import WorkerProcess


class Kept:
    """A pool of a worker that was killed, and what its keeper has of it."""

    def __init__(self, worker: WorkerProcess) -> None:
        with worker.client(role="api") as keeper:
            self.pool = create_pool(keeper)
            self.chunks, self.fds = export_pool(keeper, self.pool.pool_id)
            worker.kill()

    def hand_to(self, worker: WorkerProcess) -> None:
        with worker.client(role="api") as keeper:
            keeper.ask(messages.AdoptPool(chunks=self.chunks), messages.PoolState, self.fds)
            finish_adoption(keeper)


@pytest.fixture
def kept(worker: WorkerProcess) -> Iterator[Kept]:
    kept = Kept(worker)
    yield kept
    close_fds(kept.fds)


@pytest.fixture
def successor(kept: Kept, run_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(run_dir, "--adopt-within", "600") as successor:
        yield successor


def test_questions_about_pools_wait_until_the_pools_are_there(kept: Kept, successor: WorkerProcess) -> None:
    pool = kept.pool
    with RawClient(successor.socket_path) as client:
        asked = [
            client.send(messages.FindPool(name="mimo")),
            client.send(messages.GetPool(pool_id=pool.pool_id)),
            client.send(messages.Attach(name="mimo", epoch=pool.epoch)),
        ]
        listed = client.send(messages.ListPools())
        state = client.ask(messages.DescribeDevice())
        assert state.epoch == pool.epoch  # not lost yet
        kept.hand_to(successor)
        for request_id in asked:
            assert client.answer(request_id).error is None
        pools = client.answer(listed).body
        assert isinstance(pools, messages.PoolList)
        assert [found.pool_id for found in pools.pools] == [pool.pool_id]


def test_a_pool_asked_for_meanwhile_is_made_in_the_epoch_of_the_others(kept: Kept, successor: WorkerProcess) -> None:
    body = messages.CreatePool(name="new", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=SIZE_BYTES)
    with RawClient(successor.socket_path) as client:
        asked = client.send(body)
        again = client.send(messages.CreatePool(name="mimo", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=SIZE_BYTES))
        client.ask(messages.DescribeDevice())
        kept.hand_to(successor)
        created, found = client.answer(asked).body, client.answer(again).body
    assert isinstance(created, messages.PoolCreated)
    assert isinstance(found, messages.PoolCreated)
    assert (created.created, created.pool.epoch) == (True, kept.pool.epoch)
    assert (found.created, found.pool.pool_id) == (False, kept.pool.pool_id)


def test_when_nothing_is_handed_over_the_epoch_changes_and_everybody_is_answered(
    kept: Kept, successor: WorkerProcess
) -> None:
    with RawClient(successor.socket_path) as client, successor.client(role="api") as keeper:
        found = client.send(messages.FindPool(name="mimo"))
        stale = client.send(messages.Attach(name="mimo", epoch=kept.pool.epoch))
        client.ask(messages.DescribeDevice())
        assert finish_adoption(keeper) == 0
        assert keeper.epoch != kept.pool.epoch
        for request_id, expected in ((found, PoolNotFound), (stale, StaleHandle)):
            error = client.answer(request_id).error
            assert error is not None
            assert error.code == expected.code


def test_nobody_waits_for_ever(kept: Kept, run_dir: Path) -> None:
    with WorkerProcess(run_dir, "--adopt-within", "0.05") as successor, successor.client() as client:
        with pytest.raises(PoolNotFound):
            client.request(messages.FindPool(name="mimo"))
        assert client.epoch != kept.pool.epoch
    assert "nobody_handed_over" in successor.log()


def test_only_the_keeper_may_end_the_waiting(kept: Kept, successor: WorkerProcess) -> None:
    with successor.client() as client, pytest.raises(PermissionDenied):
        client.request(succession.FinishAdoption())


def test_so_many_requests_of_one_connection_may_wait(kept: Kept, successor: WorkerProcess) -> None:
    with RawClient(successor.socket_path) as client:
        asked = [client.send(messages.ListPools()) for _ in range(Limits().max_waits + 1)]
        error = client.answer(asked[-1]).error
        assert error is not None
        assert error.code == RateLimited.code


def test_who_leaves_while_waiting_is_forgotten(kept: Kept, successor: WorkerProcess) -> None:
    with RawClient(successor.socket_path) as client:
        client.send(messages.Attach(name="mimo"))
        client.ask(messages.DescribeDevice())
    kept.hand_to(successor)
    with successor.client() as client:
        until(lambda: client.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 1)
        assert client.ask(messages.FindPool(name="mimo"), messages.PoolState).holders == []


def test_ending_the_worker_answers_who_waits(kept: Kept, successor: WorkerProcess) -> None:
    with RawClient(successor.socket_path) as client:
        asked = client.send(messages.ListPools())
        client.ask(messages.DescribeDevice())
        assert successor.terminate() == 0
        error = client.answer(asked).error
        assert error is not None
        assert error.code == "draining"


def test_a_worker_whose_pools_nobody_kept_has_a_successor_that_waits_for_nothing(
    worker: WorkerProcess, run_dir: Path
) -> None:
    with worker.client() as client:
        create_pool(client)
    worker.kill()
    with WorkerProcess(run_dir, "--adopt-within", "600") as successor, successor.client() as client:
        assert client.ask(messages.ListPools(), messages.PoolList).pools == []


def test_a_worker_that_ends_when_its_keeper_has_gone_leaves_nothing_to_wait_for(
    worker: WorkerProcess, run_dir: Path
) -> None:
    with worker.client(role="api") as keeper:
        _, fds = export_pool(keeper, create_pool(keeper).pool_id)
    close_fds(fds)
    with worker.client() as client:  # the signal might overtake the end of the keeper
        until(lambda: client.ask(messages.DescribeDevice(), messages.DeviceState).num_clients == 1)
    assert worker.terminate() == 0
    with WorkerProcess(run_dir, "--adopt-within", "600") as successor, successor.client() as client:
        assert client.ask(messages.ListPools(), messages.PoolList).pools == []


def test_a_worker_that_ends_while_it_has_a_keeper_has_a_successor_that_waits(
    worker: WorkerProcess, run_dir: Path
) -> None:
    with worker.client(role="api") as keeper:
        pool = create_pool(keeper)
        _, fds = export_pool(keeper, pool.pool_id)
        assert worker.terminate() == 0
        with pytest.raises(WorkerLost):
            keeper.request(messages.ListPools())
    close_fds(fds)
    with WorkerProcess(run_dir, "--adopt-within", "600") as successor, successor.client() as client:
        assert client.ask(messages.DescribeDevice(), messages.DeviceState).epoch == pool.epoch


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", ["", "-", "x" * 32, "0" * 31, "0" * 33, "\xff" * 32])
def test_a_lock_file_that_names_no_epoch_means_nothing(no_leaks: None, run_dir: Path, line: str) -> None:
    (run_dir / "worker-host.lock").write_text(f"123\n{line}\n", encoding="latin-1")
    with WorkerProcess(run_dir, "--adopt-within", "600") as worker, worker.client() as client:
        assert client.ask(messages.ListPools(), messages.PoolList).pools == []
