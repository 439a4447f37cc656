"""Killed or interrupted at any moment, a pool of leases is found as it was before an operation, or after it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from kvpage.errors import KvpageError
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.pool_buffer import pool_buffer_bytes
from kvpage.pages.steps import Grant, Step
from support.checkout import ROOT
from support.interrupting import interrupted
from support.leased_pools import LAYERS, PoolState, held_of, new_buffer, num_held, plan_of, state_of
from support.leased_scenarios import KEY, NUM_SLABS, OPERATIONS, STEPS, Scene, furnish, moments_of, scene_of
from support.memory_moments import Moments, failing

CHURN = ROOT / "tests" / "support" / "lease_churn.py"
FEW = ("flat groups", "three", "cut states")
ALL = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in LAYERS]
)
EVERY = pytest.mark.parametrize("operation", OPERATIONS)


def buffer_of(name: str) -> mmap.mmap:
    return new_buffer(plan_of(name, NUM_SLABS))


def reopened(name: str, moments: Moments, moment: bytes) -> Any:
    """A buffer with what is in that moment."""
    buffer = buffer_of(name)
    moments.put(moment, buffer)
    return buffer


def found_in(name: str, buffer: Any) -> PoolState:
    with LeasedPool(plan_of(name, NUM_SLABS), buffer) as pool:
        pool.check()
        assert not any(lease.reservations or lease.state != "quarantined" for lease in pool.book)
        return state_of(pool)


def is_one_of(found: PoolState, before: PoolState, after: PoolState) -> bool:
    """But for content that was evicted: that may be gone, all of it or some."""
    groups = found.content
    kept = all(before.content[group] & after.content[group] <= found.content[group] for group in groups)
    known = all(found.content[group] <= before.content[group] | after.content[group] for group in groups)
    return found[:2] in (before[:2], after[:2]) and kept and known


def snapshots(name: str, operation: str) -> tuple[Scene, Moments, list[bytes]]:
    scene = furnish(name, buffer_of(name))
    moments = moments_of(scene)
    return scene, moments, moments.of(partial(OPERATIONS[operation], scene))


@pytest.mark.sampled(24)
@ALL
@EVERY
def test_a_kill_at_any_store_leaves_the_operation_done_or_undone(name: str, operation: str) -> None:
    scene, moments, found = snapshots(name, operation)
    before, after = (found_in(name, reopened(name, moments, one)) for one in (found[0], moments.now()))
    assert len(found) > 1
    assert before != after or "reserv" in operation or operation == "reserve"
    outcomes = set()
    for moment in found:
        buffer = reopened(name, moments, moment)
        state = found_in(name, buffer)
        assert is_one_of(state, before, after)
        outcomes.add(state[:2] == after[:2])
        if operation in STEPS:
            check_that_it_is_done_once(name, operation, buffer, scene, after)
    assert len(outcomes) == 2 or before[:2] == after[:2]


def check_that_it_is_done_once(name: str, operation: str, buffer: Any, before: Scene, after: PoolState) -> None:
    """Whoever asks again gets the answer that was lost, and all is as if it had come."""
    with (scene := scene_of(name, buffer, before)).pool as pool:
        answer = STEPS[operation](scene)
        pool.check()
        for lease in pool.book:
            assert num_held(held_of(pool, lease)) == num_held(after.leases[lease.record.name].held)
            if isinstance(answer, Grant) and lease is scene.one:
                held = held_of(pool, lease)
                assert all(block in held[group] for group, ids in answer.ids.items() for block in ids.tolist())
        now = state_of(pool)
        again = STEPS[operation](scene)
        assert state_of(pool)[:2] == now[:2]
        if isinstance(answer, Grant) and isinstance(again, Grant):
            assert {group: ids.tolist() for group, ids in again.ids.items()} == {
                group: ids.tolist() for group, ids in answer.ids.items()
            }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("operation", ["everything at once", "free and take the room", "close", "commit a part"])
def test_a_kill_amid_the_recovery_loses_nothing(name: str, operation: str, seed: int) -> None:
    _, moments, found = snapshots(name, operation)
    before, after = (found_in(name, reopened(name, moments, one)) for one in (found[0], moments.now()))
    for moment in Random(seed).sample(found, min(2, len(found))):
        buffer = reopened(name, moments, moment)
        second = Moments(buffer, moments.ranges)
        for again in second.of(partial(found_in, name, buffer)):
            assert is_one_of(found_in(name, reopened(name, second, again)), before, after)


# --- interruptions ----------------------------------------------------------------------------------------------------


def check_that_it_goes_on(scene: Scene, before: PoolState, after: PoolState) -> None:
    """After something went wrong in the middle of an operation, in the same process."""
    pool = scene.pool
    pool.check()
    found = state_of(pool)
    assert is_one_of(found, before, after)
    for lease in list(pool.book):
        pool.close_lease(lease)
    pool.check()
    assert sum(pool.blocks.counts(group).used for group in scene.ids) == 0
    lease = pool.open("another").lease
    group = max(scene.ids)
    pool.do(lease, Step(allocate={group: pool.blocks.available(group)}))
    pool.check()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "every"), [("three", 19), *(pytest.param(name, 1, marks=pytest.mark.long) for name in FEW)]
)
@EVERY
def test_an_interruption_at_any_moment_leaves_the_operation_done_or_undone(
    name: str, every: int, operation: str, seed: int
) -> None:
    expect_whole(name, operation, interrupted, 1 + seed % every, every)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "every"), [("mixed", 131), pytest.param("states", 1, marks=pytest.mark.long)])
@EVERY
def test_an_error_at_any_bytecode_leaves_the_operation_done_or_undone(
    name: str, every: int, operation: str, seed: int
) -> None:
    expect_whole(name, operation, failing, 1 + seed % every, every)


def expect_whole(
    name: str, operation: str, broken: Callable[[Callable[[], object], int], bool], first: int, step: int
) -> None:
    scene = furnish(name, buffer_of(name))
    before = state_of(scene.pool)
    OPERATIONS[operation](scene)
    after, moment = state_of(scene.pool), first
    scene = furnish(name, buffer_of(name))
    while broken(partial(OPERATIONS[operation], scene), moment):
        check_that_it_goes_on(scene, before, after)
        scene, moment = furnish(name, buffer_of(name)), moment + step
    assert moment > 1
    assert state_of(scene.pool)[:2] == after[:2]


@pytest.mark.parametrize("name", FEW)
def test_a_refused_step_that_is_interrupted_is_undone(name: str) -> None:
    """Too much is asked for, after much was done."""

    def refused(scene: Scene) -> None:
        step = Step(
            key=KEY, retain=scene.cached, free=scene.ids, allocate={**dict.fromkeys(scene.ids, 1), 0: 99}, as_runs=True
        )
        with pytest.raises(KvpageError):
            scene.pool.do(scene.one, step)

    scene, moment = furnish(name, buffer_of(name)), 1
    before = state_of(scene.pool)
    while interrupted(partial(refused, scene), moment):
        check_that_it_goes_on(scene, before, before)
        scene, moment = furnish(name, buffer_of(name)), moment + 11
    scene.pool.check()
    assert state_of(scene.pool)[:2] == before[:2]


# --- real kills -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("num_kills", [3, pytest.param(100, marks=pytest.mark.long)])
def test_a_process_killed_at_random_instants_leaves_its_step_done_or_undone(
    name: str, num_kills: int, seed: int
) -> None:
    random, plan = Random(seed), plan_of(name, NUM_SLABS)
    descriptor = os.memfd_create("leases")
    try:
        os.ftruncate(descriptor, size := pool_buffer_bytes(LeasedPool(plan).geometry))
        with mmap.mmap(descriptor, size) as shared:
            outcomes = [killed_once(name, random, descriptor, shared) for _ in range(num_kills)]
    finally:
        os.close(descriptor)
    assert len(outcomes) == num_kills


def killed_once(name: str, random: Random, descriptor: int, shared: mmap.mmap) -> bool:
    """Whether the step under way was done. Before each step the child tells what is held and what the step changes."""
    command = [sys.executable, str(CHURN), name, str(random.getrandbits(32)), str(descriptor)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        last = b""
        for _ in range(random.randrange(2, 40)):
            last = child.stdout.readline()
        time.sleep(random.uniform(0, 0.002))  # any instant of a step
        child.kill()
        told = [line for line in (last + child.stdout.read()).decode().splitlines(keepends=True) if line[-1] == "\n"]
    counted, key, changes = json.loads(told[-1])
    with LeasedPool(plan_of(name, NUM_SLABS), shared) as pool:
        pool.check()
        found = {lease.record.name: num_held(held_of(pool, lease)) for lease in pool.book}
        is_done = any(pool.holdings.last(lease.row).key == key for lease in pool.book)
        for lease, before in counted.items():
            wanted = {int(group): count for group, count in before.items()}
            for group, change in changes.get(lease, {}).items() if is_done else ():
                wanted[int(group)] = wanted.get(int(group), 0) + change
            assert found.pop(lease) == {group: count for group, count in wanted.items() if count}
        assert not any(found.values())
    return is_done
