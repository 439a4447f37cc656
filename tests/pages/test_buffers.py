"""A block pool's buffer: opened by one process after another, let go of, and refused when it is something else's."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import state_bytes
from kvpage.pages.geometry import Geometry
from support.block_scenarios import GEOMETRIES, Furnished, furnish, open_pool, state_of


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_successor_finds_what_was_held_and_cached(name: str) -> None:
    here = furnish(name)
    again = open_pool(name, here.buffer)
    again.check()
    assert state_of(again) == state_of(here.pool)
    for group, ids in here.held.items():
        again.retain(group, here.cached[group])
        again.free(group, ids)
    again.check()


def test_the_order_of_eviction_outlives_the_process() -> None:
    evicted: list[int] = []
    geometry, buffer = Geometry(9, (1,)), bytearray(state_bytes(Geometry(9, (1,))))
    pool = BlockPool(geometry, buffer)
    ids = pool.allocate(0, 8)
    pool.commit(0, ids)
    pool.free(0, ids[4:])
    pool.free(0, ids[:4])
    again = BlockPool(geometry, buffer, on_evict=lambda _group, gone: evicted.extend(gone.tolist()))
    again.allocate(0, 8)
    assert evicted == [*ids[4:][::-1].tolist(), *ids[:4][::-1].tolist()]


def test_a_slab_with_one_cached_block_can_be_evicted_by_a_successor() -> None:
    geometry = Geometry(3, (2,))
    buffer = bytearray(state_bytes(geometry))
    pool = BlockPool(geometry, buffer)
    ids = pool.allocate(0, 4)
    pool.commit(0, ids[[0, 2]])
    pool.free(0, ids)
    assert pool.counts(0) == (0, 2, 2, 2)
    again = BlockPool(geometry, buffer)
    assert len(again.allocate(0, 4)) == 4
    again.check()


def test_a_closed_pool_lets_go_of_its_buffer_even_after_it_recovered() -> None:
    geometry = GEOMETRIES["mixed"]
    with mmap.mmap(-1, state_bytes(geometry)) as mapped:
        with BlockPool(geometry, mapped) as pool:
            pool.allocate_one(0)
            pool._recover()
        pool.close()
        assert pool.closed
        for call in (pool.allocate_one, pool.available, pool.counts):
            with pytest.raises(Conflict):
                call(0)
        with pytest.raises(Conflict):
            pool.check()
    assert mapped.closed  # closing raises while anybody looks into it


def test_a_pool_that_could_not_recover_does_so_when_it_is_called_again() -> None:
    told: list[int] = []
    buffer = furnish("mixed").buffer
    pool = BlockPool(GEOMETRIES["mixed"], buffer, on_evict=lambda group, _ids: told.append(group))
    assert pool.allocate_all({1: 1})
    assert told
    pool._arrays.log_refs(np.array([4]), 2)  # an operation was under way
    pool._forget()
    assert pool.available(0)
    pool.check()
    assert pool._arrays.refs[4] == 2


@pytest.mark.parametrize("size", [0, 8, -8])
def test_a_buffer_of_another_size_is_refused(size: int) -> None:
    geometry = GEOMETRIES["flat"]
    with pytest.raises(SpecInvalid):
        BlockPool(geometry, bytearray(size and state_bytes(geometry) + size))


def test_a_read_only_buffer_is_refused() -> None:
    with pytest.raises(SpecInvalid):
        BlockPool(GEOMETRIES["flat"], bytes(state_bytes(GEOMETRIES["flat"])))


def test_the_state_of_another_geometry_is_refused() -> None:
    two, turned = Geometry(9, (2, 3)), Geometry(9, (3, 2))
    buffer = bytearray(state_bytes(two))
    BlockPool(two, buffer)
    with pytest.raises(Conflict):
        BlockPool(turned, buffer)


def word(place: int, value: int) -> Callable[[Furnished], None]:
    return lambda here: here.pool._arrays.header.__setitem__(place, value)


def cell(name: str, place: int, value: int) -> Callable[[Furnished], None]:
    return lambda here: getattr(here.pool._arrays, name).__setitem__(place, value)


def same_as_first(here: Furnished) -> tuple[int, int]:
    first, second = here.pool.geometry.slots_of(1, np.array(here.cached[1])).tolist()
    return second, here.pool._arrays.stamps_at[first]


CORRUPT: dict[str, Callable[[Furnished], Any]] = {
    "other magic": word(0, 1),
    "no magic, but blocks": word(0, 0),
    "more slabs": word(1, 10),
    "a long log": word(5, 10_000),
    "a negative log": word(5, -1),
    "a log of no kind": lambda here: (word(5, 1)(here), word(6, 3)(here)),
    "a log of a slot beyond": lambda here: here.pool._arrays.log_refs(np.array([10_000]), 0),
    "a log of a slot twice": lambda here: here.pool._arrays.log_refs(np.array([5, 5]), 0),
    "a log of negative counts": lambda here: here.pool._arrays.log_refs(np.array([5]), -1),
    "a negative owner": cell("owners", 1, -1),
    "an owner too many": cell("owners", 1, 3),
    "no owner": cell("owners", 1, 0),
    "another owner": cell("owners", 1, 2),
    "a negative count": cell("refs", 5, -1),
    "a null block that is held": cell("refs", 0, 1),
    "an owned null block that is held": lambda here: (cell("owners", 0, 1)(here), cell("refs", 0, 1)(here)),
    "a negative stamp": cell("stamps", 5, -1),
    "two uses at one moment": lambda here: cell("stamps", *same_as_first(here))(here),
    "a null block with content": cell("stamps", 0, 1),
    "a block half stale": cell("stale", 1, 2),
}


@pytest.mark.parametrize("fault", CORRUPT)
def test_a_corrupt_state_is_refused_and_left_as_it_is(fault: str) -> None:
    name = "states" if "stale" in fault else "mixed"
    here = furnish(name)
    CORRUPT[fault](here)
    before = bytes(here.buffer)
    with pytest.raises(Conflict):
        open_pool(name, here.buffer)
    assert bytes(here.buffer) == before


def test_random_bytes_are_refused_or_sound(seed: int) -> None:
    """Whatever is in the buffer, a pool that opens is one that adds up."""
    random, geometry = np.random.default_rng(seed), GEOMETRIES["mixed"]
    num_opened = 0
    for _ in range(300):
        here = furnish("mixed")
        buffer = np.frombuffer(here.buffer, np.uint8)
        for place in random.integers(0, len(buffer), random.integers(1, 4)).tolist():
            buffer[place] = random.integers(0, 256)
        try:
            pool = BlockPool(geometry, here.buffer)
        except Conflict:
            continue
        num_opened += 1
        pool.check()
        pool.allocate(0, pool.available(0))
        pool.check()
    assert 0 < num_opened < 300
