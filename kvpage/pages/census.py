"""What the arrays say, slab by slab: counted when a pool is opened, after an operation failed, and by `check()`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage.pages.arrays import Arrays, Ints, Stamps


@dataclass(frozen=True, slots=True)
class Census:
    """By slab."""

    owners: npt.NDArray[np.int16]
    """1 + the group that owns it; 0: the slab is free, or the null block's."""
    used: Ints
    """Blocks that are held."""
    cached: Ints
    """Blocks that are not held and keep content."""
    last_use: Stamps
    """The largest stamp of a cached block."""


def take_census(arrays: Arrays) -> Census:
    num_slabs = arrays.geometry.num_slabs
    nothing = np.zeros(num_slabs, np.int32)
    if arrays.is_new:
        return Census(np.zeros(num_slabs, np.int16), nothing, nothing, np.zeros(num_slabs, np.int64))
    refs = arrays.refs.reshape(num_slabs, -1)
    used = np.count_nonzero(refs, axis=1).astype(np.int32)
    cached, last_use = nothing, np.zeros(num_slabs, np.int64)
    if arrays.has_content:
        stamps = np.where(refs == 0, arrays.stamps.reshape(num_slabs, -1), 0)
        cached, last_use = np.count_nonzero(stamps, axis=1).astype(np.int32), stamps.max(axis=1)
    return Census(np.where(used + cached > 0, arrays.owners, np.int16(0)), used, cached, last_use)


def fault_of(arrays: Arrays, held: Ints | None = None) -> str | None:
    """Why the arrays cannot be the state of a pool, or None. Whatever kill -9 leaves has no fault.

    `held`: how often each block is held in truth, which the arrays need not say yet.
    """
    geometry = arrays.geometry
    fault = arrays.log_fault()
    if fault:
        return fault
    owners, stale, counts = arrays.owners, arrays.stale, arrays.refs if held is None else held
    refs = counts.reshape(geometry.num_slabs, -1)
    if owners.min() < 0 or owners.max() > len(geometry.blocks_per_slab):
        return f"a slab belongs to group {int(max(owners.max(), -owners.min())) - 1}, which does not exist"
    if arrays.clearing and (stale.min() < 0 or stale.max() > 1):
        return "a block is neither stale nor clean"
    if refs.min() < 0:
        return f"block slot {int(counts.argmin())} is held {int(refs.min())} times"
    stamps = arrays.stamps.reshape(geometry.num_slabs, -1) if arrays.has_content else None
    if stamps is not None and stamps.min() < 0:
        return f"block slot {int(arrays.stamps.argmin())} was last used at {int(stamps.min())}"
    idle = (refs == 0) & (arrays.refs.reshape(refs.shape) == 0)  # others are given a use of their own
    cached = stamps[idle & (stamps > 0)] if stamps is not None else np.empty(0, np.int64)
    if len(np.unique(cached)) < len(cached):
        return "two blocks were last used at the same moment"
    widths = np.array([0, *geometry.blocks_per_slab])[owners]
    outside = np.arange(geometry.slots_per_slab) >= widths[:, None]
    outside[0] = True
    if refs[outside].any() or (stamps is not None and stamps[outside].any()):
        return (
            "something is held or kept where no group has a block: in slab 0, in a slab of nobody, or beyond its blocks"
        )
    return None
