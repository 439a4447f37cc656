"""What holds of leases however they are held: random steps beside a model that has nothing but counters."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpage.errors import Conflict, OutOfBlocks, StaleHandle
from kvpage.pages.block_lease import BlockLease, Reservation
from kvpage.pages.steps import Step
from kvpage.plans import Plan
from support.leased_pools import plan_of

Held = Counter[tuple[int, int]]
"""How often a lease holds each block, by (group, block)."""
seeds = st.integers(0, 2**32)


class Way(ABC):
    """One way to hold leases on a new pool of a plan."""

    @abstractmethod
    def open(self, name: str) -> BlockLease: ...

    @abstractmethod
    def adopt(self, name: str, token: str) -> BlockLease: ...

    @abstractmethod
    def free_slabs(self) -> int:
        """Of the pool, as it says itself, those with cached blocks only counted."""

    @abstractmethod
    def check(self) -> None:
        """Prove the pool, where that can be done."""

    def restart(self) -> bool:
        """End what serves the pool in the middle of everything, and go on. Whether that was done: then reservations are
        lost."""
        return False

    @abstractmethod
    def close(self) -> None: ...


class LeaseMachine(RuleBasedStateMachine):
    plan_name = "flat"
    make: Callable[[Plan], Way]

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_of(self.plan_name)
        self.cut = [group.blocks_per_slab for group in self.plan.groups]
        self.way = type(self).make(self.plan)
        self.leases: dict[str, BlockLease] = {}
        self.held: dict[str, Held] = {}
        self.reserved: list[tuple[str, Reservation, dict[int, int]]] = []
        self.gone: list[BlockLease] = []
        self.num_opened = self.num_restarts = 0

    def teardown(self) -> None:
        for lease in [*self.leases.values(), *self.gone]:
            lease.close()
        assert self.way.free_slabs() == self.plan.num_blocks - 1
        self.way.close()

    # --- the model ----------------------------------------------------------------------------------------------------

    def slabs_in_use(self) -> dict[int, Counter[int]]:
        """By group: held blocks of each slab, each once."""
        found: dict[int, Counter[int]] = {group: Counter() for group in range(len(self.cut))}
        for group, block in {place for held in self.held.values() for place in held}:
            found[group][block // self.cut[group]] += 1
        return found

    def fits(self, counts: dict[int, int]) -> bool:
        """Exact where nothing is reserved: nobody is told which blocks are."""
        in_use = self.slabs_in_use()
        left = self.plan.num_blocks - 1 - sum(map(len, in_use.values()))
        for group, count in counts.items():
            room = self.cut[group] * len(in_use[group]) - sum(in_use[group].values())
            left -= max(0, -(-(count - room) // self.cut[group]))
        return left >= 0

    def some(self, chance: random.Random, held: Held, most: int = 6) -> dict[int, list[int]]:
        """Some of what is held, by group, no block more often than it is."""
        places = chance.sample(sorted(held.elements()), min(chance.randrange(most), held.total()))
        return {group: [block for at, block in places if at == group] for group in {at for at, _ in places}}

    def choose(self, chance: random.Random) -> str:
        return chance.choice(sorted(self.leases))

    def add(self, name: str, ids: dict[int, np.ndarray]) -> None:
        everybody = {place for held in self.held.values() for place in held}
        for group, blocks in ids.items():
            for block in blocks.tolist():
                assert block >= self.cut[group], "a null block was handed out"
                assert (group, block) not in everybody, "a block was handed out that somebody holds"
                self.held[name][group, block] += 1

    # --- rules --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.leases) < 4)
    @rule()
    def open(self) -> None:
        self.num_opened += 1
        name = f"lease {self.num_opened}"
        self.leases[name], self.held[name] = self.way.open(name), Counter()

    @precondition(lambda self: self.leases)
    @rule(seed=seeds)
    def close(self, seed: int) -> None:
        name = self.choose(random.Random(seed))
        self.leases.pop(name).close()
        del self.held[name]
        self.reserved = [entry for entry in self.reserved if entry[0] != name]

    @precondition(lambda self: self.leases)
    @rule(seed=seeds)
    def adopt(self, seed: int) -> None:
        name = self.choose(random.Random(seed))
        before = self.leases[name]
        self.leases[name] = self.way.adopt(name, before.token)
        self.gone.append(before)
        self.reserved = [entry for entry in self.reserved if entry[0] != name]
        with pytest.raises(StaleHandle):
            before.allocate(0, 1)

    @precondition(lambda self: self.leases)
    @rule(seed=seeds)
    def step(self, seed: int) -> None:
        chance = random.Random(seed)
        name = self.choose(chance)
        lease, held = self.leases[name], self.held[name]
        free = self.some(chance, held)
        everybody: Held = sum(self.held.values(), Counter())
        retain = self.some(chance, Counter(dict.fromkeys(everybody, 1)), 3)
        counts = {group: chance.randrange(5) for group in range(len(self.cut)) if chance.random() < 0.6}
        step = Step(key=lease.new_key(), free=free, retain=retain, allocate=counts)
        after = self.after(name, free, retain)
        before, self.held[name] = held, after
        fits = self.fits(counts)
        self.held[name] = before
        try:
            grant = lease.step(step)
        except OutOfBlocks:
            assert not fits or self.reserved, "there was room"
            return
        assert fits, "there was no room"
        self.held[name] = after
        self.add(name, grant.ids)
        assert {group: len(ids) for group, ids in grant.ids.items()} == counts
        again = lease.step(step)
        assert {group: sorted(ids.tolist()) for group, ids in again.ids.items() if len(ids)} == {
            group: sorted(ids.tolist()) for group, ids in grant.ids.items() if len(ids)
        }

    def after(self, name: str, free: dict[int, list[int]], retain: dict[int, list[int]]) -> Held:
        after = self.held[name].copy()
        after.update((group, block) for group, blocks in retain.items() for block in blocks)
        after.subtract((group, block) for group, blocks in free.items() for block in blocks)
        return +after

    @precondition(lambda self: self.leases)
    @rule(seed=seeds)
    def free_what_is_not_held(self, seed: int) -> None:
        chance = random.Random(seed)
        name = self.choose(chance)
        group = chance.randrange(len(self.cut))
        mine = [block for at, block in self.held[name].elements() if at == group]
        block = chance.randrange(self.cut[group], self.cut[group] * self.plan.num_blocks)
        wrong = [*mine, *[block] * (1 + self.held[name][group, block])]
        with pytest.raises(Conflict):
            self.leases[name].step(Step(free={group: wrong}, allocate={group: 1}))

    @precondition(lambda self: self.leases)
    @rule(seed=seeds)
    def reserve(self, seed: int) -> None:
        chance = random.Random(seed)
        name = self.choose(chance)
        counts = {group: chance.randrange(1, 4) for group in range(len(self.cut)) if chance.random() < 0.6}
        try:
            reservation = self.leases[name].reserve(counts)
        except OutOfBlocks:
            assert self.reserved or not self.fits(counts), "there was room"
            return
        self.reserved.append((name, reservation, counts))

    @precondition(lambda self: self.reserved)
    @rule(seed=seeds)
    def commit_reservation(self, seed: int) -> None:
        chance = random.Random(seed)
        name, reservation, counts = self.reserved.pop(chance.randrange(len(self.reserved)))
        part = {group: chance.randint(0, count) for group, count in counts.items()}
        grant = reservation.commit(part)
        assert {group: len(ids) for group, ids in grant.ids.items()} == part
        self.add(name, grant.ids)
        left = {group: count - part[group] for group, count in counts.items()}
        if any(left.values()):
            self.reserved.append((name, reservation, left))

    @precondition(lambda self: self.reserved)
    @rule(seed=seeds)
    def give_back_reservation(self, seed: int) -> None:
        _, reservation, _ = self.reserved.pop(random.Random(seed).randrange(len(self.reserved)))
        reservation.give_back()

    @precondition(lambda self: self.num_restarts < 2)
    @rule()
    def restart(self) -> None:
        self.num_restarts += 1
        if self.way.restart():
            self.reserved.clear()

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def everybody_holds_what_the_model_says(self) -> None:
        for name, lease in self.leases.items():
            found = {
                (group, int(block)): int(times)
                for group, held in lease.held().items()
                for block, times in zip(held.ids, held.times, strict=True)
            }
            assert found == self.held[name]

    @invariant()
    def the_pool_is_sound(self) -> None:
        self.way.check()
        if not self.reserved:
            in_use = sum(map(len, self.slabs_in_use().values()))
            assert self.way.free_slabs() == self.plan.num_blocks - 1 - in_use
