"""Where a plan's bytes lie, as lists of regions: for what registers memory and moves blocks by address.

A plan alone gives offsets into its buffer; with the address of a mapped buffer they are addresses. Nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from kvpage.dtypes import item_size_bytes
from kvpage.errors import LayoutUnsupported, NotFound, SpecInvalid, shorten
from kvpage.pages.batches import Ids, block_ids, whole_number
from kvpage.plans import Plan, TensorView
from kvpage.strides import joined

MAX_RUNS = 4096  # of a block in one layer; the layouts of engines have at most one for each token and head


class Region(NamedTuple):
    """Bytes from `start` on: an offset into the buffer, or an address."""

    start: int
    length_bytes: int

    @property
    def end(self) -> int:
        """Just past the last byte."""
        return self.start + self.length_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes that follow each other in every block of a layer: those of block i are at start + i × stride_bytes."""

    start: int
    """Of block 0."""
    stride_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRegions:
    """What a layer keeps, without padding."""

    layer: str
    group: int
    num_blocks: int
    """Block ids of the group: 0, the null block, to below this."""
    runs: tuple[Run, ...]
    """By where they begin. One in most layouts; one for each KV head where heads lie outside of blocks or layers."""

    def of_block(self, block_id: int) -> tuple[Region, ...]:
        """The bytes of one block. Raises `SpecInvalid` for an id that is none of the group's."""
        if whole_number(block_id, "a block id") >= self.num_blocks:
            raise SpecInvalid(f"block {block_id} is none of the group's, which are 0 to {self.num_blocks - 1}")
        return tuple(Region(run.start + block_id * run.stride_bytes, run.length_bytes) for run in self.runs)

    def __iter__(self) -> Iterator[tuple[Region, ...]]:
        """Block by block, the null block first."""
        return map(self.of_block, range(self.num_blocks))


class BufferRegions:
    """The regions of one buffer. `base`: the address of its first byte; 0 makes all of them offsets.

    Addresses are good as long as the memory is mapped. Layers that share a cache have the same regions.
    """

    def __init__(self, plan: Plan, *, base: int = 0) -> None:
        """Raises `LayoutUnsupported` for a layer whose blocks lie in more than 4,096 pieces, `SpecInvalid` for a plan
        that reaches out of its buffer and for a negative base.
        """
        if base < 0:
            raise SpecInvalid(f"the base is {base}; it must be the address of the buffer, or 0 for offsets")
        self.whole = Region(base, plan.buffer_size_bytes)
        """The buffer: padding, null block and all. Registering this once is enough for every block."""
        self.layers: Mapping[str, LayerRegions] = MappingProxyType(dict(self._layers(plan, base)))
        """By name, in plan order; layers without a cache are left out."""
        self._by_group = [
            [layer for layer in self.layers.values() if layer.group == group] for group in range(len(plan.groups))
        ]

    def _layers(self, plan: Plan, base: int) -> Iterator[tuple[str, LayerRegions]]:
        for name, layer in plan.layers.items():
            if layer.group is None or not layer.tensors:
                continue
            num_blocks = plan.num_blocks * plan.groups[layer.group].blocks_per_slab
            runs = _merged_runs(run for view in layer.tensors for run in _runs(name, view, base))
            for run in runs:
                last = Region(run.start + (num_blocks - 1) * run.stride_bytes, run.length_bytes)
                if run.start < self.whole.start or last.end > self.whole.end:
                    raise SpecInvalid(
                        f"layer {shorten(name)!r} reaches from byte {run.start - base} to {last.end - base} of a buffer"
                        f" of {plan.buffer_size_bytes} bytes"
                    )
            yield name, LayerRegions(layer=name, group=layer.group, num_blocks=num_blocks, runs=runs)

    def layer(self, name: str) -> LayerRegions:
        """Raises `NotFound` for a layer that the plan does not have, or that keeps no cache."""
        found = self.layers.get(name)
        if found is None:
            raise NotFound(f"there is no layer {shorten(name)!r} with a cache; there are {len(self.layers)}")
        return found

    def of_blocks(self, group: int, ids: Ids) -> tuple[Region, ...]:
        """All that these blocks keep in the layers of their group: as few regions as there can be, sorted.

        Raises `SpecInvalid` for a group or an id that there is not.
        """
        if not 0 <= group < len(self._by_group):
            raise SpecInvalid(f"there is no group {group}; the groups are 0 to {len(self._by_group) - 1}")
        layers = self._by_group[group]
        return merged(
            region for layer in layers for block in block_ids(ids).tolist() for region in layer.of_block(block)
        )


def merged(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The same bytes in as few regions as there can be, sorted; those that touch or overlap become one."""
    found: list[Region] = []
    for region in sorted(region for region in regions if region.length_bytes):
        if found and region.start <= found[-1].end:
            start = found[-1].start
            found[-1] = Region(start, max(found[-1].end, region.end) - start)
        else:
            found.append(region)
    return tuple(found)


def _runs(layer: str, view: TensorView, base: int) -> Iterator[Run]:
    """What the blocks of a view have in common: where its bytes lie in each of them."""
    parts, step = view.kernel_blocks_per_block, view.strides_bytes[view.block_axis]
    axes = [
        (stride, extent)
        for axis, (extent, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True))
        if axis != view.block_axis and extent > 1
    ]
    if parts > 1:
        axes.append((step, parts))
    length_bytes, outer = joined(axes, item_size_bytes(view.dtype))
    count = prod(extent for _, extent in outer)
    if count > MAX_RUNS:
        raise LayoutUnsupported(
            f"a block of layer {shorten(layer)!r} lies in {count} pieces of {length_bytes} bytes; at most {MAX_RUNS}"
            f" are listed, so use a layout that keeps more of a block together"
        )
    for steps in product(*(range(0, stride * extent, stride) for stride, extent in outer)):
        start = base + view.offset_bytes + sum(steps)
        yield Run(start=start, stride_bytes=step * parts, length_bytes=length_bytes)


def _merged_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbours in every block become one: tensors of a state, say."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        before = found[-1] if found else None
        if (
            before is not None
            and before.start + before.length_bytes == run.start
            and before.stride_bytes == run.stride_bytes
        ):
            length_bytes = before.length_bytes + run.length_bytes
            found[-1] = Run(start=before.start, stride_bytes=run.stride_bytes, length_bytes=length_bytes)
        else:
            found.append(run)
    return tuple(found)
