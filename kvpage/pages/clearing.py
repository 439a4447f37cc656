"""Which blocks must be cleared before they are used: those in which bits of somebody else can hurt.

A state is read before it is first written, and must be zeros then. Bits of one dtype, read as another, may be no
number, and no number is still none when attention gives it a weight of 0. Numbers of the same dtype hurt nobody.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

from kvpage.dtypes import item_size_bytes
from kvpage.plans import LayerPlan, Plan, TensorView


@dataclass(frozen=True, slots=True)
class Clearing:
    on_group_change: bool
    """A block is cleared when it is handed out of a slab whose bytes were another group's."""
    on_reuse: tuple[bool, ...]
    """By group: a block is cleared whenever somebody had it before. Empty: in no group."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Recurrent states are cleared each time; other blocks where groups keep bits of different kinds."""
        kinds = {
            _kind(layer, view) for layer in plan.layers.values() if layer.group is not None for view in layer.tensors
        }
        on_reuse = tuple(group.kind == "mamba" for group in plan.groups)
        return cls(len(plan.groups) > 1 and (len(kinds) > 1 or any(on_reuse)), on_reuse)

    def __bool__(self) -> bool:
        """Whether anything is ever cleared."""
        return self.on_group_change or any(self.on_reuse)

    def is_on_reuse(self, group: int) -> bool:
        return bool(self.on_reuse) and self.on_reuse[group]


NOTHING = Clearing(on_group_change=False, on_reuse=())


def _kind(layer: LayerPlan, view: TensorView) -> Hashable:
    """Tensors of one kind may keep each other's bits.

    A plan does not say whether single bytes are numbers, or packed ones with scales among them. Those are of one kind
    only where every byte of a page means the same.
    """
    if item_size_bytes(view.dtype) > 1:
        return view.dtype
    axis = view.block_axis
    page = tuple(values[:axis] + values[axis + 1 :] for values in (view.shape, view.strides_bytes))
    return view.dtype, layer.backend, page, view.strides_bytes[axis], view.kernel_blocks_per_block
