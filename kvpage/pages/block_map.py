"""The blocks of a pool as a picture of a few thousand cells at most, each of some slabs that follow each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.errors import SpecInvalid
from kvpage.pages.arrays import Arrays, Ints
from kvpage.pages.geometry import Geometry, Places
from kvpage.pages.rings import Flags

MAX_CELLS = 4096
SEVERAL = -1
"""In `BlockMap.owners`: the slabs of the cell belong to more than one group."""


class BlockMap(NamedTuple):
    """By cell; the first begins with slab 0, which is nobody's, the last may have fewer slabs than the others.

    used + cached + free = the blocks into which the cell's owned slabs are cut.
    """

    slabs_per_cell: int
    owners: Ints
    """1 + the group that has slabs of the cell, 0: no group, `SEVERAL`."""
    owned: Ints
    """Slabs of the cell that a group has."""
    used: Ints
    """Blocks that are held."""
    shared: Ints
    """Those of them that are held more than once."""
    cached: Ints
    free: Ints
    most_held: Ints
    """How often the block is held that is held most."""


def map_blocks(arrays: Arrays, max_cells: int) -> BlockMap:
    """Looks at every block once. Raises `SpecInvalid` unless there are to be 1 to `MAX_CELLS` cells."""
    if not 1 <= max_cells <= MAX_CELLS:
        raise SpecInvalid(f"a map of {max_cells} cells is not made; ask for 1 to {MAX_CELLS}")
    geometry = arrays.geometry
    per_cell = -(-geometry.num_slabs // max_cells)
    starts = np.arange(0, geometry.num_slabs, per_cell)
    # Beyond the last slab that somebody had nothing is looked at: a page that is looked at takes memory.
    known = np.flatnonzero(arrays.owners)
    seen = _Seen(geometry, starts, int(known[-1]) + 1 if len(known) else 0)
    refs = seen.slots(arrays.refs)
    is_used = refs != 0
    is_cached = (seen.slots(arrays.stamps) > 0) & ~is_used if arrays.has_content else np.zeros_like(is_used)
    owners = np.where(seen.any_in_slab(is_used | is_cached), arrays.owners[: seen.num_slabs], 0)
    used, cached = seen.count(is_used), seen.count(is_cached)
    blocks = seen.sum(np.array([0, *geometry.blocks_per_slab], np.int32)[owners])
    return BlockMap(
        slabs_per_cell=per_cell,
        owners=seen.owners(owners),
        owned=seen.sum(owners > 0),
        used=used,
        shared=seen.count(refs > 1),
        cached=cached,
        free=blocks - used - cached,
        most_held=seen.reduce(np.maximum, refs, geometry.slots_per_slab),
    )


class _Seen:
    """The slabs that are looked at, from the first on, and the cells in which they lie."""

    def __init__(self, geometry: Geometry, starts: Places, num_slabs: int) -> None:
        """`starts`: the first slab of each cell."""
        self.num_slabs = num_slabs
        self._width, self._num_cells = geometry.slots_per_slab, len(starts)
        self._starts = starts[starts < num_slabs]

    def slots(self, of_all: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return of_all[: self.num_slabs * self._width]

    def any_in_slab(self, of_slots: Flags) -> Flags:
        found = of_slots if self._width == 1 else np.logical_or.reduce(of_slots.reshape(-1, self._width), axis=1)
        return np.asarray(found, np.bool_)

    def count(self, of_slots: Flags) -> Ints:
        return self.reduce(np.add, of_slots, self._width)

    def sum(self, of_slabs: npt.NDArray[Any]) -> Ints:
        return self.reduce(np.add, of_slabs, 1)

    def reduce(self, what: np.ufunc, values: npt.NDArray[Any], width: int) -> Ints:
        """By cell; `width`: so many values lie in a slab."""
        found = np.zeros(self._num_cells, np.int32)
        if len(self._starts):
            found[: len(self._starts)] = what.reduceat(values, self._starts * width, dtype=np.int32)
        return found

    def owners(self, of_slabs: npt.NDArray[np.int16]) -> Ints:
        most = self.reduce(np.maximum, of_slabs, 1)
        least = self.reduce(np.minimum, np.where(of_slabs > 0, of_slabs, np.iinfo(np.int16).max), 1)
        return np.where((most > 0) & (least != most), SEVERAL, most).astype(np.int32)
