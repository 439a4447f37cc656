"""The replay done the slow way: every block an object in a slab, every token looked at in every step.

It shares nothing with `kvpage.simulation.replay` but the values that go in and the result that comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count

from kvpage.simulation.layout import Growth, SimulatedLayout
from kvpage.simulation.replay import ReplayResult
from kvpage.simulation.streams import RequestLengths


@dataclass(eq=False)
class Block:
    slab: Slab


class Slab:
    """Blocks of one group, some of them free."""

    def __init__(self, blocks: int, pool: int) -> None:
        self.pool = pool
        self.blocks = [Block(self) for _ in range(blocks)]
        self.free = list(self.blocks)
        self.changed = 0

    @property
    def is_empty(self) -> bool:
        return len(self.free) == len(self.blocks)


@dataclass(eq=False)
class Group:
    growth: Growth
    blocks_per_slab: int
    pool: int
    bytes_per_token: Fraction
    slabs: list[Slab] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    lengths: RequestLengths
    done: int = 0
    tables: list[dict[int, Block]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.lengths.prompt_tokens + self.done + 1


def live_tokens(growth: Growth, tokens: int) -> set[int]:
    """The tokens that the newest one can see."""
    if growth.kind == "state":
        return {0}
    seen = set(range(tokens))
    if growth.kind == "window":
        return {token for token in seen if tokens - 1 - token < growth.reach}
    if growth.kind == "chunk":
        return {token for token in seen if token // growth.reach == (tokens - 1) // growth.reach}
    return seen


class NaiveReplay:
    def __init__(self, layout: SimulatedLayout, requests: Iterator[RequestLengths]) -> None:
        self.layout = layout
        self.requests = requests
        self.groups = [
            Group(each.growth, each.blocks_per_slab, each.pool, each.bytes_per_token / each.count)
            for each in layout.groups
            for _ in range(each.count)
        ]
        self.free_slabs = [pool.slabs for pool in layout.pools]
        self.clock = count(1)
        self.running: list[Request] = []  # oldest first
        self.waiting: list[Request] = []
        self.preempted = self.finished = self.refused = 0

    def run(self, steps: int, *, warm_up_steps: int) -> ReplayResult:
        running = live = held = Fraction(0)
        before = (0, 0, 0)
        for step in range(warm_up_steps + steps):
            if step == warm_up_steps:
                before = (self.preempted, self.finished, self.refused)
            self.step()
            self.check()
            if step >= warm_up_steps:
                running += len(self.running)
                live += self.live_bytes()
                held += self.held_bytes()
        memory = self.layout.memory_bytes
        return ReplayResult(
            mean_running=float(running / steps),
            live_share=float(live / (steps * memory)),
            held_share=float(held / (steps * memory)),
            preemptions=self.preempted - before[0],
            finished=self.finished - before[1],
            refused=self.refused - before[2],
            measured_steps=steps,
        )

    def step(self) -> None:
        for request in self.running:
            request.done += 1
        for request in [each for each in self.running if each.done == each.lengths.output_tokens]:
            self.leave(request)
            self.finished += 1
        trouble = self.preempted + self.refused
        for request in list(self.running):
            self.give_back_unseen(request)
            while request in self.running and not self.take(request):
                self.preempt(self.running[-1])
        while trouble == self.preempted + self.refused and self.let_in():
            pass

    def let_in(self) -> bool:
        if not self.waiting:
            self.waiting.append(Request(next(self.requests)))
        request = self.waiting[0]
        request.tables = [{} for _ in self.groups]
        if self.take(request):
            self.running.append(self.waiting.pop(0))
            return True
        if not self.running:
            self.waiting.pop(0)
            self.refused += 1
        return False

    def preempt(self, request: Request) -> None:
        was_alone = len(self.running) == 1
        self.leave(request)
        if was_alone:
            self.refused += 1
        else:
            self.waiting.insert(0, request)
            self.preempted += 1

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        for group, table in zip(self.groups, request.tables, strict=True):
            self.give_back(group, table, set())

    def give_back_unseen(self, request: Request) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            self.give_back(group, table, needed_blocks(group, request))

    def give_back(self, group: Group, table: dict[int, Block], needed: set[int]) -> None:
        for index in sorted(table.keys() - needed):
            block = table.pop(index)
            block.slab.free.append(block)
            block.slab.changed = next(self.clock)
            if block.slab.is_empty:
                group.slabs.remove(block.slab)
                self.free_slabs[group.pool] += 1

    def take(self, request: Request) -> bool:
        missing = [
            sorted(needed_blocks(group, request) - table.keys())
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        new = [0] * len(self.free_slabs)
        for group, indexes in zip(self.groups, missing, strict=True):
            room = sum(len(slab.free) for slab in group.slabs)
            while room < len(indexes):
                room += group.blocks_per_slab
                new[group.pool] += 1
        if any(wanted > free for wanted, free in zip(new, self.free_slabs, strict=True)):
            return False
        for group, indexes, table in zip(self.groups, missing, request.tables, strict=True):
            for index in indexes:
                table[index] = self.take_block(group)
        return True

    def take_block(self, group: Group) -> Block:
        with_room = [slab for slab in group.slabs if slab.free]
        if not with_room:
            self.free_slabs[group.pool] -= 1
            with_room = [Slab(group.blocks_per_slab, group.pool)]
            group.slabs += with_room
        slab = min(with_room, key=lambda each: (len(each.free), each.changed))
        slab.changed = next(self.clock)
        return slab.free.pop()

    def live_bytes(self) -> Fraction:
        return sum(
            (
                len(live_tokens(group.growth, request.tokens)) * group.bytes_per_token
                for request in self.running
                for group in self.groups
            ),
            Fraction(0),
        )

    def held_bytes(self) -> int:
        return sum(self.layout.pools[group.pool].slab_bytes * len(group.slabs) for group in self.groups)

    def check(self) -> None:
        """Slabs and blocks are neither lost nor made."""
        for index, pool in enumerate(self.layout.pools):
            owned = sum(len(group.slabs) for group in self.groups if group.pool == index)
            assert owned + self.free_slabs[index] == pool.slabs
        for position, group in enumerate(self.groups):
            used = [block for request in self.running for block in request.tables[position].values()]
            free = [block for slab in group.slabs for block in slab.free]
            assert len({*used, *free}) == len(used) + len(free) == group.blocks_per_slab * len(group.slabs)


def needed_blocks(group: Group, request: Request) -> set[int]:
    return {token // group.growth.block_size for token in live_tokens(group.growth, request.tokens)}
