"""Attaching while there is no worker: when it is tried again, and when it is given up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvpage
from kvpage.client.patience import Patience
from kvpage.errors import DeviceUnavailable, PoolNotFound, TooManyClients, WorkerLost
from support.pools import SIZE_BYTES, create_pool
from support.worker_process import WorkerProcess

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_an_error_that_no_waiting_helps_is_raised_at_once() -> None:
    with pytest.raises(PoolNotFound):
        Patience(600).wait(PoolNotFound("no"))


def test_when_time_is_over_the_last_error_is_raised() -> None:
    with pytest.raises(WorkerLost):
        Patience(0).wait(WorkerLost("gone"))


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), TooManyClients("full"), DeviceUnavailable("no folder")], ids=lambda error: error.code
)
def test_it_is_tried_again_soon(error: kvpage.KvpageError) -> None:
    patience = Patience(600)
    for _ in range(3):
        patience.wait(error)


def test_attaching_waits_for_a_worker_that_is_still_to_start(run_dir: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        attaching = threads.submit(kvpage.attach, "mimo", run_dir=str(run_dir), timeout_s=60)
        with WorkerProcess(run_dir) as worker, worker.client() as client:
            with pytest.raises(PoolNotFound):  # the worker has answered, so this is final
                attaching.result(60)
            assert create_pool(client, size_bytes=SIZE_BYTES).state == "ready"
