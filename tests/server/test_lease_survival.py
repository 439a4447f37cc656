"""No death ends a lease over HTTP but that of its client: kill -9 of the worker, of the API, and of both in turn."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.api_service import ApiService, kill_process
from support.eventually import until
from support.http_leases import NUM_BLOCKS, Lease, Pool, http_client
from support.problems import assert_problem

TOKEN = "a-secret-of-my-own"


@pytest.fixture
def pool(service: ApiService) -> Iterator[Pool]:
    with http_client(service) as http:
        yield Pool(http)


def test_a_lease_goes_on_with_the_next_worker(service: ApiService, pool: Pool) -> None:
    lease, ending = pool.lease(ttl_s=60), pool.lease("ending", ttl_s=2)
    ids = lease.take(3)
    ending.take(1)
    before = lease.batch(key="before", free={"0": ids[:1]}, allocate={"0": 2, "1": 1}).json()
    for number in range(2):
        kill_process(service.worker_pid())
        again = lease.batch_when_possible(key="before", free={"0": ids[:1]}, allocate={"0": 2, "1": 1})
        assert sorted(again.json()["ids"]["0"]) == sorted(before["ids"]["0"]), f"after {number} deaths"
    assert lease.held() == sorted([*ids[1:], *before["ids"]["0"]])
    after = lease.batch(key="after", free={"0": lease.held()[:3]}).json()
    assert after == {"ids": {}, "clear": {}}
    until(lambda: pool.http.get(ending.path).status_code == 410)
    assert len(lease.held()) == pool.blocks()["groups"][0]["used"] == 1


def test_a_lease_and_its_last_key_outlive_the_server(service: ApiService, pool: Pool) -> None:
    lease = pool.lease(token=TOKEN, ttl_s=60)
    pool.lease("ending", ttl_s=0.5).take(2)
    first = lease.batch(key="first", allocate={"0": 2}).json()
    service.kill()
    with ApiService(service.run_directory.path) as successor, http_client(successor) as http:
        same = Lease(Pool(http), lease.opened)
        assert same.batch(key="first", allocate={"0": 2}).json() == first
        assert same.held() == sorted(first["ids"]["0"])
        adopted = same.pool.adopt(name="scheduler", token=TOKEN)
        assert_problem(same.batch(allocate={"0": 1}), "stale-handle")
        assert adopted.batch(key="first", allocate={"0": 2}).json() == first  # about what it was before, one may ask
        kill_process(successor.worker_pid())
        assert adopted.batch_when_possible(key="next", allocate={"0": 1}).is_success
        assert len(adopted.held()) == 3
        until(lambda: len(adopted.pool.leases()) == 1)
        assert adopted.pool.blocks()["groups"][0]["used"] == 3


def test_those_who_wait_are_told_when_the_server_ends(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir, "--memory", "64MiB") as service, http_client(service) as http:
        pool = Pool(http)
        pool.lease("holder").take(NUM_BLOCKS)
        lease = pool.lease()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lease.batch, allocate={"0": 1}, wait_s=60)
            until(lambda: pool.blocks()["tenants"][0]["num_waiting"] == 1)
            service.terminate()
            assert_problem(waiting.result(60), "draining")
