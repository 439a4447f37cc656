"""Coordinators and allocators on nodes in memory, which fail as a seed says; and the check, which finds faults."""

from __future__ import annotations

import random

import pytest

from fleet_simulation import Promise, Simulation
from simulated_fleet import Faults

HARSH = Faults(lost_question=0.02, lost_answer=0.02, death=0.02, crash=0.01)


def simulated(seed: int, steps: int) -> Simulation:
    simulation = Simulation(seed, num_nodes=6, num_devices=2, most_ranks=8)
    simulation.run(steps, HARSH)
    simulation.heal()
    return simulation


def test_nothing_committed_is_lost_and_nothing_else_is_left(seed: int) -> None:
    for number in range(seed, seed + 3):
        simulation = simulated(number, 40)
        assert simulation.check() == [], (number, simulation.counts)


@pytest.mark.long
def test_the_same_for_many_seeds(seed: int) -> None:
    for number in range(seed, seed + 300):
        simulation = simulated(number, 60)
        assert simulation.check() == [], (number, simulation.counts)


@pytest.fixture
def healed() -> Simulation:
    """With a plan of eight ranks that is whole."""
    simulation = Simulation(1, num_nodes=6, num_devices=2, most_ranks=8)
    simulation.create(8)
    assert simulation.check() == []
    assert len(simulation.promises) == 1
    return simulation


def test_the_check_finds_a_plan_that_is_lost(healed: Simulation) -> None:
    for node in healed.fleet.nodes_by_name.values():
        node.lose()
    assert healed.check() == ["plan-0 was committed and is lost"]


def test_the_check_finds_a_rank_that_is_not_there(healed: Simulation) -> None:
    healed.fleet.nodes_by_name["n0000"].service.lose()
    assert healed.check() == ["plan-0 was committed and is degraded"]


def test_the_check_finds_memory_that_was_made_anew_without_need(healed: Simulation) -> None:
    healed.fleet.nodes_by_name["n0000"].service.lose()
    healed.heal()
    assert all("was touched though n0000 lost nothing" in line for line in healed.check())
    assert healed.check()


def test_the_check_finds_what_nobody_was_promised(healed: Simulation) -> None:
    healed.promises.clear()
    assert healed.check() == ["plan-0 is ready, and nobody was told that it is committed"]


def test_the_check_finds_memory_without_a_record(healed: Simulation) -> None:
    node = healed.fleet.nodes_by_name["n0000"]
    [kept] = node.records.all()
    node.records.drop(kept.record.id)
    assert [line for line in healed.check() if line.endswith("on n0000 is left")]


def test_a_plan_is_forgotten_only_with_the_last_machine_that_knows_it() -> None:
    simulation = Simulation(1, num_nodes=3, num_devices=1, most_ranks=1)
    simulation.fleet.rng = random.Random(2)
    simulation.create(3)
    [promise] = simulation.promises.values()
    assert isinstance(promise, Promise)
    nodes = list(simulation.fleet.nodes_by_name.values())
    simulation.fleet.crash(nodes[0])
    simulation.fleet.crash(nodes[1])
    assert simulation.fleet.forgotten == set()
    simulation.fleet.crash(nodes[2])
    assert simulation.fleet.forgotten == {promise.plan_id}
