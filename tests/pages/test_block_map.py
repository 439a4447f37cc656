"""A map of a pool's blocks is what counting them one by one says, however many cells it is drawn together to."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpage.errors import SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.block_map import MAX_CELLS, SEVERAL
from kvpage.pages.geometry import Geometry


def counted(pool: BlockPool, max_cells: int) -> list[tuple[int, ...]]:
    """The map by the plainest means: every block is asked for, one by one."""
    geometry = pool.geometry
    per_cell = -(-geometry.num_slabs // max_cells)
    owner_of = {slab: group for group in range(2) for slab in pool.slabs(group).slabs.tolist()}
    cells: list[tuple[int, ...]] = []
    for start in range(0, geometry.num_slabs, per_cell):
        owned = [slab for slab in range(start, min(start + per_cell, geometry.num_slabs)) if slab in owner_of]
        times, cached, num_blocks = [0], 0, 0
        for slab in owned:
            group, cut = owner_of[slab], geometry.blocks_per_slab[owner_of[slab]]
            ids = np.arange(slab * cut, (slab + 1) * cut)
            held = pool.times_held(group, ids).tolist()
            times += held
            keeping = set(pool.with_content(group).tolist())
            cached += sum(not often and block in keeping for block, often in zip(ids.tolist(), held, strict=True))
            num_blocks += cut
        owners = {owner_of[slab] + 1 for slab in owned}
        owner = 0 if not owners else owners.pop() if len(owners) == 1 else SEVERAL
        used, shared = sum(often > 0 for often in times), sum(often > 1 for often in times)
        cells.append((owner, len(owned), used, shared, cached, num_blocks - used - cached, max(times)))
    return cells


def mapped(pool: BlockPool, max_cells: int) -> list[tuple[int, ...]]:
    drawn = pool.map(max_cells)
    return list(zip(*(values.tolist() for values in drawn[1:]), strict=True))


@pytest.mark.parametrize("cuts", [(1, 1), (3, 1), (2, 5)])
def test_a_map_is_what_asking_for_every_block_says(cuts: tuple[int, int], seed: int) -> None:
    generator = random.Random(seed)
    pool = BlockPool(Geometry(23, cuts))
    held: list[tuple[int, int]] = []
    for _ in range(60):
        group = generator.randrange(2)
        if generator.random() < 0.6 and pool.available(group):
            [block] = pool.allocate(group, 1).tolist()
            held.append((group, block))
            if generator.random() < 0.4:
                pool.commit(group, [block])
        elif held:
            group, block = held[generator.randrange(len(held))]
            if generator.random() < 0.4:
                pool.retain(group, [block])
                held.append((group, block))
            else:
                held.remove((group, block))
                pool.free(group, [block])
        for max_cells in (1, 4, 22, 23, 1000):
            assert mapped(pool, max_cells) == counted(pool, max_cells)


def test_a_pool_that_nobody_used_is_empty() -> None:
    drawn = BlockPool(Geometry(100, (4,))).map(8)
    assert drawn.slabs_per_cell == 13
    assert [values.tolist() for values in drawn[1:]] == [[0] * 8] * 7


@pytest.mark.parametrize("max_cells", [0, -1, MAX_CELLS + 1])
def test_a_map_has_a_bounded_number_of_cells(max_cells: int) -> None:
    with pytest.raises(SpecInvalid, match=str(MAX_CELLS)):
        BlockPool(Geometry(4, (1,))).map(max_cells)
