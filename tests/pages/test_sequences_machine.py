"""Random sequences on a pool that is too small for them, with a prefix cache, against what an engine would read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid
from kvpage.pages.events import EventLog
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.sequence import Sequence
from kvpage.pages.sequences import Sequences
from support.block_memory import BlockMemory
from support.prefix_parts import looks_back_to, make_cache

FULL = Lifetime(kind="full", block_size=2)
FINE = Lifetime(kind="full", block_size=1)
WINDOW = Lifetime(kind="window", block_size=2, reach=4)
NARROW = Lifetime(kind="window", block_size=3, reach=1)
CHUNK = Lifetime(kind="chunk", block_size=2, reach=5)
STATE = Lifetime(kind="state", block_size=4, num_speculative_blocks=1)
STATE_ONLY = Lifetime(kind="state", block_size=2)
ENCODER = Lifetime(kind="encoder", block_size=3)
PLANS: tuple[tuple[tuple[Lifetime, ...], tuple[int, ...], int], ...] = (
    ((FULL,), (1,), 12),
    ((FULL, WINDOW), (1, 1), 16),
    ((FINE, WINDOW, NARROW), (3, 1, 2), 24),
    ((FULL, STATE), (2, 1), 26),
    ((WINDOW, STATE, CHUNK), (1, 1, 1), 44),
    ((STATE_ONLY,), (1,), 9),
    ((CHUNK, FULL), (4, 3), 8),
    ((FULL, ENCODER), (1, 1), 14),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
SMALL = st.integers(0, 11)
MOST_RUNNING = 3


@dataclass
class Running:
    sequence: Sequence
    salt: bytes
    tokens: list[int]
    computed: int = 0


def held(running: Running) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(running.sequence.num_held())


class SequencesOnASmallPool(RuleBasedStateMachine):
    @initialize(plan=st.sampled_from(PLANS))
    def begin(self, plan: tuple[tuple[Lifetime, ...], tuple[int, ...], int]) -> None:
        self.lifetimes, cut, num_slabs = plan
        self.cache = make_cache(self.lifetimes, num_slabs=num_slabs, cut=cut, events=EventLog(10_000))
        self.sequences = Sequences.cached(self.cache)
        self.memory = BlockMemory(self.lifetimes, cut)
        self.running: list[Running] = []
        self.cursor = self.cache.events.cursor
        self.routed: list[set[bytes]] = [set() for _ in cut]

    def used(self) -> list[int]:
        return [self.cache.pool.counts(group).used for group in range(len(self.lifetimes))]

    def pick(self, which: int) -> Running:
        return self.running[which % len(self.running)]

    def compute(self, running: Running, copies: Any) -> None:
        """What an engine does with a step: the copies, then the tokens that have blocks and are not computed."""
        self.memory.copy(copies)
        tokens = running.tokens[: running.sequence.num_tokens]
        self.memory.compute(running.sequence, running.salt, tokens, running.computed)
        running.computed = len(tokens)

    def expect_exactly_the_blocks_needed(self, running: Running, start: int) -> None:
        """After a step that began at token `start`: blocks of what that one looks back to, of the step, and the one
        that the next token goes into if it has been begun."""
        for group, lifetime in enumerate(self.lifetimes):
            if lifetime.grows:
                tokens = {*looks_back_to(lifetime, start), *range(start, running.sequence.num_tokens)}
                tokens |= {start} if start % lifetime.block_size else set()
                blocks = {token // lifetime.block_size for token in tokens}
                table = running.sequence.table(group)
                assert set(np.flatnonzero(table).tolist()) == blocks
                assert len(table) == -(-running.sequence.num_tokens // lifetime.block_size)

    @rule(family=SMALL, length=st.integers(0, 16), ending=TOKENS, salt=st.sampled_from([b"", b"s"]), share=SMALL)
    def start(self, family: int, length: int, ending: list[int], salt: bytes, share: int) -> None:
        """Prompts of a family begin alike."""
        if len(self.running) >= MOST_RUNNING:
            return
        tokens = [(7 * place + family % 2) // 3 % 2 for place in range(length)] + ending
        sequence = self.sequences.new(tokens, salt=salt, encoder_tokens=share % 5)
        most = len(tokens) - sequence.needs(0).prefix_tokens
        step = None if share > 1 else most * share // 2
        needs, before = sequence.needs(step), self.used()
        try:
            copies = sequence.advance(step)
        except OutOfBlocks:
            assert self.used() == before
            assert sequence.num_held() == (0,) * len(before)
            sequence.close()
            return
        assert needs.prefix_tokens == sequence.num_prefix_tokens
        assert needs.prefix_tokens == 0 or needs.prefix_tokens < len(tokens)
        taken = [new + revived for new, revived in zip(needs.new_blocks, needs.revived_blocks, strict=True)]
        assert [after - one for after, one in zip(self.used(), before, strict=True)] == taken
        running = Running(sequence, salt, tokens, computed=needs.prefix_tokens)
        self.running.append(running)
        self.expect_exactly_the_blocks_needed(running, needs.prefix_tokens)
        self.compute(running, copies)

    @precondition(lambda self: self.running)
    @rule(which=SMALL, tokens=TOKENS, share=SMALL)
    def append(self, which: int, tokens: list[int], share: int) -> None:
        """A step, of new tokens or of known ones that have no blocks yet."""
        running = self.pick(which)
        start, before = running.sequence.num_tokens, held(running)
        if start < len(running.tokens):
            self.advance(running, (len(running.tokens) - start) * (share % 3) // 2)
            return
        try:
            copies = running.sequence.append(tokens)
        except OutOfBlocks:
            assert running.sequence.num_tokens == running.sequence.num_known_tokens == start
            assert (held(running) <= before).all()
            return
        running.tokens += tokens
        self.expect_exactly_the_blocks_needed(running, start)
        self.compute(running, copies)

    def advance(self, running: Running, step: int) -> None:
        start, before = running.sequence.num_tokens, held(running)
        needs = running.sequence.needs(step)
        assert needs.prefix_tokens == sum(needs.revived_blocks) == 0
        try:
            copies = running.sequence.advance(step)
        except OutOfBlocks:
            assert running.sequence.num_tokens == start
            assert (held(running) == before - np.array(needs.given_back_blocks)).all()
            return
        sources = Counter(copy.group for copy in copies)
        for group, change in enumerate((held(running) - before).tolist()):
            assert needs.new_blocks[group] == change + needs.given_back_blocks[group] + sources[group]
        self.expect_exactly_the_blocks_needed(running, start)
        self.compute(running, copies)

    @precondition(lambda self: self.running)
    @rule(which=SMALL, share=SMALL)
    def commit(self, which: int, share: int) -> None:
        running = self.pick(which)
        running.sequence.commit(None if share > 1 else running.sequence.num_tokens * share // 2)

    @precondition(lambda self: self.running)
    @rule(which=SMALL, commits=st.booleans())
    def checkpoint(self, which: int, commits: bool) -> None:
        running = self.pick(which)
        try:
            self.memory.copy(running.sequence.checkpoint())
        except (OutOfBlocks, SpecInvalid, Conflict):
            return
        if commits:
            running.sequence.commit()

    @precondition(lambda self: self.running)
    @rule(which=SMALL)
    def fork(self, which: int) -> None:
        running, before = self.pick(which), self.used()
        if len(self.running) >= MOST_RUNNING:
            return
        try:
            fork = running.sequence.fork()
        except OutOfBlocks:
            assert self.used() == before
            return
        self.memory.copy(fork.copies)
        self.running.append(Running(fork.sequence, running.salt, running.tokens.copy(), running.computed))

    @precondition(lambda self: self.running)
    @rule(which=SMALL, back=st.integers(0, 4))
    def truncate(self, which: int, back: int) -> None:
        running = self.pick(which)
        before, count = held(running), max(0, running.sequence.num_tokens - back)
        try:
            running.sequence.truncate(count)
        except Conflict:
            assert {lifetime.kind for lifetime in self.lifetimes} & {"window", "chunk", "state"}
            assert (held(running) == before).all()
            return
        del running.tokens[count:]
        if count < running.computed:
            running.computed = count
            self.memory.accept_state(running.sequence, running.salt, running.tokens)

    @precondition(lambda self: self.running)
    @rule(which=SMALL, commits=st.booleans())
    def close(self, which: int, commits: bool) -> None:
        running = self.pick(which)
        if commits:
            running.sequence.commit()
        running.sequence.close()
        self.running.remove(running)
        assert running.sequence.num_held() == (0,) * len(self.lifetimes)

    @rule(clears=SMALL)
    def copies_done(self, clears: int) -> None:
        self.sequences.copies_done()
        if not clears:
            self.cache.clear()

    @invariant()
    def everything_computed_is_still_there(self) -> None:
        for running in getattr(self, "running", ()):
            self.memory.check(running.sequence, running.salt, running.tokens[: running.computed])

    @invariant()
    def every_block_is_held_by_whom_it_should_be(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        expected = self.sequences.sharing.sources
        for running in self.running:
            for group, count in enumerate(running.sequence.num_held()):
                blocks = running.sequence.held(group)
                assert count == len(blocks)
                assert set(running.sequence.table(group).tolist()) <= {0, *blocks}
                expected.update((group, block) for block in blocks)
        for group in range(len(self.lifetimes)):
            times = self.cache.pool.times_held(group, range(self.cache.pool.geometry.num_blocks(group)))
            assert {(group, int(block)): int(times[block]) for block in np.flatnonzero(times)} == {
                place: count for place, count in expected.items() if place[0] == group
            }

    @invariant()
    def routers_know_what_is_cached(self) -> None:
        if not hasattr(self, "cache"):
            return
        page = self.cache.events.read(self.cursor)
        assert not page.has_missed
        for event in page.events:
            there, changed = self.routed[event.group], set(event.hashes)
            assert there.isdisjoint(changed) if event.kind == "stored" else there >= changed
            self.routed[event.group] = there | changed if event.kind == "stored" else there - changed
        self.cursor = page.cursor
        assert [set(hashes) for hashes in self.cache.snapshot().hashes] == self.routed

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for running in self.running:
                running.sequence.close()
            self.sequences.copies_done()
            assert self.used() == [0] * len(self.lifetimes)
            self.cache.check()


TestSequencesOnASmallPool = SequencesOnASmallPool.TestCase
SequencesOnASmallPool.TestCase.settings = settings(
    max_examples=min(150, settings().max_examples),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(one.kind for one in plan[0]))
@pytest.mark.parametrize("seed", range(3))
def test_long_walks(plan: Any, seed: int) -> None:
    """Longer than hypothesis goes: what takes many steps to come about."""
    random = Random(seed)
    machine = SequencesOnASmallPool()
    machine.begin(plan)
    for _ in range(800):
        which, share, tokens = (
            random.randrange(12),
            random.randrange(12),
            random.choices((0, 1), k=random.randint(1, 5)),
        )
        chance = random.random()
        if not machine.running or chance < 0.25:
            length = random.choice((random.randint(0, 16), 16 - len(tokens)))
            machine.start(which, length, tokens, random.choice((b"", b"", b"s")), share)
        elif chance < 0.50:
            machine.append(which, tokens, share)
        elif chance < 0.60:
            machine.commit(which, share)
        elif chance < 0.72:
            machine.checkpoint(which, share > 3)
        elif chance < 0.77:
            machine.fork(which)
        elif chance < 0.83:
            machine.truncate(which, share % 5)
        elif chance < 0.86:
            machine.copies_done(random.randrange(12))
        else:
            machine.close(which, share > 1)
        machine.everything_computed_is_still_there()
        machine.every_block_is_held_by_whom_it_should_be()
        machine.routers_know_what_is_cached()
    counts = machine.cache.counts
    machine.teardown()
    kinds = {one.kind for one in machine.lifetimes}
    if "encoder" in kinds:
        assert counts.stored == 0
    else:
        assert min(counts.hits, counts.misses, counts.stored, counts.evicted) > 0
        assert counts.duplicates > 0 or kinds == {"state"}  # a state that is kept already is not copied again
