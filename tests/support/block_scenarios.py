"""Block pools in which every kind of block is there, and an operation of every kind on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import state_bytes
from kvpage.pages.clearing import NOTHING, Clearing
from kvpage.pages.geometry import Geometry

GEOMETRIES = {
    "flat": Geometry(12, (1,)),
    "flat groups": Geometry(12, (1, 1)),
    "cut": Geometry(8, (3,)),
    "mixed": Geometry(9, (4, 1)),
    "cut twice": Geometry(8, (2, 5)),
    "states": Geometry(11, (1, 4)),
    "cut states": Geometry(8, (3, 2)),
}
CLEARING = {
    "states": Clearing(on_group_change=True, on_reuse=(True, False)),
    "cut states": Clearing(on_group_change=True, on_reuse=(True, True)),
}


class State(NamedTuple):
    held: dict[int, tuple[int, int]]
    """Slot -> the group whose block it is, and how often it is held."""
    content: set[int]
    """Slots with content."""


def state_of(pool: BlockPool) -> State:
    arrays = pool._arrays
    slots = np.flatnonzero(arrays.refs).tolist()
    owners = [arrays.owners_at[slot // pool.geometry.slots_per_slab] - 1 for slot in slots]
    held = {slot: (owner, arrays.refs_at[slot]) for slot, owner in zip(slots, owners, strict=True)}
    return State(held, set(np.flatnonzero(np.asarray(arrays.stamps)).tolist()))


def open_pool(name: str, buffer: Any = None, **more: Any) -> BlockPool:
    return BlockPool(GEOMETRIES[name], buffer, clearing=CLEARING.get(name, NOTHING), **more)


class Furnished(NamedTuple):
    pool: BlockPool
    buffer: Any
    held: dict[int, list[int]]
    """Group -> blocks held once, without content but for the first two; the very first is held twice."""
    cached: dict[int, list[int]]


def furnish(name: str, buffer: Any = None) -> Furnished:
    """Each group holds blocks, some with content, and has cached ones; little is free."""
    geometry = GEOMETRIES[name]
    buffer = bytearray(state_bytes(geometry)) if buffer is None else buffer
    pool = open_pool(name, buffer)
    held, cached = {}, {}
    for group, cut in enumerate(geometry.blocks_per_slab):
        held[group] = pool.allocate(group, cut + 1 if cut > 1 else 3).tolist()
        cached[group] = pool.allocate(group, cut + 1 if cut > 1 else 2).tolist()
        pool.commit(group, held[group][:2] + cached[group])
        pool.retain(group, held[group][:1])
    for group, ids in cached.items():
        pool.free(group, ids)
    return Furnished(pool, buffer, held, cached)


Operation = Callable[[Furnished], object]
OPERATIONS: dict[str, Operation] = {
    "allocate_one": lambda here: here.pool.allocate_one(0),
    "allocate what is free": lambda here: here.pool.allocate(0, 2),
    "allocate everything": lambda here: here.pool.allocate(0, here.pool.available(0)),
    "allocate_all": lambda here: here.pool.allocate_all(dict.fromkeys(reversed(here.held), 2)),
    "allocate_run": lambda here: here.pool.allocate_run(0, 3),
    "retain what is held": lambda here: here.pool.retain(0, here.held[0] + here.held[0][:1]),
    "retain what is cached": lambda here: here.pool.retain(0, here.cached[0]),
    "free_one with content": lambda here: here.pool.free_one(0, here.held[0][1]),
    "free_one without": lambda here: here.pool.free_one(0, here.held[0][2]),
    "free everything": lambda here: here.pool.free(0, here.held[0] + here.held[0][:1]),
    "free one holding of two": lambda here: here.pool.free(0, here.held[0][:1]),
    "commit_one": lambda here: here.pool.commit_one(0, here.held[0][-1]),
    "commit": lambda here: here.pool.commit(0, here.held[0]),
    "drop what is held": lambda here: here.pool.drop(0, here.held[0]),
    "drop what is cached": lambda here: here.pool.drop(0, here.cached[0]),
    "copy_on_write": lambda here: here.pool.copy_on_write(0, here.held[0][0]),
    "copy_on_write of content": lambda here: here.pool.copy_on_write(0, here.held[0][1]),
}
