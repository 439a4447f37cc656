"""A process that takes steps with two leases of a pool in shared memory, and is killed there.

lease_churn.py PLAN SEED DESCRIPTOR    tells, before each step: what the leases hold (by name and group, each block as
                                       often as it is held), the key of the step, and how it changes that
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from random import Random

from kvpage.errors import NotFound, OutOfBlocks
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease
from kvpage.pages.steps import Content, Step
from support.leased_pools import content, held_of, num_held, plan_of
from support.leased_scenarios import NUM_SLABS, TOKEN


def leased(pool: LeasedPool, name: str) -> Lease:
    try:
        return pool.adopt(name, TOKEN)
    except NotFound:
        return pool.open(name, token=TOKEN).lease


def step_of(random: Random, pool: LeasedPool, mine: Lease, other: Lease, key: int) -> tuple[Step, dict[int, int]]:
    """And how much more the lease holds of each group afterwards."""
    held, theirs = held_of(pool, mine), held_of(pool, other)
    groups = range(len(pool.block_bytes))
    retain, free, allocate = {}, {}, {}
    for group in groups:
        known = sorted(theirs.get(group, {}))
        retain[group] = random.sample(known, min(len(known), random.randrange(3)))
        blocks = [block for block, times in held.get(group, {}).items() for _ in range(times)]
        free[group] = random.sample(blocks, random.randint(0, len(blocks)))
        allocate[group] = random.randrange(4)
    group = random.choice(groups)
    new = [block for block in held.get(group, {}) if pool.index.hash_of(group, block) is None]
    commit = {group: Content(new, [content(random.getrandbits(60) + 1) for _ in new])} if new else {}
    changes = {group: len(retain[group]) + allocate[group] - len(free[group]) for group in groups}
    return Step(key=key, commit=commit, retain=retain, free=free, allocate=allocate), changes


def main() -> None:
    name, seed, descriptor = sys.argv[1:]
    random = Random(int(seed))
    pool = LeasedPool(plan_of(name, NUM_SLABS), mmap.mmap(int(descriptor), 0))
    leases = [leased(pool, which) for which in ("one", "other")]
    while True:
        random.shuffle(leases)
        key = random.getrandbits(60) + 1
        step, changes = step_of(random, pool, leases[0], leases[1], key)
        counted = {lease.record.name: num_held(held_of(pool, lease)) for lease in leases}
        os.write(1, (json.dumps([counted, key, {leases[0].record.name: changes}]) + "\n").encode())
        try:
            pool.do(leases[0], step)
        except OutOfBlocks:
            continue


if __name__ == "__main__":
    main()
