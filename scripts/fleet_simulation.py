"""Plans come and go on a simulated fleet while nodes crash, are cut off, and are restarted one after the other.

    python scripts/fleet_simulation.py [--nodes 1000] [--devices 8] [--steps 200] [--seed 1]

The coordinators and allocators are those that Ray carries; only what is below them is simulated. Prints the table of
docs/fleet.md, and ends with status 1 when anything that was committed is lost, or anything else is left.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from kvpage.errors import KvpageError
from kvpage.fleet.coordinator import Coordinator
from kvpage.fleet.planning import plan_fleet
from simulated_fleet import Clock, CoordinatorDiedError, Faults, memory_fleet

LIMIT_BYTES = 8 << 30
TTL_S = 60.0
STEP_S = 10.0
HEALING_STEPS = 20
LAYER = {"kind": "full_attention", "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "block_size": 16}
FAULTS = Faults(lost_question=0.002, lost_answer=0.002, death=0.001, crash=0.0005)


@dataclass(slots=True)
class Promise:
    """A plan that `create` said was committed, and the memory it had then. Nobody has given it back."""

    plan_id: str
    epochs: dict[int, tuple[str, str]]
    """Of each rank: pool and epoch."""
    may_change: set[int] = field(default_factory=set)
    """Ranks whose node has lost its memory since."""


@dataclass(slots=True)
class Counts:
    committed: int = 0
    refused: int = 0
    in_doubt: int = 0
    released: int = 0
    coordinator_deaths: int = 0
    crashes: int = 0
    cut_off: int = 0
    restarts: int = 0
    forgotten: int = 0
    """Plans that lost all machines with a rank before one of them was mended."""


class Simulation:
    """`run`, then `heal`, then `check`."""

    def __init__(self, seed: int, *, num_nodes: int, num_devices: int, most_ranks: int = 1024) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.fleet = memory_fleet(
            self.rng, num_nodes=num_nodes, num_devices=num_devices, limit_bytes=LIMIT_BYTES, clock=self.clock
        )
        self.counts = Counts()
        self.promises: dict[str, Promise] = {}
        self.unsure: set[str] = set()
        """Names of plans whose making or giving back nobody saw the end of: all of one is there in the end, or none."""
        self._sizes = [ranks for ranks in (1, 8, 16, 64, 256, 1024) if ranks <= most_ranks]
        self._next = 0
        self._coordinator = self._new_coordinator()
        self._rolling: list[str] = []

    # --- what happens ------------------------------------------------------------------------------------------------

    def run(self, steps: int, faults: Faults = FAULTS) -> None:
        for _ in range(steps):
            self.clock.now_s += STEP_S
            self._disturb()
            self.fleet.faults = faults
            try:
                self._work()
            except CoordinatorDiedError:
                self.counts.coordinator_deaths += 1
                self._coordinator = self._new_coordinator()
            self._note_losses()

    def heal(self) -> None:
        """All nodes return, and nothing goes wrong any more."""
        self.fleet.faults = Faults()
        for node in self.fleet.nodes_by_name.values():
            node.reachable = True
        for _ in range(HEALING_STEPS):
            self.clock.now_s += TTL_S
            before = self.fleet.traffic.messages
            undone = self._coordinator.mend()
            if not undone and self.fleet.traffic.messages - before == 2 * len(self.fleet.nodes_by_name):
                return

    def _disturb(self) -> None:
        nodes = list(self.fleet.nodes_by_name.values())
        for node in nodes:
            if not node.reachable and self.rng.random() < 0.3:
                node.reachable = True
        if self.rng.random() < 0.2:
            self.fleet.crash(self.rng.choice(nodes))
            self.counts.crashes += 1
        if self.rng.random() < 0.2:
            self.rng.choice(nodes).reachable = False  # with all it has
            self.counts.cut_off += 1
        if not self._rolling and self.rng.random() < 0.05:
            self._rolling = [node.name for node in nodes]
        for name in self._rolling[: max(1, len(nodes) // 10)]:
            self.fleet.nodes_by_name[name].restart()
            self.counts.restarts += 1
        del self._rolling[: max(1, len(nodes) // 10)]

    def _work(self) -> None:
        self._coordinator.mend()
        if self.rng.random() < 0.6:
            self.create(self.rng.choice(self._sizes))
        elif self.promises:
            self._release(self.rng.choice(sorted(self.promises)))

    def create(self, num_ranks: int) -> None:
        """Ask for a plan, and take note of what is said."""
        name = f"plan-{self._next}"
        self._next += 1
        self.unsure.add(name)
        try:
            plan = self._coordinator.create(request_of(num_ranks, self.rng), name)
        except KvpageError as error:
            in_doubt = error.details.get("state") == "in-doubt"
            self.counts.in_doubt += in_doubt
            self.counts.refused += not in_doubt
            if not in_doubt:
                self.unsure.discard(name)
            return
        self.unsure.discard(name)
        self.counts.committed += 1
        held = {rank.rank: (rank.pool, rank.epoch) for rank in plan.ranks}
        lost = {rank.rank for rank in plan.ranks if not rank.epoch}
        self.promises[name] = Promise(plan.id, held, lost)

    def _release(self, name: str) -> None:
        promise = self.promises.pop(name)
        self.unsure.add(name)
        try:
            left = self._coordinator.delete(promise.plan_id)
        except KvpageError:  # no node of it answers
            return
        if left is None:
            self.unsure.discard(name)
        self.counts.released += 1

    def _note_losses(self) -> None:
        """What became of ranks whose machine lost its memory is not asked for in the end."""
        for name in [name for name, promise in self.promises.items() if promise.plan_id in self.fleet.forgotten]:
            del self.promises[name]
            self.counts.forgotten += 1
        epochs = {name: node.service.devices()[0].epoch for name, node in self.fleet.nodes_by_name.items()}
        for promise in self.promises.values():
            for rank, node in self._places(promise.plan_id):
                if rank in promise.epochs and promise.epochs[rank][1] != epochs[node]:
                    promise.may_change.add(rank)

    def _places(self, plan_id: str) -> list[tuple[int, str]]:
        for node in self.fleet.nodes_by_name.values():
            for kept in node.records.all():
                if kept.record.id == plan_id:
                    return [(rank, place.node) for rank, place in enumerate(kept.record.places)]
        return []

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(self.fleet, new_id=self._new_id, reservation_ttl_s=TTL_S)

    def _new_id(self) -> str:
        return f"fleet-{self.rng.getrandbits(64):016x}"

    # --- what must hold in the end -----------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """A line for each thing that is wrong; to be asked after `heal`."""
        view = self._coordinator.look()
        plans = {plan.name: plan for plan in self._coordinator.standings(view)}
        wrong = []
        for name, promise in self.promises.items():
            plan = plans.get(name)
            if plan is None:
                wrong.append(f"{name} was committed and is lost")
            elif plan.state != "ready":
                wrong.append(f"{name} was committed and is {plan.state}")
            else:
                wrong += [
                    f"{name}: rank {rank.rank} was touched though {rank.node} lost nothing"
                    for rank in plan.ranks
                    if rank.rank not in promise.may_change and promise.epochs[rank.rank] != (rank.pool, rank.epoch)
                ]
        for name, plan in plans.items():
            if name not in self.promises and not (name in self.unsure and plan.state == "ready"):
                wrong.append(f"{name} is {plan.state}, and nobody was told that it is committed")
        return wrong + self._orphans()

    def _orphans(self) -> list[str]:
        """Memory that belongs to no record."""
        found = []
        for node in self.fleet.nodes_by_name.values():
            known = {
                kept.record.pool_name(rank) for kept in node.records.all() for rank in kept.record.ranks_on(node.name)
            }
            found += [f"{pool.name} on {node.name} is left" for pool in node.service.pools() if pool.name not in known]
        return found


def request_of(num_ranks: int, rng: random.Random) -> dict[str, Any]:
    """All ranks alike, of 1/8 to 1/2 GiB."""
    layers = [LAYER | {"name": "layer.{i}", "count": 32}]
    memory_bytes = rng.choice((128, 256, 512)) << 20
    return {"strategy": "unify", "layers": layers, "memory_bytes": memory_bytes, "ranks": [{}] * num_ranks}


def planning_times(num_nodes: int, num_devices: int) -> list[tuple[int, float, int, int]]:
    """Ranks, seconds to plan and place them, messages and bytes to reserve and commit them when nothing goes wrong."""
    rows = []
    for num_ranks in (8, 64, 256, 1024):
        if num_ranks > num_nodes * num_devices:
            continue
        rng = random.Random(num_ranks)
        fleet = memory_fleet(rng, num_nodes=num_nodes, num_devices=num_devices, limit_bytes=LIMIT_BYTES)
        coordinator = Coordinator(fleet, new_id=lambda: "fleet-0123456789abcdef")
        request = {name: value for name, value in request_of(num_ranks, rng).items() if name != "memory_bytes"}
        reports = coordinator.look().reports
        began_s = time.perf_counter()
        plan_fleet(request, plan_id="fleet-0123456789abcdef", name="timed", reports=reports)
        took_s = time.perf_counter() - began_s
        before_messages, before_bytes = fleet.traffic.messages, fleet.traffic.bytes
        coordinator.create(request, "timed")
        rows.append((num_ranks, took_s, fleet.traffic.messages - before_messages, fleet.traffic.bytes - before_bytes))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans come and go on a simulated fleet whose nodes fail.")
    for name, default in (("nodes", 1000), ("devices", 8), ("steps", 200), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print("| ranks | planned and placed in | messages | MB |\n| --- | --- | --- | --- |")
    for num_ranks, took_s, num_messages, num_bytes in planning_times(asked.nodes, asked.devices):
        print(f"| {num_ranks:,} | {took_s * 1000:.0f} ms | {num_messages:,} | {num_bytes / 1e6:.1f} |")
    simulation = Simulation(asked.seed, num_nodes=asked.nodes, num_devices=asked.devices)
    began_s = time.perf_counter()
    simulation.run(asked.steps)
    simulation.heal()
    wrong = simulation.check()
    counts, traffic = simulation.counts, simulation.fleet.traffic
    print(f"\nseed {asked.seed}, {asked.steps} steps in {time.perf_counter() - began_s:.0f} s: {counts}, {traffic}")
    print(
        "\n".join(wrong) if wrong else f"nothing lost: {len(simulation.promises)} plans are whole, nothing else is left"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
