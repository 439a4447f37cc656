"""Sequences whose blocks a lease holds: the same as those of a pool of this process, and shared with other leases."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvpage.errors import OutOfBlocks
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import TokenHashes
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leased_sequences import LeasedPrefixes, leased_sequences
from kvpage.pages.lifetimes import lifetimes_of
from kvpage.pages.local_lease import LocalLease
from kvpage.pages.needs import Copy
from kvpage.pages.pool_buffer import pool_buffer_bytes
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.sequence import Sequence
from kvpage.pages.sequences import Sequences
from kvpage.plans import Plan
from support.leased_pools import BLOCKS_PER_SLAB, plan_of
from support.served_leases import OverSocket, ServedPools

PROMPT = np.arange(100)


class Pair:
    """The same done with sequences of a lease and with those of a pool of their own."""

    def __init__(self, plan: Plan) -> None:
        self.groups = range(len(plan.groups))
        self.pool = LeasedPool(plan)
        self.lease = LocalLease(self.pool, "engine", clear=lambda group, ids: None)
        self.all = [leased_sequences(plan, self.lease), Sequences.cached(PrefixCache.of(plan))]
        self.running: list[list[Sequence]] = []

    def each(self, work: object, sequences: list[Sequence]) -> None:
        outcomes = [_outcome(work, sequence) for sequence in sequences]
        assert outcomes[0] == outcomes[1]
        for group in self.groups:
            tables = [sequence.table(group).tolist() for sequence in sequences]
            assert tables[0] == tables[1], f"group {group}"

    def done(self) -> None:
        for one in self.all:
            one.copies_done()
        self.pool.check()


def _outcome(work: object, sequence: Sequence) -> tuple[Copy, ...] | str | None:
    assert callable(work)
    try:
        return work(sequence)  # type: ignore[no-any-return]
    except OutOfBlocks:
        return "out of blocks"


@pytest.mark.parametrize("name", BLOCKS_PER_SLAB)
@pytest.mark.parametrize("seed", range(3))
def test_they_are_those_of_a_pool(name: str, seed: int) -> None:
    chance = random.Random(seed)
    pair = Pair(plan_of(name, 40))
    for _ in range(60):
        doing = chance.choice(("new", "grow", "grow", "commit", "end"))
        if doing == "new" or not pair.running:
            tokens = PROMPT[: chance.randrange(1, 80)] + chance.choice((0, 0, 1))
            new = [one.new(tokens) for one in pair.all]
            pair.running.append(new)
            pair.each(lambda sequence: sequence.advance(), new)
        else:
            some = chance.choice(pair.running)
            if doing == "grow":
                more = PROMPT[: chance.randrange(1, 20)]
                pair.each(lambda sequence, more=more: sequence.append(more), some)
            elif doing == "commit":
                pair.each(lambda sequence: sequence.commit(), some)
            else:
                pair.running.remove(some)
                pair.each(lambda sequence: sequence.close(), some)
        pair.done()
    for some in pair.running:
        pair.each(lambda sequence: sequence.close(), some)
    pair.done()
    assert pair.lease.held() == {}


def test_forks_write_into_copies() -> None:
    plan = plan_of("flat groups", 40)
    pair = Pair(plan)
    first = [one.new(PROMPT[:24]) for one in pair.all]
    pair.each(lambda sequence: sequence.advance(), first)
    second = [sequence.fork().sequence for sequence in first]
    pair.each(lambda sequence: sequence.append([1]), second)
    pair.each(lambda sequence: sequence.append([2]), first)
    pair.done()


def test_what_one_lease_has_cached_another_finds_even_after_the_worker_was_killed(
    no_leaks: None, run_dir: Path
) -> None:
    plan = plan_of("flat groups", 40)
    pools = ServedPools(run_dir)
    try:
        way = OverSocket(pools, plan)
        with way.open("first") as first:
            with leased_sequences(plan, first).new(PROMPT) as sequence:
                sequence.advance()
                sequence.commit()
                blocks = sequence.table(0).tolist()
            pools.kill()
            with way.open("second") as second, leased_sequences(plan, second).new(PROMPT) as sequence:
                assert sequence.needs().prefix_tokens == 96
                sequence.advance()
                assert sequence.num_prefix_tokens == 96
                assert sequence.table(0).tolist()[:6] == blocks[:6]
    finally:
        pools.close()


def test_what_was_begun_before_everything_was_forgotten_is_not_kept() -> None:
    """It was computed with other weights."""
    plan = plan_of("flat", 40)
    pool = LeasedPool(plan)
    lease = LocalLease(pool, "engine")
    prefixes = LeasedPrefixes(lease, lifetimes_of(plan))
    hashes = TokenHashes([16])
    hashes.append(PROMPT)
    with leased_sequences(plan, lease).new(PROMPT) as sequence:
        sequence.advance()
        pool.prefix.clear()
        sequence.commit()
    assert prefixes.find(hashes, 96).num_tokens == 0
    with leased_sequences(plan, lease).new(PROMPT) as sequence:
        sequence.advance()
        sequence.commit()
    assert prefixes.find(hashes, 96).num_tokens == 96


def test_a_process_killed_while_everything_was_forgotten_leaves_nothing_to_be_found() -> None:
    plan = plan_of("flat", 40)
    buffer = bytearray(pool_buffer_bytes(Geometry.of(plan)))
    with LeasedPool(plan, buffer) as pool:
        lease = LocalLease(pool, "engine")
        with leased_sequences(plan, lease).new(PROMPT) as sequence:
            sequence.advance()
            sequence.commit()
        pool.book.begin_era()  # and here it was killed
    with LeasedPool(plan, buffer) as pool:
        assert pool.blocks.counts(0).cached == 0
        assert not pool.book.is_forgetting
        pool.check()


def test_tenants_do_not_find_each_others_prefixes() -> None:
    plan = plan_of("flat", 40)
    pool = LeasedPool(plan)
    alice, bob, again = (LocalLease(pool, name, tenant=name[:3]) for name in ("alice", "bob", "alison"))
    with leased_sequences(plan, alice).new(PROMPT) as sequence:
        sequence.advance()
        sequence.commit()
    assert leased_sequences(plan, bob).new(PROMPT).needs().prefix_tokens == 0
    assert leased_sequences(plan, again).new(PROMPT).needs().prefix_tokens == 96
    assert leased_sequences(plan, bob).new(PROMPT, salt=alice.salt).needs().prefix_tokens == 96
