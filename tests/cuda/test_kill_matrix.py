"""No single death loses a pool of device memory, at whatever step it comes, nor leaves a byte of the device behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import kill_matrix
from support.eventually import until
from support.fakecuda import FakeDevices
from support.fakecuda_here import GRANULARITY_BYTES
from support.kill_matrix import OPERATIONS, Scene

MAX_STEP = 12


@pytest.fixture
def scene(no_leaks: None, devices: FakeDevices, run_dir: Path) -> Iterator[Scene]:
    with kill_matrix.scene(run_dir, "cuda:0") as scene:
        yield scene
        taken_bytes = -(-scene.precious.buffer_size_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        until(lambda: devices.used_bytes(devices.uuids[0]) == taken_bytes)


@pytest.fixture
def step(seed: int, request: pytest.FixtureRequest) -> int:
    return random.Random(f"{seed} {request.node.name}").randint(1, MAX_STEP)


def test_a_worker_or_server_may_die_at_any_step(scene: Scene, step: int, seed: int) -> None:
    """Three of the ways in each run; `make test-long` tries all of them, and some at every step."""
    for blow in random.Random(seed + 1).sample(list(kill_matrix.BLOWS.values()), 3):  # not those of host memory
        blow(scene, step)


@pytest.mark.long
@pytest.mark.parametrize("blow", kill_matrix.BLOWS)
def test_each_may_die_at_any_step(scene: Scene, step: int, blow: str) -> None:
    kill_matrix.BLOWS[blow](scene, step)


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_worker_may_die_at_every_step(scene: Scene, operation: str) -> None:
    assert kill_matrix.every_step(lambda step: kill_matrix.kill_worker_during(scene, operation, step)) > 5
