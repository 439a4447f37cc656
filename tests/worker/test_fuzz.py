"""Whatever a worker is sent, it answers those who keep to the protocol, keeps its pools and leaks nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from support.pools import attach_pool, contents, create_pool
from support.protocol_fuzz import Fuzzer
from support.worker_process import WorkerProcess

NUM_MESSAGES = {"default": 5_000, "long": 100_000}
ROUND = 500


def test_a_worker_outlives_any_messages(
    no_leaks: None, run_dir: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    fuzz(run_dir, seed, NUM_MESSAGES[request.config.getoption("--tier")])


def describe(client: WorkerClient) -> messages.DeviceState:
    return client.ask(messages.DescribeDevice(), messages.DeviceState)


def fuzz(run_dir: Path, seed: int, num_messages: int) -> Fuzzer:
    """Raises AssertionError, naming the seed, when a good client notices anything."""
    with WorkerProcess(run_dir, "--memory", "64MiB") as worker, worker.client(client_name="good") as good:
        precious = create_pool(good, "precious")
        _, mapping = attach_pool(good, "precious")
        contents(mapping)[:4] = b"mine"
        reserved_bytes = describe(good).reserved_bytes
        before = worker.num_fds()  # after another answer: what an attach sends is closed when it has been sent
        fuzzer = Fuzzer(worker.socket_path, seed)
        while fuzzer.num_sent < num_messages:
            fuzzer.send(min(ROUND, num_messages - fuzzer.num_sent))
            found = good.ask(messages.GetPool(pool_id=precious.pool_id), messages.PoolState)
            assert (found.state, worker.ended) == ("ready", False), f"seed {seed}"
            assert bytes(contents(mapping)[:4]) == b"mine", f"seed {seed}"
        for pool in good.ask(messages.ListPools(), messages.PoolList).pools:
            if pool.pool_id != precious.pool_id:
                good.ask(messages.DeletePool(pool_id=pool.pool_id, timeout_s=60), messages.PoolDeleted)
        state = describe(good)
        assert (state.num_pools, state.reserved_bytes) == (1, reserved_bytes), f"seed {seed}"
        assert worker.settles_at(before, good), f"seed {seed}: descriptors are left"
        assert "internal_error" not in worker.log(), f"seed {seed}: {worker.log()}"
        mapping.close()
    return fuzzer


def test_the_check_fires_when_a_worker_does_not_survive(no_leaks: None, run_dir: Path) -> None:
    with WorkerProcess(run_dir) as worker:
        worker.kill()
        with pytest.raises(ConnectionRefusedError):
            Fuzzer(worker.socket_path, 1).send(1)
