"""The proof that a plan's layout is sound, in closed form: from strides and extents, for any number of blocks.

Each clause is sufficient and, for the layouts that kvpage makes, necessary. A brute-force twin in the tests agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from kvpage.dtypes import item_size_bytes
from kvpage.errors import InternalError
from kvpage.strides import is_nested, span

if TYPE_CHECKING:
    from kvpage.plans import GroupPlan, LayerPlan, Plan, TensorView


MAX_GAP_BYTES = 7  # between two regions, so that the second begins at a multiple of its item size


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of one view: block i lies in [start + i × stride, … + extent) when blocks are outermost.

    Otherwise (K of all blocks before V of all blocks) `stride` is None and the view is one region.
    """

    name: str
    group: int
    blocks_per_slab: int
    start: int
    end: int
    stride: int | None
    extent: int
    pattern: tuple[tuple[int, ...], tuple[int, ...], int]
    """(shape, strides, item size): equal patterns at one start touch the same bytes block for block."""


def check_plan(plan: Plan) -> None:
    """Raises `InternalError` naming the view and the clause it breaks."""
    _check_totals(plan)
    footprints: list[Footprint] = []
    known: dict[_ViewKey, _Pattern] = {}
    for layer in plan.layers.values():
        _check_pages(layer)
        if layer.kv_sharing_target is not None:
            _check_sharing(layer, plan)
        elif layer.group is not None:
            footprints += _check_views(layer, layer.group, plan, known)
    for cluster in _overlapping(footprints):
        _check_cluster(cluster)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise _unsound(message)


def _unsound(message: str) -> InternalError:
    """Where hundreds of layers are looked at, the message is made only when it is needed: that halves the time."""
    return InternalError(f"plan is not sound: {message}; this is a fault in kvpage, please report the request")


def _check_totals(plan: Plan) -> None:
    members = [name for group in plan.groups for name in group.layers]
    expected = [name for name, layer in plan.layers.items() if layer.group is not None]
    _require(sorted(members) == sorted(expected), "groups do not hold each layer with a cache once")
    for index, group in enumerate(plan.groups):
        for name in group.layers:
            if plan.layers[name].group != index:
                raise _unsound(f"layer {name!r} is listed in group {index} but names another")
    _require(plan.slab_bytes == plan.bytes_per_block, "the bytes of a slab are stated as two numbers")
    for index, group in enumerate(plan.groups):
        _check_group(index, group, plan)
    _require(all(name == layer.name for name, layer in plan.layers.items()), "a layer is listed under another name")
    blocks_bytes = plan.num_blocks * plan.bytes_per_block
    gaps = plan.buffer_size_bytes - blocks_bytes
    _require(
        plan.num_blocks >= 1 and 0 <= gaps <= MAX_GAP_BYTES * len(plan.layers),
        f"buffer of {plan.buffer_size_bytes} bytes for {plan.num_blocks} blocks of {plan.bytes_per_block}",
    )


def _check_group(index: int, group: GroupPlan, plan: Plan) -> None:
    """What a group states must be able to be true."""
    sizes = (group.block_size, group.page_size_bytes, group.sliding_window or 1, group.attention_chunk_size or 1)
    if min(sizes) < 1 or group.block_stride_bytes < 0:
        raise _unsound(f"group {index} states sizes below 1: {sizes}")
    blocks = group.blocks_per_slab
    if blocks < 1:
        raise _unsound(f"group {index} has {blocks} blocks in a slab")
    if blocks > 1 and group.layers and group.block_stride_bytes * blocks != plan.slab_bytes:
        raise _unsound(
            f"group {index} cuts slabs of {plan.slab_bytes} bytes into {blocks} blocks of {group.block_stride_bytes}"
        )


def _check_sharing(layer: LayerPlan, plan: Plan) -> None:
    """A layer that reads another's cache has just that layer's tensors."""
    owner = plan.layers.get(layer.kv_sharing_target or "")
    _require(
        owner is not None and owner.kv_sharing_target is None and _cache_of(owner) == _cache_of(layer),
        f"layer {layer.name!r} shares the cache of {layer.kv_sharing_target!r} but differs from it",
    )


def _cache_of(layer: LayerPlan) -> tuple[object, ...]:
    return (layer.group, layer.tensors, layer.kind, layer.block_size, layer.real_page_size_bytes, layer.page_size_bytes)


def _check_pages(layer: LayerPlan) -> None:
    """The page sizes that the plan states are those of the views."""
    real, page = layer.real_page_size_bytes, layer.page_size_bytes
    if (layer.group is None) != (not layer.tensors):
        raise _unsound(f"layer {layer.name!r} has a group or tensors, not both")
    if not 0 <= real <= page:
        raise _unsound(f"layer {layer.name!r} has pages of {page} bytes for {real} of data")
    if layer.page_size_padded not in (None, page):
        raise _unsound(f"layer {layer.name!r} has pages of {page} bytes, padded to others")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What is true of a view wherever it begins."""

    reach: int
    stride: int | None
    extent: int
    block_bytes: int
    """Data of one block, without what lies between."""


_ViewKey = tuple[str, tuple[int, ...], tuple[int, ...], int, int, int]


def _check_views(layer: LayerPlan, group: int, plan: Plan, known: dict[_ViewKey, _Pattern]) -> list[Footprint]:
    """Each view in itself, and all together against the page that they fill. Patterns are proven once: `known`."""
    blocks_per_slab = plan.groups[group].blocks_per_slab
    num_blocks = plan.num_blocks * blocks_per_slab
    footprints: list[Footprint] = []
    held = 0
    for view in layer.tensors:
        name = f"{layer.name}/{view.name}"
        key = (view.dtype, view.shape, view.strides_bytes, view.block_axis, view.kernel_blocks_per_block, num_blocks)
        pattern = known.get(key)
        if pattern is None:
            pattern = known[key] = _check_pattern(name, view, num_blocks)
        footprints.append(_check_place(name, view, (group, blocks_per_slab), pattern, plan.buffer_size_bytes))
        held += pattern.block_bytes
    page, real = layer.page_size_bytes, layer.real_page_size_bytes
    if any(view.stride is not None and view.stride < page for view in footprints):
        raise _unsound(f"layer {layer.name!r} states pages of {page} bytes, more than its blocks are apart")
    if held != real:
        raise _unsound(f"layer {layer.name!r} keeps {held} bytes a block in its views, {real} in its page")
    if blocks_per_slab > 1:
        _check_in_slab(footprints, plan.slab_bytes)
    return footprints


def _check_in_slab(views: Iterable[Footprint], slab_bytes: int) -> None:
    """Blocks i × q to i × q + q - 1 of a group that cuts slabs into q blocks lie in slab i."""
    for view in views:
        stride, blocks = view.stride or 0, view.blocks_per_slab
        _require(
            stride * blocks == slab_bytes,
            f"view {view.name} steps by {view.stride} bytes, {blocks} blocks in a slab of {slab_bytes}",
        )
        end = view.start + (blocks - 1) * stride + view.extent
        _require(end <= slab_bytes, f"view {view.name} reaches to {end} in its first slab of {slab_bytes} bytes")


def _check_place(
    name: str, view: TensorView, of: tuple[int, int], pattern: _Pattern, buffer_size_bytes: int
) -> Footprint:
    """`of`: the view's group, and the blocks that this cuts a slab into."""
    group, blocks_per_slab = of
    start, end = view.offset_bytes, view.offset_bytes + pattern.reach
    item = item_size_bytes(view.dtype)
    if start % item:
        raise _unsound(f"view {name} has offset {start}, not a multiple of {item}")
    if start < 0 or end > buffer_size_bytes:
        raise _unsound(f"view {name} reaches from {start} to {end}, outside the buffer of {buffer_size_bytes} bytes")
    return Footprint(
        name=name,
        group=group,
        blocks_per_slab=blocks_per_slab,
        start=start,
        end=end,
        stride=pattern.stride,
        extent=pattern.extent,
        pattern=(view.shape, view.strides_bytes, item),
    )


def _check_pattern(name: str, view: TensorView, num_blocks: int) -> _Pattern:
    item = item_size_bytes(view.dtype)
    rank = len(view.shape)
    _require(rank == len(view.strides_bytes) and 0 <= view.block_axis < rank, f"view {name} has ranks that differ")
    _require(min(view.shape) >= 1, f"view {name} has an empty axis: {view.shape}")
    _require(
        all(stride > 0 and stride % item == 0 for stride in view.strides_bytes),
        f"view {name} has strides {view.strides_bytes} that are not positive multiples of its item size {item}",
    )
    parts = view.kernel_blocks_per_block
    _require(
        parts >= 1 and view.shape[view.block_axis] == num_blocks * parts,
        f"view {name} does not have {num_blocks} blocks of {parts} kernel blocks",
    )
    _require(is_nested(view.shape, view.strides_bytes, item), f"view {name} reaches one address by two index tuples")
    stride = view.strides_bytes[view.block_axis]
    extent = span(_without(view.shape, view.block_axis), _without(view.strides_bytes, view.block_axis), item)
    return _Pattern(
        reach=span(view.shape, view.strides_bytes, item),
        stride=stride * parts if extent <= stride else None,
        extent=extent + (parts - 1) * stride,
        block_bytes=prod(_without(view.shape, view.block_axis)) * parts * item,
    )


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]


def _overlapping(footprints: Iterable[Footprint]) -> Iterator[list[Footprint]]:
    """Sets of views whose regions touch, found by one sweep over the buffer."""
    cluster: list[Footprint] = []
    end = 0
    for footprint in sorted(footprints, key=lambda f: (f.start, f.end)):
        if cluster and footprint.start >= end:
            yield cluster
            cluster = []
        cluster.append(footprint)
        end = max(end, footprint.end) if len(cluster) > 1 else footprint.end
    if cluster:
        yield cluster


def _check_cluster(cluster: list[Footprint]) -> None:
    """Views over the same memory: of one group they share no byte; of different groups only at equal block ids."""
    if len(cluster) == 1:
        return
    first = cluster[0]
    names = f"{first.name} and {cluster[-1].name}"
    if all(view.pattern == first.pattern and view.group == first.group for view in cluster):
        _check_interleaved(cluster, names)
        return
    if any(view.stride is None for view in cluster):
        _require(
            all(view.start == first.start and view.pattern == first.pattern for view in cluster),
            f"views {names} share memory, keep K and V of all blocks apart, and differ in layout",
        )
        _require(len({view.group for view in cluster}) == len(cluster), f"views {names} of one group share bytes")
        return
    slabs = {(view.stride or 0) * view.blocks_per_slab for view in cluster}
    _require(len(slabs) == 1, f"views {names} share memory but step over slabs by different strides {sorted(slabs)}")
    end = max(view.start + (view.blocks_per_slab - 1) * (view.stride or 0) + view.extent for view in cluster)
    _require(
        end - first.start <= slabs.pop(), f"views {names} share memory, and slab i of one meets slab i + 1 of the other"
    )
    by_group: dict[int, list[Footprint]] = {}
    for view in cluster:
        by_group.setdefault(view.group, []).append(view)
    for views in by_group.values():
        _check_side_by_side(views)


def _check_interleaved(views: list[Footprint], names: str) -> None:
    """Like views of one group at even distances are one view with an axis more, and that must not meet itself."""
    steps = {right.start - left.start for left, right in pairwise(views)}
    _require(len(steps) == 1, f"views {names} of one group lie over each other at uneven distances {sorted(steps)}")
    shape, strides, item = views[0].pattern
    _require(is_nested((len(views), *shape), (steps.pop(), *strides), item), f"views {names} of one group share bytes")


def _check_side_by_side(views: list[Footprint]) -> None:
    """Of one group, sorted by start: none reaches into the next. That none reaches into the next block is known: all
    lie in one slab, or, where that is cut into blocks, in the first of them."""
    for left, right in pairwise(views):
        _require(
            left.start + left.extent <= right.start, f"views {left.name} and {right.name} of one group share bytes"
        )
