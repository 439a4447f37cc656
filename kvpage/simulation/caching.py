"""Conversations against one layout with a prefix cache: what share of the prefixes is found, what the cache keeps.

As in `replay`, with these differences. A turn that ends leaves its blocks in the pool, free but cached. The next turn
of the conversation finds its prefix only if every block of it is still there, and then begins with those blocks; else
it begins with none, and what is left of the prefix is freed when the turn arrives. After the last turn of a
conversation its blocks stay until they are evicted, as an allocator cannot know better. Nothing is cached of a request
that was preempted, and a state is continued where it lies.

Room is made in this order: free blocks of the group's own slabs, a free slab, eviction by the policy. Groups that
always hold equally many blocks hold the same conversations in the same places, so a slab of one is evicted together
with its like of the others: with one of them gone the prefixes are of no use.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

from kvpage.simulation.cached_slabs import CachedSlabs, Prefix
from kvpage.simulation.conversations import Conversations, Talk
from kvpage.simulation.demand import Demand, Wanted
from kvpage.simulation.layout import SimulatedLayout
from kvpage.simulation.slabs import Run
from kvpage.simulation.streams import RequestLengths

Policy: TypeAlias = Literal["own_oldest", "older_of_block_and_slab"]
"""Which block a group evicts that has no room: its own least recently used one while it has any; or that, or the slab
(of any group of its pool) that only cached blocks keep and whose newest use is oldest, whichever is older."""
POLICIES: tuple[Policy, ...] = ("own_oldest", "older_of_block_and_slab")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingResult:
    """Over the measured steps."""

    found_share: float
    """Prefix tokens found, over prefix tokens asked for."""
    mean_running: float
    mean_waiting: float
    """Turns that wait for room."""
    cached_share: float
    """Bytes of cached blocks, over the memory."""
    pinned_share: float
    """Bytes of slabs that belong to a group for cached blocks alone, over the memory."""
    turns: int
    """Turns that were let in."""
    preemptions: int
    evicted_blocks: int
    """Of one group of each kind that always holds as many as its like."""
    refused: int


@dataclass(slots=True, eq=False)
class _Turn:
    talk: Talk
    lengths: RequestLengths
    prefix_tokens: int
    prefix: Prefix | None
    """What the turn before left; None for a first turn, and after a preemption."""
    done_tokens: int = 0
    admitted_step: int = 0
    order: int = 0
    runs: tuple[deque[Run], ...] = ()
    is_running: bool = False

    def tokens(self, step: int) -> int:
        """Tokens in `step`, the one in flight included."""
        return self.lengths.prompt_tokens + self.done_tokens + 1 + step - self.admitted_step


class CachingReplay:
    """A pool, its cache and the people who talk. `run` it once."""

    def __init__(self, layout: SimulatedLayout, conversations: Conversations, seed: int, policy: Policy) -> None:
        self._layout = layout
        self._policy = policy
        self._demand = Demand(layout)
        self._slabs = [CachedSlabs(group.blocks_per_slab) for group in layout.groups]
        self._free_slabs = [pool.slabs for pool in layout.pools]
        self._waiting: deque[_Turn] = deque()
        self._running: dict[int, _Turn] = {}  # by order of admission
        self._orders = 0
        self._changes: dict[int, list[tuple[int, _Turn]]] = {}  # with the order at which it was noted
        self._finishes: dict[int, list[tuple[int, _Turn]]] = {}
        self._asks: list[tuple[int, int, Talk, Prefix | None]] = []  # heap by step
        self._asked = self._ended = 0
        self._step = 0
        self._found = self._wanted = self._turns = 0
        self._preemptions = self._evicted = self._refused = 0
        self._lets_in = True
        for number in range(conversations.people):
            talk = Talk(conversations, Random(f"{seed} {number}"))
            self._ask_later(talk, None)

    def run(self, steps: int, *, warm_up_steps: int) -> CachingResult:
        """Replay `warm_up_steps` and then `steps` steps (at least 1); measure the latter."""
        running = waiting = cached = pinned = 0
        for self._step in range(warm_up_steps + steps):
            if self._step == warm_up_steps:
                self._found = self._wanted = self._turns = 0
                self._preemptions = self._evicted = self._refused = 0
            self._one_step()
            if self._step >= warm_up_steps:
                running += len(self._running)
                waiting += len(self._waiting)
                cached += self._cached_bytes()
                pinned += self._pinned_bytes()
        memory = steps * self._layout.memory_bytes
        return CachingResult(
            found_share=self._found / self._wanted if self._wanted else 0.0,
            mean_running=running / steps,
            mean_waiting=waiting / steps,
            cached_share=cached / memory,
            pinned_share=pinned / memory,
            turns=self._turns,
            preemptions=self._preemptions,
            evicted_blocks=self._evicted,
            refused=self._refused,
        )

    def _cached_bytes(self) -> int:
        return sum(
            slabs.cached_blocks * group.count * self._layout.pools[group.pool].slab_bytes // group.blocks_per_slab
            for group, slabs in zip(self._layout.groups, self._slabs, strict=True)
        )

    def _pinned_bytes(self) -> int:
        return sum(
            slabs.idle_slabs * group.count * self._layout.pools[group.pool].slab_bytes
            for group, slabs in zip(self._layout.groups, self._slabs, strict=True)
        )

    def _one_step(self) -> None:
        for order, turn in self._finishes.pop(self._step, ()):
            if turn.is_running and turn.order == order:
                self._finish(turn)
        while self._asks and self._asks[0][0] <= self._step:
            _, _, talk, prefix = heapq.heappop(self._asks)
            before, lengths = talk.next_turn()
            if before and prefix is not None:
                self._forget_broken(prefix)
            self._waiting.append(_Turn(talk, lengths, before, prefix if before else None))
        self._lets_in = True
        for order, turn in sorted(self._changes.pop(self._step, ()), key=_order):
            if turn.is_running and turn.order == order:
                self._grow(turn)
        while self._lets_in and self._waiting:
            self._let_in()

    def _forget_broken(self, prefix: Prefix) -> None:
        if not prefix.is_whole:
            for group, slabs, entries in zip(self._layout.groups, self._slabs, prefix.entries, strict=True):
                self._free_slabs[group.pool] += group.count * slabs.forget(entries)

    def _ask_later(self, talk: Talk, prefix: Prefix | None) -> None:
        self._asked += 1
        heapq.heappush(self._asks, (self._step + talk.pause_steps(), self._asked, talk, prefix))

    def _finish(self, turn: _Turn) -> None:
        prefix = Prefix()
        self._ended += 1
        for slabs, runs in zip(self._slabs, turn.runs, strict=True):
            prefix.entries.append(slabs.cache(runs, prefix, self._ended))
        self._stop(turn)
        self._ask_later(turn.talk, prefix)

    def _stop(self, turn: _Turn) -> None:
        turn.is_running = False
        del self._running[turn.order]

    def _grow(self, turn: _Turn) -> None:
        tokens = turn.tokens(self._step)
        change = self._demand.change(tokens)
        for index, blocks in change.gone:
            self._give_back(index, blocks, turn.runs[index])
        while not self._take(change.new, turn.runs):
            self._preempt_youngest()
            if not turn.is_running:
                return
        self._await_change(turn, tokens)

    def _give_back(self, index: int, blocks: int, runs: deque[Run]) -> None:
        group = self._layout.groups[index]
        self._free_slabs[group.pool] += group.count * self._slabs[index].give_back(blocks, runs)

    def _preempt_youngest(self) -> None:
        victim = self._running[next(reversed(self._running))]
        self._drop(victim)
        self._lets_in = False
        if not self._running:
            self._refuse(victim)  # it had the whole pool
            return
        victim.done_tokens += self._step - victim.admitted_step
        self._waiting.appendleft(victim)
        self._preemptions += 1

    def _drop(self, turn: _Turn) -> None:
        for index, runs in enumerate(turn.runs):
            self._give_back(index, sum(run.blocks for run in runs), runs)
        self._stop(turn)

    def _refuse(self, turn: _Turn) -> None:
        self._lets_in = False
        self._refused += 1
        self._ask_later(turn.talk, None)

    def _let_in(self) -> None:
        """Let the first waiting turn in, with its prefix where that is whole; or stop letting in for this step."""
        turn = self._waiting[0]
        turn.admitted_step = self._step
        tokens = turn.tokens(self._step)
        prefix = turn.prefix if turn.prefix is not None and turn.prefix.is_whole else None
        if not (self._begin_with(prefix, turn, tokens) if prefix else self._begin(turn, tokens)):
            self._lets_in = False
            if not self._running:
                self._waiting.popleft()
                self._refuse(turn)
            return
        self._waiting.popleft()
        if not turn.done_tokens:
            self._turns += 1
            self._wanted += turn.prefix_tokens
            self._found += turn.prefix_tokens if prefix else 0
        turn.prefix = None
        turn.order = self._orders
        turn.is_running = True
        self._orders += 1
        self._running[turn.order] = turn
        left = turn.lengths.output_tokens - turn.done_tokens
        self._finishes.setdefault(self._step + left, []).append((turn.order, turn))
        self._await_change(turn, tokens)

    def _begin(self, turn: _Turn, tokens: int) -> bool:
        turn.runs = tuple(deque() for _ in self._slabs)
        return self._take(self._demand.blocks(tokens), turn.runs)

    def _begin_with(self, prefix: Prefix, turn: _Turn, tokens: int) -> bool:
        """Use the cached blocks, and take what the new tokens need; False, with all as it was, without room."""
        turn.runs = tuple(slabs.reuse(entries) for slabs, entries in zip(self._slabs, prefix.entries, strict=True))
        kept: list[int] = []
        wanted: list[tuple[int, int]] = []
        for index, group in enumerate(self._layout.groups):
            held = sum(run.blocks for run in turn.runs[index])
            first = group.growth.end_block(turn.prefix_tokens) - held
            kept.append(max(0, first + held - max(first, group.growth.first_block(tokens))))
            wanted.append((index, group.growth.blocks(tokens) - kept[-1]))
        if not self._take(tuple(pair for pair in wanted if pair[1]), turn.runs):
            for slabs, entries in zip(self._slabs, prefix.entries, strict=True):
                slabs.undo_reuse(entries)
            return False
        for index, runs in enumerate(turn.runs):
            held = sum(run.blocks for run in runs)
            self._give_back(index, held - self._layout.groups[index].growth.blocks(tokens), runs)
        return True

    def _await_change(self, turn: _Turn, tokens: int) -> None:
        change = self._demand.next_change(tokens)
        if change is not None:
            self._changes.setdefault(self._step + change - tokens, []).append((turn.order, turn))

    def _take(self, wanted: Wanted, runs: tuple[deque[Run], ...]) -> bool:
        """Take all that is `wanted`, evicting for it, or nothing; False when evicting everything is too little."""
        if not self._could_take(wanted):
            return False
        taken: list[tuple[int, deque[Run]]] = []
        for index, blocks in wanted:
            fresh: deque[Run] = deque()
            if not self._make_room(index, blocks):
                for other, given in taken:
                    self._give_back(other, sum(run.blocks for run in given), given)
                return False
            self._slabs[index].take(blocks, fresh)
            taken.append((index, fresh))
        for index, fresh in taken:
            runs[index].extend(fresh)
        return True

    def _could_take(self, wanted: Wanted) -> bool:
        """Whether there is room when everything cached is evicted."""
        needed = [0] * len(self._free_slabs)
        for index, blocks in wanted:
            group, slabs = self._layout.groups[index], self._slabs[index]
            beyond = blocks - slabs.free_beside_used - slabs.cached_beside_used
            needed[group.pool] += group.count * max(0, -(-beyond // group.blocks_per_slab))
        there = list(self._free_slabs)
        for group, slabs in zip(self._layout.groups, self._slabs, strict=True):
            there[group.pool] += group.count * slabs.idle_slabs
        return all(need <= have for need, have in zip(needed, there, strict=True))

    def _make_room(self, index: int, blocks: int) -> bool:
        """Let group `index` have `blocks` free blocks; False when it cannot."""
        group, slabs = self._layout.groups[index], self._slabs[index]
        while slabs.free_blocks < blocks:
            if self._free_slabs[group.pool] >= group.count:
                self._free_slabs[group.pool] -= group.count
                slabs.add_slab()
            elif not self._evict_for(index, blocks - slabs.free_blocks):
                self._free_slabs[group.pool] += group.count * slabs.drop_empty()
                return False
        return True

    def _evict_for(self, index: int, missing: int) -> bool:
        """Evict up to `missing` blocks of group `index` or a slab of its pool, by the policy; False without either."""
        pool, slabs = self._layout.groups[index].pool, self._slabs[index]
        own = slabs.oldest()
        idle = min(
            (
                (used_at, other)
                for other, each in enumerate(self._layout.groups)
                if each.pool == pool and (used_at := self._slabs[other].oldest_idle()) is not None
            ),
            default=None,
        )
        if own is not None and (idle is None or self._policy == "own_oldest" or own <= idle[0]):
            evicted, owner = slabs.evict_oldest(missing), index
        elif idle is not None:
            evicted, owner = self._slabs[idle[1]].evict_idle(), idle[1]
        else:
            return False
        self._evicted += evicted.blocks
        self._free_slabs[pool] += self._layout.groups[owner].count * evicted.slabs
        return True


def _order(noted: tuple[int, _Turn]) -> int:
    return noted[0]
