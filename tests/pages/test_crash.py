"""Killed at any instruction, a block pool is found as it was before an operation, or as it is after it."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random

import pytest

from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Arrays, state_bytes
from kvpage.pages.clearing import NOTHING
from support.block_scenarios import CLEARING, GEOMETRIES, OPERATIONS, State, furnish, open_pool, state_of
from support.checkout import ROOT
from support.interrupting import interrupted
from support.watched_stores import watch, watch_arrays

CHURN = ROOT / "tests" / "support" / "block_churn.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
Store = Callable[[bool], None]
BOTH = pytest.mark.parametrize("geometry", GEOMETRIES)
EVERY = pytest.mark.parametrize("operation", OPERATIONS)


def done_or_undone(found: State, before: State, after: State) -> bool:
    """Wholly, but for content that was evicted: that may be gone, all of it or some."""
    if found.held not in (before.held, after.held):
        return False
    if before.held == after.held:
        return found.content in (before.content, after.content)
    return before.content & after.content <= found.content <= before.content | after.content


def reopened(geometry: str, buffer: bytearray) -> BlockPool:
    pool = open_pool(geometry, buffer)
    pool.check()
    return pool


def snapshots(geometry: str, operation: str) -> tuple[list[bytes], State, State]:
    """The buffer before every store of an operation, and amid those of a batch; what was before it, and after it."""
    here = furnish(geometry)
    before = state_of(here.pool)
    found: list[bytes] = []

    def on_store(store: Store) -> None:
        assert not found or bytes(here.buffer) == expected[0], "a store that nobody saw"
        found.append(bytes(here.buffer))
        store(True)
        found.append(bytes(here.buffer))
        store(False)
        expected[0] = bytes(here.buffer)

    expected = [b""]
    watch(here.pool, on_store)
    found.clear()
    OPERATIONS[operation](here)
    found.append(bytes(here.buffer))
    here.pool.check()
    return found, before, state_of(here.pool)


@pytest.mark.sampled(50)
@BOTH
@EVERY
def test_a_kill_at_any_store_leaves_the_operation_done_or_undone(geometry: str, operation: str) -> None:
    found, before, after = snapshots(geometry, operation)
    assert before != after or operation == "commit"
    assert len(found) > 2
    for left in found:
        pool = reopened(geometry, bytearray(left))
        assert done_or_undone(state_of(pool), before, after)
        for group in range(len(GEOMETRIES[geometry].blocks_per_slab)):  # and it can go on
            pool.allocate(group, pool.available(group))
            pool.check()


@pytest.mark.sampled(30)
@BOTH
@EVERY
def test_a_kill_amid_the_recovery_loses_nothing(geometry: str, operation: str) -> None:
    found, before, after = snapshots(geometry, operation)
    for left in set(found):
        buffer, again = bytearray(left), [left]

        def on_store(store: Store, buffer: bytearray = buffer, again: list[bytes] = again) -> None:
            store(True)
            again.append(bytes(buffer))
            store(False)
            again.append(bytes(buffer))

        arrays = Arrays(GEOMETRIES[geometry], buffer, CLEARING.get(geometry, NOTHING))
        watch_arrays(arrays, on_store)
        arrays.undo()
        for second in again:
            assert done_or_undone(state_of(reopened(geometry, bytearray(second))), before, after)


@pytest.mark.sampled(30)
@BOTH
@EVERY
def test_a_store_that_fails_leaves_the_operation_done_or_undone(geometry: str, operation: str) -> None:
    """As when memory runs out: the same pool goes on."""
    for chosen in range(1, 200):
        here = furnish(geometry)
        before, failing = state_of(here.pool), FailingStore()
        watch(here.pool, failing.on_store)
        failing.left = chosen
        try:
            OPERATIONS[operation](here)
        except MemoryError:
            here.pool.check()
            assert done_or_undone(state_of(here.pool), before, after_of(geometry, operation))
            here.pool.allocate(0, here.pool.available(0))
            here.pool.check()
        else:
            assert chosen > 1
            return
    pytest.fail("the operation never ended")


class FailingStore:
    left = 0

    def on_store(self, store: Store) -> None:
        self.left -= 1
        if self.left == 0:
            store(True)
            raise MemoryError
        store(False)


def after_of(geometry: str, operation: str) -> State:
    here = furnish(geometry)
    OPERATIONS[operation](here)
    return state_of(here.pool)


@pytest.mark.sampled(30)
@BOTH
@EVERY
def test_an_interruption_at_any_moment_leaves_the_operation_done_or_undone(geometry: str, operation: str) -> None:
    after, moment = after_of(geometry, operation), 1
    here = furnish(geometry)
    while interrupted(partial(OPERATIONS[operation], here), moment):
        here.pool.check()
        assert done_or_undone(state_of(here.pool), state_of(furnish(geometry).pool), after)
        here, moment = furnish(geometry), moment + 1
    assert moment > 3
    assert state_of(here.pool) == after


# --- real kills -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_what_a_process_leaves_that_kills_itself_at_a_store_is_what_was_foreseen(geometry: str, seed: int) -> None:
    random = Random(seed)
    operation = random.choice(list(OPERATIONS))
    found, _, _ = snapshots(geometry, operation)
    number = random.randrange(len(found) - 1)
    with shared_state(geometry) as (descriptor, mapped):
        command = [sys.executable, str(CHURN), "die", geometry, operation, str(number), str(descriptor)]
        done = subprocess.run(command, pass_fds=[descriptor], check=False, timeout=60, env=ENVIRONMENT)
        assert done.returncode == -signal.SIGKILL
        assert bytes(mapped) == found[number]
        with open_pool(geometry, mapped) as pool:
            pool.check()


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("num_kills", [8, pytest.param(200, marks=pytest.mark.long)])
def test_a_process_killed_at_random_instants_leaves_its_operation_done_or_undone(
    geometry: str, num_kills: int, seed: int
) -> None:
    random = Random(seed)
    with shared_state(geometry) as (descriptor, mapped):
        for _ in range(num_kills):
            command = [sys.executable, str(CHURN), "churn", geometry, str(random.getrandbits(32)), str(descriptor)]
            with subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
                assert child.stdout is not None
                last = b""
                for _ in range(random.randrange(2, 60)):
                    last = child.stdout.readline()
                time.sleep(random.uniform(0, 0.003))  # any instant of an operation that lingers
                child.kill()
                rest = last + child.stdout.read()
            lines = rest.decode().splitlines(keepends=True)
            told = [line for line in lines if line.endswith("\n")]
            check_what_was_left(geometry, mapped, told)


def check_what_was_left(geometry: str, mapped: mmap.mmap, told: list[str]) -> None:
    """`told`: each line what was held when an operation began, and what it would do."""
    with open_pool(geometry, mapped) as pool:
        pool.check()
        found = {slot: count for slot, (_, count) in state_of(pool).held.items()}
        was, wanted = json.loads(told[-1])
        before = {int(slot): count for slot, count in was.items()}
        changed = {slot: found.get(slot, 0) - before.get(slot, 0) for slot in before.keys() | found.keys()}
        changed = {slot: change for slot, change in changed.items() if change}
        if changed and wanted["kind"] == "take":
            assert sorted(changed.values()) == [1] * wanted["count"]
            assert not any(slot in before for slot in changed)
        elif changed:
            assert changed == {int(slot): change for slot, change in wanted["changes"].items()}


@contextmanager
def shared_state(geometry: str) -> Iterator[tuple[int, mmap.mmap]]:
    descriptor = os.memfd_create("blocks")
    try:
        os.ftruncate(descriptor, state_bytes(GEOMETRIES[geometry]))
        with mmap.mmap(descriptor, 0) as mapped:
            yield descriptor, mapped
    finally:
        os.close(descriptor)
