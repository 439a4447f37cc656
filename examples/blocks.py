"""Blocks of a plan, in this process: no server, no torch, only NumPy."""

import json
import mmap
import os
from pathlib import Path

import kvpage
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import state_bytes
from kvpage.pages.geometry import Geometry

request = json.loads(Path(__file__).with_name("mimo.json").read_text())
plan = kvpage.plan({**request, "strategy": "nested", "allocator": "slabs"})
geometry = Geometry.of(plan)
print(f"{geometry.num_slabs} slabs; groups cut them into {list(geometry.blocks_per_slab)} blocks")

# The state lies in a buffer that outlives the pool, and a process that is killed.
descriptor = os.memfd_create("blocks")
os.ftruncate(descriptor, state_bytes(geometry))
buffer = mmap.mmap(descriptor, 0)
with BlockPool(geometry, buffer) as pool:
    # A request takes what each group needs: all of it, or nothing.
    tables = pool.allocate_all(dict.fromkeys(range(len(plan.groups)), 4))
    try:
        pool.allocate_all({0: 1, 1: 10**9})
    except kvpage.KvpageError as error:
        print(f"{error.code}: wanted {error.details['wanted']}, available {error.details['available']}")
    # Its first two blocks of each group are full: what they hold is worth keeping when the request is done.
    for group, ids in tables.items():
        pool.commit(group, ids[:2])
        pool.free(group, ids)
    print(f"done: {pool.counts(0).used} used, {pool.counts(0).cached} cached")

with BlockPool(geometry, buffer) as pool:  # as another process would
    pool.check()
    pool.retain(0, tables[0][:2])  # the next request begins with the same tokens
    print(f"found again: {pool.counts(0).used} used, {pool.counts(0).cached} cached")
buffer.close()
os.close(descriptor)
