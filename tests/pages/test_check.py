"""`check()` sees everything that can be wrong with a block pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpage.errors import InternalError
from kvpage.pages.conservation import _faults
from support.block_scenarios import GEOMETRIES, furnish


def add(held: Any, name: str, number: int) -> None:
    setattr(held, name, getattr(held, name) + number)


def set_at(array: Any, place: Any, value: int) -> None:
    array[place] = value


STALE = "neither stale nor clean"

# What is wrong -> how it is made so. The pool is "mixed" (group 0 cuts its slabs in 4, group 1 has blocks of a slab);
# for what only a pool that clears can have, "states".
DOCTORED: dict[str, Callable[[Any], object]] = {
    "an operation on 1 blocks is under way": lambda pool: pool._arrays.log_refs([5], 0),
    "the log holds 1000 blocks": lambda pool: set_at(pool._arrays.header, 5, 1000),
    "the log names blocks that do not exist": lambda pool: pool._arrays.log_refs([5, 5], 0),
    "a slab belongs to group 6": lambda pool: set_at(pool._arrays.owners, 1, 7),
    STALE: lambda pool: set_at(pool._arrays.stale, 1, 2),
    "is held -1 times": lambda pool: set_at(pool._arrays.refs, 4, -1),
    "at the same moment": lambda pool: set_at(pool._arrays.stamps, slice(8, 12), 77),
    "was last used at -1": lambda pool: set_at(pool._arrays.stamps, 4, -1),
    "where no group has a block: in slab 0": lambda pool: set_at(pool._arrays.refs, 1, 1),
    "in a slab of nobody": lambda pool: set_at(pool._arrays.owners, 1, 0),
    "or beyond its blocks": lambda pool: set_at(pool._arrays.refs, pool.slabs(1).slabs[0] * 4 + 1, 1),
    "the free slabs are not those": lambda pool: pool._ledger.free.pop(1),
    "the idle slabs are not those": lambda pool: add(pool._ledger, "num_idle", 1),
    "the queue of idle slabs": lambda pool: pool._ledger.idle.skip(),
    "since before its last use": lambda pool: add(pool._ledger, "clock", -1),
    "group 0 counts": lambda pool: add(pool._groups[0], "used", 1),
    "group 1 counts": lambda pool: add(pool._groups[1], "cached", 1),
    "in slabs of 5": lambda pool: setattr(pool._groups[0], "blocks_per_slab", 5),
    "slabs owned + ": lambda pool: add(pool._groups[0], "num_idle", 1),
    "the counts of a slab": lambda pool: set_at(pool._groups[0].used_by_slab, 1, 2),
    "a slab with room is not where": lambda pool: pool._groups[0].roomy.clear(),
    "a slab with room is not where it is looked": lambda pool: pool._groups[0].roomy_idle.clear(),
    "would be handed out": lambda pool: next(iter(pool._groups[0].room.values())).append(0),
    "the queue of cached blocks": lambda pool: pool._groups[0].oldest.skip(),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_sound_pool_passes(geometry: str) -> None:
    furnish(geometry).pool.check()


@pytest.mark.parametrize("fault", DOCTORED)
def test_each_thing_that_can_be_wrong_is_seen(fault: str) -> None:
    here = furnish("states" if fault == STALE else "mixed")
    here.pool.free(0, here.held[0][2:4])  # room in a slab in use
    here.pool.allocate_one(0)
    here.pool.check()
    DOCTORED[fault](here.pool)
    faults = [str(error) for error in all_faults(here.pool)]
    assert [text for text in faults if fault in text], faults
    with pytest.raises(InternalError):
        here.pool.check()


def all_faults(pool: Any) -> list[str]:
    return list(_faults(pool._arrays, pool._ledger, tuple(pool._groups.values())))
