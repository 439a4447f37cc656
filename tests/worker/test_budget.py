"""How much memory a worker promises, and how a person says how much."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from kvpage.errors import NotEnoughMemory, SpecInvalid
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from kvpage_server.worker_budget import Budget, parse_memory
from kvpage_server.worker_limits import Limits
from support.pools import PLAN_ID
from support.worker_process import WorkerProcess
from support.worker_thread import WorkerThread

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8589934592", 8 * GIB),
        ("1", 1),
        ("8GiB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("2KB", 2000),
        ("3MiB", 3 << 20),
        ("1TiB", 1 << 40),
        ("0.5", Fraction(1, 2)),
        ("1.0", Fraction(1)),
        ("0.25", Fraction(1, 4)),
    ],
)
def test_a_size_or_a_share_is_understood(text: str, expected: int | Fraction) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "1.5", "-1", "-0.5", "half", "50%", "8G", "8 XiB", "1e9", "inf", "nan", "9" * 30, "0x10"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpecInvalid):
        parse_memory(text)


def test_promises_end_at_the_limit_and_what_is_released_can_be_promised_again() -> None:
    budget = Budget(100, lambda: 1000)
    budget.reserve(60, promised_bytes=0)
    with pytest.raises(NotEnoughMemory) as caught:
        budget.reserve(41, promised_bytes=0, buffer_bytes=33)
    assert "a pool of 33 bytes takes 41" in str(caught.value)
    assert caught.value.details == {
        "buffer_size_bytes": 33,
        "needed_bytes": 41,
        "available_bytes": 40,
        "limit_bytes": 100,
    }
    budget.reserve(40, promised_bytes=0)
    budget.release(60)
    budget.reserve(60, promised_bytes=0)
    assert budget.reserved_bytes == 100


def test_promises_end_where_the_device_has_no_more_whatever_the_limit() -> None:
    available = 100
    budget = Budget(1000, lambda: available)
    budget.reserve(70, promised_bytes=0)
    with pytest.raises(NotEnoughMemory):
        budget.reserve(40, promised_bytes=70)  # not committed yet, so still reported as available
    budget.reserve(30, promised_bytes=70)
    available = 0
    with pytest.raises(NotEnoughMemory):
        budget.reserve(1, promised_bytes=0)


def test_a_share_is_taken_of_what_is_available_at_start() -> None:
    available = 100
    budget = Budget(Fraction(1, 2), lambda: available)
    available = 10
    assert budget.limit_bytes == 50


def test_a_successor_that_adopts_has_the_limit_its_predecessor_had() -> None:
    """100 bytes were available, the predecessor made a pool of 30 of its 50: the successor finds 70 available."""
    successor = Budget(Fraction(1, 2), lambda: 70)
    successor.adopt(30)
    assert (successor.limit_bytes, successor.reserved_bytes) == (50, 30)


def test_a_limit_in_bytes_does_not_grow_with_what_is_adopted() -> None:
    budget = Budget(100, lambda: 1000)
    budget.adopt(150)
    assert (budget.limit_bytes, budget.reserved_bytes) == (100, 150)
    with pytest.raises(NotEnoughMemory) as caught:
        budget.reserve(1, promised_bytes=0)
    assert caught.value.details["available_bytes"] == 0


# --- what a pool takes beside its buffer -----------------------------------------------------------------------------


def create(client: WorkerClient, name: str, plan_bytes: int) -> messages.PoolState:
    """A pool of one byte."""
    body = messages.CreatePool(name=name, plan_id=PLAN_ID, plan=b"x" * plan_bytes, buffer_size_bytes=1)
    pool = client.ask(body, messages.PoolCreated).pool
    return client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)


def shared_bytes(pid: int) -> int:
    """What the memfds of a process take."""
    files = (os.stat(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if is_memfd(pid, fd))
    return sum(status.st_blocks * 512 for status in files)


def is_memfd(pid: int, fd: str) -> bool:
    return "memfd:" in os.readlink(f"/proc/{pid}/fd/{fd}")


def test_plans_and_control_blocks_count_and_bytes_count_as_pages(no_leaks: None, run_dir: Path) -> None:
    plan_bytes = 100_000
    with WorkerProcess(run_dir, "--memory", "1MiB") as worker, worker.client() as client:
        num_pools = 0
        with pytest.raises(NotEnoughMemory):
            while num_pools < 100:
                assert create(client, f"{num_pools}", plan_bytes).state == "ready"
                num_pools += 1
        state = client.ask(messages.DescribeDevice(), messages.DeviceState)
        taken_bytes = shared_bytes(worker.pid) + num_pools * plan_bytes
        assert 0 < taken_bytes <= state.reserved_bytes <= state.memory_limit_bytes == 1 << 20
        for pool in client.ask(messages.ListPools(), messages.PoolList).pools:
            client.request(messages.DeletePool(pool_id=pool.pool_id))
        assert client.ask(messages.DescribeDevice(), messages.DeviceState).reserved_bytes == 0


def test_plans_have_a_limit_of_their_own(no_leaks: None, run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(max_plans_bytes=1000)) as worker, worker.client() as client:
        create(client, "one", 600)
        with pytest.raises(NotEnoughMemory):
            create(client, "two", 401)
        create(client, "two", 400)
