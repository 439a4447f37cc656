"""Random operations on a block pool and on an obviously correct model of one, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import state_bytes
from kvpage.pages.clearing import NOTHING, Clearing
from kvpage.pages.geometry import Geometry
from support.block_model import Block, BlockModel

GEOMETRIES = (
    (7, (1,)),
    (9, (1, 1, 1)),
    (5, (2,)),
    (7, (3, 1)),
    (8, (4, 6, 1)),
    (6, (2, 2)),
    (4, (400, 7)),
)


class HookFailed(Exception):
    pass


def block_and_id(block: Block) -> tuple[int, list[int]]:
    return block[0], [block[1]]


class Blocks(RuleBasedStateMachine):
    @initialize(data=st.data(), geometry=st.sampled_from(GEOMETRIES), clears=st.booleans())
    def start(self, data: st.DataObject, geometry: tuple[int, tuple[int, ...]], clears: bool) -> None:
        self.geometry = Geometry(*geometry)
        self.buffer = bytearray(state_bytes(self.geometry))
        self.clearing = NOTHING
        if clears:
            on_reuse = data.draw(st.tuples(*[st.booleans()] * len(geometry[1])), "on_reuse")
            self.clearing = Clearing(len(on_reuse) > 1, on_reuse)
        self.model = BlockModel(*geometry, clearing=self.clearing)
        self.evicted: set[Block] = set()
        self.hook_fails = False
        self.pool = self.open()

    def open(self) -> BlockPool:
        return BlockPool(self.geometry, self.buffer, on_evict=self.on_evict, clearing=self.clearing)

    def on_evict(self, group: int, ids: Any) -> None:
        if self.hook_fails:
            raise HookFailed
        assert ids.dtype == np.int32
        assert len(ids)
        self.evicted |= {(group, block) for block in ids.tolist()}

    def took(self, group: int, ids: Any) -> None:
        """The model does what the pool did, and finds fault."""
        self.model.evict(self.evicted)
        self.evicted = set()
        self.model.hand_out(group, ids)

    def agree(self) -> None:
        pool, model = self.pool, self.model
        assert not self.evicted, "content was evicted and nothing was taken"
        pool.check()
        owners = model.owners()
        for group, cut in enumerate(model.blocks_per_slab):
            mine = [slab for slab, owner in owners.items() if owner == group]
            used, cached = sum(block[0] == group for block in model.held), len(model.cached(group))
            assert pool.counts(group) == (used, cached, len(mine) * cut - used - cached, len(mine))
            assert pool.available(group) == model.available(group)
            assert pool.slabs(group).slabs.tolist() == sorted(mine)
        assert pool.slab_counts() == (len(owners), len(model.idle_slabs()), len(model.free_slabs()))
        assert self.stale() == model.stale
        self.model.operations += 1

    def stale(self) -> set[tuple[int, int]]:
        return {divmod(slot, self.geometry.slots_per_slab) for slot in np.flatnonzero(self.pool._arrays.stale).tolist()}

    def group(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.model.blocks_per_slab) - 1), "group")

    def some(self, data: st.DataObject, blocks: list[Block]) -> tuple[int, list[int]]:
        """Ids of one group, in any order, some of them more than once."""
        group = data.draw(st.sampled_from(sorted({block[0] for block in blocks})), "group")
        mine = sorted(block[1] for block in blocks if block[0] == group)
        return group, data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=12), "ids")

    def size(self, data: st.DataObject, group: int) -> int:
        """Few, about a slab, or about all there are."""
        cut = self.model.blocks_per_slab[group]
        most = self.model.available(group)
        return data.draw(st.one_of(st.integers(0, 4), st.integers(cut, 2 * cut), st.integers(most - 1, most + 1)), "n")

    # --- taking -------------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def allocate_one(self, data: st.DataObject) -> None:
        group = self.group(data)
        if not self.model.is_possible({group: 1}):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate_one(group)
        else:
            slabs, evicted = self.model.next_of(group)
            block = self.pool.allocate_one(group)
            assert type(block) is int
            slab = block // self.model.blocks_per_slab[group]
            assert slab in slabs
            if len(slabs) == 1 or not evicted:
                assert self.evicted == evicted
            else:  # slabs of the same age
                assert self.evicted == {each for each in evicted if self.model.slab_of(each) == slab}
            self.took(group, [block])
        self.agree()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        group = self.group(data)
        count = max(0, self.size(data, group))
        if self.model.is_possible({group: count}):
            clean = self.model.available_clean(group)
            ids = self.pool.allocate(group, count)
            assert ids.dtype == np.int32
            assert len(ids) == count
            assert bool(self.evicted) == (count > clean)
            self.took(group, ids)
        else:
            with pytest.raises(OutOfBlocks) as refused:
                self.pool.allocate(group, count)
            free, available = self.model.available_clean(group), self.model.available(group)
            wanted = {"group": group, "wanted": count, "available": available, "evictable": available - free}
            assert refused.value.details == wanted
        self.agree()

    @rule(data=st.data())
    def allocate_many_as_one_by_one(self, data: st.DataObject) -> None:
        """In copies of the pool: the same blocks, and the same content evicted, whether asked for at once or singly."""
        group = self.group(data)
        count = data.draw(st.integers(0, min(30, self.model.available(group))), "n")
        results = []
        for sizes in ([count], [1] * count):
            gone: list[tuple[int, int]] = []

            def on_evict(owner: int, ids: Any, gone: list[tuple[int, int]] = gone) -> None:
                gone.extend((owner, block) for block in ids.tolist())

            copy = BlockPool(self.geometry, bytearray(self.buffer), on_evict=on_evict, clearing=self.clearing)
            taken = [block for size in sizes for block in copy.allocate(group, size).tolist()]
            results.append((sorted(taken), sorted(gone)))
        assert results[0] == results[1]

    @rule(data=st.data())
    def allocate_all(self, data: st.DataObject) -> None:
        groups = data.draw(st.permutations(range(len(self.model.blocks_per_slab))), "groups")
        counts = {group: max(0, self.size(data, group)) for group in groups}
        if self.model.is_possible(counts):
            taken = self.pool.allocate_all(counts)
            assert {group: len(ids) for group, ids in taken.items()} == counts
            self.model.evict(self.evicted)
            self.evicted = set()
            for group, ids in taken.items():
                self.model.hand_out(group, ids)
        else:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate_all(counts)
        self.agree()

    @rule(data=st.data())
    def allocate_run(self, data: st.DataObject) -> None:
        group, model = self.group(data), self.model
        count = data.draw(st.integers(1, 2 * model.blocks_per_slab[group] + 1), "n")
        cut, owners, idle = model.blocks_per_slab[group], model.owners(), model.idle_slabs()
        could: list[bool] = []
        for number in range(model.num_slabs * cut):
            slab = number // cut
            mine = owners.get(slab, group) == group and (group, number) not in model.held
            could.append(slab > 0 and (mine or slab in idle))
        starts = [first for first in range(len(could) - count + 1) if all(could[first : first + count])]
        if starts:
            ids = self.pool.allocate_run(group, count)
            assert ids.tolist() == list(range(ids[0], ids[0] + count))
            self.took(group, ids)
        else:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate_run(group, count)
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def copy_on_write(self, data: st.DataObject) -> None:
        group, number = data.draw(st.sampled_from(sorted(self.model.held)), "block")
        is_own = self.model.held[group, number] == 1 and (group, number) not in self.model.content
        if is_own:
            assert self.pool.copy_on_write(group, number) == number
        elif self.model.is_possible({group: 1}):
            new = self.pool.copy_on_write(group, number)
            assert new != number
            self.took(group, [new])
            self.model.free(group, [number])
        else:
            with pytest.raises(OutOfBlocks):
                self.pool.copy_on_write(group, number)
        self.agree()

    # --- holding and giving back --------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.held or self.model.content)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        group, ids = self.some(data, [*self.model.held, *self.model.content])
        self.pool.retain(group, np.array(ids, data.draw(st.sampled_from([np.int32, np.int64, np.uint16]))))
        self.model.retain(group, ids)
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        group, ids = self.some(data, list(self.model.held))
        if all(ids.count(number) <= self.model.held[group, number] for number in ids):
            self.pool.free(group, ids)
            self.model.free(group, ids)
        else:
            with pytest.raises(Conflict):
                self.pool.free(group, ids)
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), part=st.sampled_from(["all", "slab", "half"]))
    def free_much(self, data: st.DataObject, part: str) -> None:
        """So that slabs empty."""
        group, number = data.draw(st.sampled_from(sorted(self.model.held)), "block")
        mine = sorted(block for block in self.model.held if block[0] == group)
        if part == "slab":
            mine = [block for block in mine if self.model.slab_of(block) == self.model.slab_of((group, number))]
        elif part == "half":
            mine = mine[::2]
        ids = [block[1] for block in mine for _ in range(self.model.held[block])]
        self.pool.free(group, ids)
        self.model.free(group, ids)
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        group, number = data.draw(st.sampled_from(sorted(self.model.held)), "block")
        self.pool.free_one(group, number)
        self.model.free(group, [number])
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), one=st.booleans())
    def commit(self, data: st.DataObject, one: bool) -> None:
        group, ids = self.some(data, list(self.model.held))
        if one:
            self.pool.commit_one(group, ids[0])
            self.model.commit(group, ids[:1])
        else:
            self.pool.commit(group, ids)
            self.model.commit(group, ids)
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def commit_much(self, data: st.DataObject) -> None:
        group, _ = data.draw(st.sampled_from(sorted(self.model.held)), "block")
        ids = [block[1] for block in self.model.held if block[0] == group]
        self.pool.commit(group, ids)
        self.model.commit(group, ids)
        self.agree()

    @precondition(lambda self: self.model.held or self.model.content)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group, ids = self.some(data, [*self.model.held, *self.model.content])
        self.pool.drop(group, ids)
        self.model.drop(group, ids)
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def free_and_take_back(self, data: st.DataObject) -> None:
        """As if it had not been, but that blocks that are cleared when others get them are thought to need it."""
        model = self.model
        group, ids = self.some(data, list(model.held))
        ids = [number for at, number in enumerate(ids) if ids[:at].count(number) < model.held[group, number]]
        held, content = model.held.copy(), dict(model.content)
        owners = self.pool._arrays.owners.copy()
        self.pool.free(group, ids)
        model.free(group, ids)
        self.pool.take_back(group, data.draw(st.permutations(ids), "in another order"))
        model.held, model.content = held, content
        model.settle()
        assert self.pool._arrays.owners.tolist() == owners.tolist()
        assert [self.pool.times_held(*block_and_id(block)).item() for block in held] == list(held.values())
        self.agree()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), marks=st.booleans())
    def clear(self, data: st.DataObject, marks: bool) -> None:
        group, ids = self.some(data, list(self.model.held))
        if marks:
            self.pool.mark_stale(group, ids)
            if self.clearing:
                self.model.stale |= {self.model.place_of((group, number)) for number in ids}
        found = self.pool.to_clear(group, ids).tolist()
        assert len(found) == len(set(found))
        assert set(found) == self.model.to_clear(group, ids)
        self.agree()

    # --- what is refused, and what is interrupted ---------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["free", "free_one", "retain", "commit", "commit_one", "drop", "copy"]))
    def touch_what_nobody_has(self, data: st.DataObject, what: str) -> None:
        group = self.group(data)
        cut = self.model.blocks_per_slab[group]
        last = self.model.num_slabs * cut
        known = {block[1] for block in self.model.held if block[0] == group}
        if what in ("retain", "drop"):
            known |= {block[1] for block in self.model.content if block[0] == group}
        unknown = st.sampled_from([number for number in range(last) if number not in known])
        huge = st.sampled_from([-1, -last, last, 2**31, 2**63, 2**64, 2**70, True, 1.5, None])
        bad = data.draw(st.one_of(unknown, huge), "bad")
        good = data.draw(st.sampled_from([*sorted(known), None]), "good")
        ids = [bad] if good is None or what in ("free_one", "commit_one", "copy") else [good, bad]
        if bad is True and (len(ids) > 1 or 1 in known):
            return  # NumPy makes [1, True] integers, and a list of one True is refused below where 1 is no block
        call: Any = getattr(self.pool, "copy_on_write" if what == "copy" else what)
        with pytest.raises((SpecInvalid, Conflict)):
            call(group, bad if what in ("free_one", "commit_one", "copy") else ids)
        self.agree()

    @rule(data=st.data(), bad=st.sampled_from([-1, 99, None, "0", [0]]))
    def name_no_group(self, data: st.DataObject, bad: Any) -> None:
        for call in (self.pool.allocate_one, self.pool.available, self.pool.counts, self.pool.slabs):
            with pytest.raises(SpecInvalid):
                call(bad)
        with pytest.raises(SpecInvalid):
            self.pool.free_one(bad, 1)
        self.agree()

    @rule(data=st.data(), count=st.sampled_from([-1, -(2**70), True, 1.0, "3", None]))
    def ask_for_no_number(self, data: st.DataObject, count: Any) -> None:
        group = self.group(data)
        for call in (self.pool.allocate, self.pool.allocate_run):
            with pytest.raises(SpecInvalid):
                call(group, count)
        with pytest.raises(SpecInvalid):
            self.pool.allocate_all({group: count})
        with pytest.raises(OutOfBlocks):
            self.pool.allocate(group, 2**70)
        self.agree()

    @rule(data=st.data())
    def fail_while_evicting(self, data: st.DataObject) -> None:
        group = self.group(data)
        count = self.model.available(group)
        if count == self.model.available_clean(group):
            return
        self.hook_fails = True
        with pytest.raises(HookFailed):
            self.pool.allocate(group, count)
        self.hook_fails = False
        self.model.reopen()
        # Slabs that it had taken already may be thought stale that are not: never the other way round.
        stale = self.stale()
        assert stale >= self.model.stale
        self.model.stale = stale
        self.model.last_owner = {
            slab: owner - 1 for slab, owner in enumerate(self.pool._arrays.owners.tolist()) if owner
        }
        self.agree()

    @rule()
    def reopen(self) -> None:
        self.pool.close()
        self.pool = self.open()
        self.model.reopen()
        self.agree()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(
    max_examples=min(1500, settings().max_examples // 2),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
