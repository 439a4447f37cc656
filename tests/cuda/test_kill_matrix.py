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


def test_the_worker_may_die_at_any_step(scene: Scene, step: int) -> None:
    for operation in OPERATIONS:
        kill_matrix.kill_worker_during(scene, operation, step)
    kill_matrix.kill_worker_during_adoption(scene, step)
    kill_matrix.kill_worker_during_replacement(scene, step)


def test_the_server_may_die_at_any_step(scene: Scene, step: int) -> None:
    kill_matrix.kill_api_during(scene, "create", step)
    kill_matrix.kill_api_during(scene, "delete", step)
    kill_matrix.kill_api_while_it_learns(scene, step)
    kill_matrix.kill_both_in_turn(scene, "create", step)


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_worker_may_die_at_every_step(scene: Scene, operation: str) -> None:
    assert kill_matrix.every_step(lambda step: kill_matrix.kill_worker_during(scene, operation, step)) > 5
