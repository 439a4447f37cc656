"""The bytes of one block of one tensor: where they begin, and in which contiguous runs they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from kvpage.dtypes import item_size_bytes
from kvpage.plans import TensorView
from kvpage.strides import joined

MAX_RUNS = 64  # of one tensor; more are drawn as one


@dataclass(frozen=True, slots=True)
class Run:
    """`count` like runs of bytes that are drawn as one; mostly 1."""

    start: int
    size_bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Block 0 of a tensor. Axes outside the block axis (K of all blocks before V of all blocks) give several planes."""

    stride_bytes: int
    """From block to block."""
    planes: tuple[Run, ...]
    """Where the tensor's blocks begin, from the start of the buffer; the size is `stride_bytes` for each."""
    runs: tuple[Run, ...]
    """Data inside a block, from the start of its plane."""

    @property
    def num_planes(self) -> int:
        return sum(plane.count for plane in self.planes)


def block_runs(view: TensorView) -> BlockRuns:
    """Where block 0 of `view` lies."""
    step = view.strides_bytes[view.block_axis]
    stride = step * view.kernel_blocks_per_block
    others = [
        (axis_stride, extent)
        for axis, (extent, axis_stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True))
        if axis != view.block_axis and extent > 1
    ]
    outside = [axis for axis in others if axis[0] >= stride]
    inside = [axis for axis in others if axis[0] < stride]
    if view.kernel_blocks_per_block > 1:
        inside.append((step, view.kernel_blocks_per_block))
    size, outer = joined(inside, item_size_bytes(view.dtype))
    planes = tuple(
        Run(view.offset_bytes + run.start, run.count * stride, run.count) for run in _spread(outside, size_bytes=1)
    )
    return BlockRuns(stride_bytes=stride, planes=planes, runs=tuple(_spread(outer, size_bytes=size)))


def _spread(axes: Sequence[tuple[int, int]], *, size_bytes: int) -> list[Run]:
    """A run at every index of `axes`, or one for all of them where they are many."""
    count = prod(extent for _, extent in axes)
    if count > MAX_RUNS:
        return [Run(0, count * size_bytes, count)]
    steps = product(*(range(0, stride * extent, stride) for stride, extent in axes))
    return sorted((Run(sum(step), size_bytes) for step in steps), key=lambda run: run.start)
