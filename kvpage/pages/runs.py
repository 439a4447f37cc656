"""Runs of blocks that follow each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.pages.arrays import Arrays
from kvpage.pages.census import take_census


class Run(NamedTuple):
    first: int | None
    """None: no run is long enough."""
    longest: int
    """Blocks of the longest run there is, evicting allowed."""


def find_run(arrays: Arrays, group: int, count: int) -> Run:
    """The lowest run of `count` blocks without content, else the lowest of blocks that the group could have."""
    geometry, census = arrays.geometry, take_census(arrays)
    num_slabs, cut = geometry.num_slabs, geometry.blocks_per_slab[group]
    is_mine = census.owners == group + 1
    is_free, is_idle = census.owners == 0, (census.used == 0) & (census.cached > 0)
    is_free[0] = False
    refs = arrays.refs.reshape(num_slabs, -1)[:, :cut]
    unheld = ((is_free | is_idle)[:, None] | (is_mine[:, None] & (refs == 0))).ravel()
    if arrays.has_content:
        bare = arrays.stamps.reshape(num_slabs, -1)[:, :cut] == 0
        clean = unheld & (is_free[:, None] | (is_mine[:, None] & bare)).ravel()
    else:
        clean = unheld
    first, _ = _first_run(clean, count)
    if first is not None:
        return Run(first, count)
    return Run(*_first_run(unheld, count))


def _first_run(usable: npt.NDArray[np.bool_], count: int) -> tuple[int | None, int]:
    """Where the first run of `count` begins, and how long the longest is."""
    gaps = np.concatenate([[-1], np.flatnonzero(~usable), [len(usable)]])
    lengths = np.diff(gaps) - 1
    long_enough = np.flatnonzero(lengths >= count)
    return (int(gaps[long_enough[0]]) + 1 if len(long_enough) else None), int(lengths.max())
