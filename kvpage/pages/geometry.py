"""How the block ids of a pool are numbered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from kvpage.errors import SpecInvalid
from kvpage.plans import Plan

MAX_SLOTS = 2**31 - 1  # block ids and slots are kept as 32-bit integers
MAX_GROUPS = 2**15 - 2  # the owner of a slab is kept as a 16-bit integer

Places = npt.NDArray[np.intp]
"""Block ids, slots or slabs as NumPy indexes with them; answers are 32-bit."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """`blocks_per_slab[g]`: blocks that group g cuts one of its slabs into. Block id = slab × that + index.

    A slab belongs to one group at a time, so what is kept for a block is kept once for each *slot*: as many to a slab
    as the group has that cuts it finest. Slot = slab × `slots_per_slab` + index. Slab 0 holds the null block of every
    group and is never handed out.
    """

    num_slabs: int
    blocks_per_slab: tuple[int, ...]
    slots_per_slab: int = field(init=False)

    def __post_init__(self) -> None:
        cut = self.blocks_per_slab
        if self.num_slabs < 2 or not cut or min(cut) < 1:
            raise SpecInvalid(
                f"a pool of {self.num_slabs} slabs cut into {list(cut)[:8]} blocks has nothing to hand out; it needs "
                f"two slabs, one of them for the null block, and groups of at least one block a slab"
            )
        if self.num_slabs * max(cut) > MAX_SLOTS or len(cut) > MAX_GROUPS:
            raise SpecInvalid(
                f"{self.num_slabs} slabs of up to {max(cut)} blocks in {len(cut)} groups are more than {MAX_SLOTS} "
                f"blocks or {MAX_GROUPS} groups, which ids reach; use larger slabs or blocks"
            )
        object.__setattr__(self, "slots_per_slab", max(cut))

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Of a plan with at least one group. Raises `SpecInvalid` for one that has no blocks to hand out."""
        return cls(plan.num_blocks, tuple(group.blocks_per_slab for group in plan.groups))

    @property
    def num_slots(self) -> int:
        return self.num_slabs * self.slots_per_slab

    def num_blocks(self, group: int) -> int:
        """Block ids of the group, those of slab 0 counted, which are never handed out."""
        return self.num_slabs * self.blocks_per_slab[group]

    def slots_of(self, group: int, ids: Places) -> Places:
        cut = self.blocks_per_slab[group]
        return ids if cut == self.slots_per_slab else ids + ids // cut * (self.slots_per_slab - cut)

    def ids_at(self, group: int, slots: Places) -> npt.NDArray[np.int32]:
        """The group's block ids in these slots."""
        spare = self.slots_per_slab - self.blocks_per_slab[group]
        return (slots - slots // self.slots_per_slab * spare).astype(np.int32)
