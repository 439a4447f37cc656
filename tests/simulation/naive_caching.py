"""The replay of conversations with an object for every block and a look at all of them for every decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random

from kvpage.simulation.caching import CachingResult, Policy
from kvpage.simulation.conversations import Conversations, Talk
from kvpage.simulation.layout import SimulatedGroups, SimulatedLayout
from kvpage.simulation.streams import RequestLengths
from simulation.naive import live_tokens


@dataclass(eq=False)
class Kept:
    """What an ended turn left."""

    ended: int
    tables: list[dict[int, Block]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return all(block.kept is self for table in self.tables for block in table.values())


@dataclass(eq=False)
class Block:
    slab: Slab
    is_used: bool = False
    kept: Kept | None = None
    place: int = 0
    """In the prefix that it is kept for."""

    @property
    def is_free(self) -> bool:
        return not self.is_used and self.kept is None

    def become(self, *, is_used: bool = False, kept: Kept | None = None, place: int = 0) -> None:
        self.is_used, self.kept, self.place = is_used, kept, place
        self.slab.changed = next(self.slab.clock)


class Slab:
    def __init__(self, blocks: int, clock: count[int]) -> None:
        self.clock = clock
        self.changed = 0
        self.blocks = [Block(self) for _ in range(blocks)]

    @property
    def is_idle(self) -> bool:
        return not any(block.is_used for block in self.blocks) and any(block.kept for block in self.blocks)

    @property
    def is_empty(self) -> bool:
        return all(block.is_free for block in self.blocks)

    @property
    def free(self) -> list[Block]:
        return [block for block in self.blocks if block.is_free]

    @property
    def newest(self) -> int:
        return max(block.kept.ended for block in self.blocks if block.kept)


@dataclass(eq=False)
class Turn:
    talk: Talk
    lengths: RequestLengths
    before: int
    kept: Kept | None
    done: int = 0
    tables: list[dict[int, Block]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.lengths.prompt_tokens + self.done + 1


class NaiveCaching:
    """All groups of the layout have a count of 1, as like groups would evict on their own here."""

    def __init__(self, layout: SimulatedLayout, conversations: Conversations, seed: int, policy: Policy) -> None:
        self.layout, self.policy = layout, policy
        self.clock = count(1)
        self.slabs: list[list[Slab]] = [[] for _ in layout.groups]
        self.free_slabs = [pool.slabs for pool in layout.pools]
        self.running: list[Turn] = []
        self.waiting: list[Turn] = []
        self.asks: list[tuple[int, int, Talk, Kept | None]] = []
        self.step = self.ended = 0
        self.found = self.wanted = self.turns = self.preempted = self.evicted = self.refused = 0
        for number in range(conversations.people):
            self.ask_later(Talk(conversations, Random(f"{seed} {number}")), None)

    def run(self, steps: int, *, warm_up_steps: int) -> CachingResult:
        running = waiting = cached = pinned = 0
        for self.step in range(warm_up_steps + steps):
            if self.step == warm_up_steps:
                self.found = self.wanted = self.turns = self.preempted = self.evicted = self.refused = 0
            self.one_step()
            self.check()
            if self.step >= warm_up_steps:
                running += len(self.running)
                waiting += len(self.waiting)
                cached += sum(self.cached_bytes(index) for index in range(len(self.slabs)))
                pinned += sum(
                    sum(slab.is_idle for slab in slabs) * self.layout.pools[group.pool].slab_bytes
                    for group, slabs in zip(self.layout.groups, self.slabs, strict=True)
                )
        memory = steps * self.layout.memory_bytes
        return CachingResult(
            found_share=self.found / self.wanted if self.wanted else 0.0,
            mean_running=running / steps,
            mean_waiting=waiting / steps,
            cached_share=cached / memory,
            pinned_share=pinned / memory,
            turns=self.turns,
            preemptions=self.preempted,
            evicted_blocks=self.evicted,
            refused=self.refused,
        )

    def cached_bytes(self, index: int) -> int:
        blocks = sum(block.kept is not None for slab in self.slabs[index] for block in slab.blocks)
        group = self.layout.groups[index]
        return blocks * self.layout.pools[group.pool].slab_bytes // group.blocks_per_slab

    def ask_later(self, talk: Talk, kept: Kept | None) -> None:
        self.asks.append((self.step + talk.pause_steps(), next(self.clock), talk, kept))

    def one_step(self) -> None:
        for turn in self.running:
            turn.done += 1
        for turn in [each for each in self.running if each.done == each.lengths.output_tokens]:
            self.finish(turn)
        for ask in sorted((each for each in self.asks if each[0] <= self.step), key=lambda each: each[:2]):
            self.asks.remove(ask)
            before, lengths = ask[2].next_turn()
            kept = ask[3] if before else None
            if kept is not None and not kept.is_whole:
                self.forget(kept)
            self.waiting.append(Turn(ask[2], lengths, before, kept))
        trouble = self.preempted + self.refused
        for turn in list(self.running):
            if turn in self.running:
                self.give_back_unseen(turn)
            while turn in self.running and not self.take(turn):
                self.preempt(self.running[-1])
        while self.waiting and trouble == self.preempted + self.refused and self.let_in():
            pass

    def finish(self, turn: Turn) -> None:
        self.running.remove(turn)
        self.ended += 1
        kept = Kept(self.ended, turn.tables)
        for table in turn.tables:
            for place, index in enumerate(sorted(table)):
                table[index].become(kept=kept, place=place)
        self.ask_later(turn.talk, kept)

    def forget(self, kept: Kept) -> None:
        for index, table in enumerate(kept.tables):
            for block in [table[position] for position in sorted(table)]:
                if block.kept is kept:
                    block.become()
                    self.drop_empty(index)

    def drop_empty(self, index: int) -> None:
        for slab in [each for each in self.slabs[index] if each.is_empty]:
            self.slabs[index].remove(slab)
            self.free_slabs[self.layout.groups[index].pool] += 1

    def needed(self, index: int, turn: Turn) -> set[int]:
        growth = self.layout.groups[index].growth
        return {token // growth.block_size for token in live_tokens(growth, turn.tokens)}

    def give_back_unseen(self, turn: Turn) -> None:
        for index, table in enumerate(turn.tables):
            for position in sorted(table.keys() - self.needed(index, turn)):
                table.pop(position).become()
                self.drop_empty(index)

    def preempt(self, turn: Turn) -> None:
        self.running.remove(turn)
        for index, table in enumerate(turn.tables):
            for position in sorted(table):
                table[position].become()
                self.drop_empty(index)
        if self.running:
            self.preempted += 1
            self.waiting.insert(0, turn)
        else:
            self.refused += 1
            self.ask_later(turn.talk, None)

    def let_in(self) -> bool:
        turn = self.waiting[0]
        kept = turn.kept if turn.kept is not None and turn.kept.is_whole else None
        turn.tables = [{} for _ in self.slabs]
        if kept is not None:
            turn.tables = [dict(sorted(table.items())) for table in kept.tables]
            for table in turn.tables:
                for block in table.values():
                    block.become(is_used=True)
        if not self.take(turn):
            for table in kept.tables if kept is not None else []:
                for place, position in enumerate(sorted(table)):
                    table[position].become(kept=kept, place=place)
            if not self.running:
                self.waiting.pop(0)
                self.refused += 1
                self.ask_later(turn.talk, None)
            return False
        self.waiting.pop(0)
        self.give_back_unseen(turn)
        self.running.append(turn)
        if not turn.done:
            self.turns += 1
            self.wanted += turn.before
            self.found += turn.before if kept is not None else 0
        turn.kept = None
        return True

    def take(self, turn: Turn) -> bool:
        missing = [sorted(self.needed(i, turn) - table.keys()) for i, table in enumerate(turn.tables)]
        if not self.could_take([len(each) for each in missing]):
            return False
        taken: list[tuple[int, int]] = []
        for index, positions in enumerate(missing):
            if not self.make_room(index, len(positions)):
                for other, position in taken:
                    turn.tables[other].pop(position).become()
                    self.drop_empty(other)
                return False
            for position in positions:
                with_room = [slab for slab in self.slabs[index] if slab.free]
                block = min(with_room, key=lambda slab: (len(slab.free), slab.changed)).free[0]
                block.become(is_used=True)
                turn.tables[index][position] = block
                taken.append((index, position))
        return True

    def could_take(self, wanted: list[int]) -> bool:
        there = list(self.free_slabs)
        for group, slabs, blocks in zip(self.layout.groups, self.slabs, wanted, strict=True):
            busy = [slab for slab in slabs if not slab.is_idle]
            there[group.pool] += len(slabs) - len(busy)
            room = sum(not block.is_used for slab in busy for block in slab.blocks)
            while room < blocks:
                room += group.blocks_per_slab
                there[group.pool] -= 1
        return all(slabs >= 0 for slabs in there)

    def make_room(self, index: int, blocks: int) -> bool:
        group: SimulatedGroups = self.layout.groups[index]
        while sum(len(slab.free) for slab in self.slabs[index]) < blocks:
            if self.free_slabs[group.pool]:
                self.free_slabs[group.pool] -= 1
                self.slabs[index].append(Slab(group.blocks_per_slab, self.clock))
                self.slabs[index][-1].changed = next(self.clock)
            elif not self.evict_for(index):
                self.drop_empty(index)
                return False
        return True

    def evict_for(self, index: int) -> bool:
        own = [block for slab in self.slabs[index] for block in slab.blocks if block.kept]
        own.sort(key=lambda block: (block.kept.ended if block.kept else 0, block.place))
        idle = [
            (slab.newest, other, slab)
            for other, slabs in enumerate(self.slabs)
            for slab in slabs
            if slab.is_idle and self.layout.groups[other].pool == self.layout.groups[index].pool
        ]
        oldest = min(idle, key=lambda each: each[:2], default=None)
        if own and own[0].kept and (oldest is None or self.policy == "own_oldest" or own[0].kept.ended <= oldest[0]):
            own[0].become()
            self.evicted += 1
            if own[0].slab.is_empty:
                self.drop_empty(index)
            return True
        if oldest is None:
            return False
        if self.layout.groups[oldest[1]].blocks_per_slab == 1:  # any of them: take the first block of the prefix
            oldest = min((each for each in idle if each[:2] == oldest[:2]), key=lambda each: each[2].blocks[0].place)
        self.evicted += sum(block.kept is not None for block in oldest[2].blocks)
        for block in oldest[2].blocks:
            block.become()
        self.drop_empty(oldest[1])
        return True

    def check(self) -> None:
        """Slabs and blocks are neither lost nor made, and what runs has what it needs."""
        for index, pool in enumerate(self.layout.pools):
            groups = zip(self.layout.groups, self.slabs, strict=True)
            assert (
                sum(len(slabs) for group, slabs in groups if group.pool == index) + self.free_slabs[index] == pool.slabs
            )
        for index, slabs in enumerate(self.slabs):
            used = [block for turn in self.running for block in turn.tables[index].values()]
            assert len(set(used)) == len(used) == sum(block.is_used for slab in slabs for block in slab.blocks)
            assert all(turn.tables[index].keys() == self.needed(index, turn) for turn in self.running)
