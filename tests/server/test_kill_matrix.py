"""No single death loses a pool, at whatever step it comes. `make reliability` tries every step and writes the table."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.errors import KvpageError, PoolNotFound
from support import kill_matrix
from support.kill_matrix import OPERATIONS, Scene
from support.upgrade import upgrade_under_load

MAX_STEP = 12  # every operation has at least about as many


@pytest.fixture
def scene(no_leaks: None, run_dir: Path) -> Iterator[Scene]:
    with kill_matrix.scene(run_dir) as scene:
        yield scene


@pytest.fixture
def step(seed: int, request: pytest.FixtureRequest) -> int:
    return random.Random(f"{seed} {request.node.name}").randint(1, MAX_STEP)


def test_a_worker_or_server_may_die_at_any_step(scene: Scene, step: int, seed: int) -> None:
    """Four of the ways in each run; `make test-long` tries all of them, and some at every step."""
    for blow in random.Random(seed).sample(list(kill_matrix.BLOWS.values()), 4):
        blow(scene, step)


@pytest.mark.long
@pytest.mark.parametrize("blow", kill_matrix.BLOWS)
def test_each_may_die_at_any_step(scene: Scene, step: int, blow: str) -> None:
    kill_matrix.BLOWS[blow](scene, step)


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_worker_may_die_at_every_step(scene: Scene, operation: str) -> None:
    assert kill_matrix.every_step(lambda step: kill_matrix.kill_worker_during(scene, operation, step)) > 5


@pytest.mark.long
def test_the_worker_may_die_at_every_step_of_adoption(scene: Scene) -> None:
    assert kill_matrix.every_step(lambda step: kill_matrix.kill_worker_during_adoption(scene, step)) > 5


def test_the_check_fires_when_both_die_at_once(scene: Scene) -> None:
    scene.api.kill()
    scene.replace_worker()
    scene.replace_api()
    with pytest.raises(PoolNotFound):
        scene.check()


def test_a_process_dies_at_the_step_it_is_told(scene: Scene) -> None:
    scene.replace_worker(1)
    scene.await_ready()
    scene.arm_worker()
    with pytest.raises(KvpageError):
        kill_matrix.attach(scene)
    assert scene.worker.wait() == -9


def test_a_worker_is_replaced_under_load(no_leaks: None, run_dir: Path) -> None:
    upgrades = upgrade_under_load(run_dir, 2)
    assert len(upgrades.pauses_s) == 2
