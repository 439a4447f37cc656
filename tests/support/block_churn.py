"""A process that works on a block pool in shared memory, and dies there.

block_churn.py die GEOMETRY OPERATION NUMBER DESCRIPTOR    kills itself where the NUMBER-th snapshot is taken
block_churn.py churn GEOMETRY SEED DESCRIPTOR              does random operations, telling each before it begins it,
                                                              and lingers amid them where SEED is odd
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from random import Random
from typing import Any

from kvpage.pages.allocator import BlockPool
from support.block_scenarios import OPERATIONS, furnish, open_pool, state_of
from support.watched_stores import watch


def die(geometry: str, operation: str, number: int, buffer: mmap.mmap) -> None:
    here = furnish(geometry, buffer)
    left = number
    is_watching = False

    def on_store(store: Callable[[bool], None]) -> None:
        nonlocal left
        for half in (True, False):
            if is_watching and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= is_watching
            store(half)

    watch(here.pool, on_store)
    is_watching = True
    OPERATIONS[operation](here)


def churn(geometry: str, seed: int, buffer: mmap.mmap) -> None:
    random, pool = Random(seed), open_pool(geometry, buffer)
    if seed % 2:
        watch(pool, lingering)  # or most kills would come while it tells
    while True:
        group = random.randrange(len(pool.geometry.blocks_per_slab))
        wanted, work = next_operation(random, pool, group)
        held = {str(slot): count for slot, (_, count) in state_of(pool).held.items()}
        os.write(1, (json.dumps([held, wanted]) + "\n").encode())
        work()


def lingering(store: Callable[[bool], None]) -> None:
    """A store that takes long, and half of it too."""
    for half in (True, False):
        store(half)
        for _ in range(5_000):
            pass


def next_operation(random: Random, pool: BlockPool, group: int) -> tuple[dict[str, Any], Callable[[], object]]:
    """What it will do, told beforehand, and the doing."""
    cut, per_slab = pool.geometry.blocks_per_slab[group], pool.geometry.slots_per_slab
    mine = [slot for slot, (owner, _) in state_of(pool).held.items() if owner == group]
    chosen = random.sample(mine, random.randint(0, len(mine)))
    ids = [slot // per_slab * cut + slot % per_slab for slot in chosen]
    available = pool.available(group)
    if available and (not ids or random.random() < 0.4):
        count = random.randint(1, available)
        if count == 1:
            return {"kind": "take", "count": 1}, lambda: pool.allocate_one(group)
        return {"kind": "take", "count": count}, lambda: pool.allocate(group, count)
    kind = random.choice(["free", "free", "free_one", "retain", "commit", "drop"])
    if kind == "free_one" and ids:
        return {"kind": kind, "changes": {str(chosen[0]): -1}}, lambda: pool.free_one(group, ids[0])
    change = {"free": -1, "retain": 1}.get(kind, 0)
    changes = {str(slot): change for slot in chosen if change}
    call = getattr(pool, kind if kind != "free_one" else "free")
    return {"kind": kind, "changes": changes}, lambda: call(group, ids)


def main() -> None:
    what, geometry, *more, descriptor = sys.argv[1:]
    buffer = mmap.mmap(int(descriptor), 0)
    if what == "die":
        die(geometry, more[0], int(more[1]), buffer)
    else:
        churn(geometry, int(more[0]), buffer)


main()
