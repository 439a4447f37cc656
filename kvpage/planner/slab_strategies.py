"""Strategies `slab` and `nested`: a search over the buckets of a request, and layouts beside the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvpage.errors import CannotUnify, LayoutUnsupported
from kvpage.layers import Layer, check_layouts
from kvpage.planner.arrangement import arrange
from kvpage.planner.groups import Grouping
from kvpage.planner.nested_search import NestedSearch
from kvpage.planner.problem import Problem
from kvpage.planner.search import Found, Limits
from kvpage.planner.slab_grouping import group_in_slabs, group_side_by_side
from kvpage.planner.slab_search import SlabSearch
from kvpage.planner.workload import WorkloadPart
from kvpage.specs import MAX_BYTES, LayerSpec

Layouts = Sequence[Grouping]
"""The best, and others for the front."""
_MOST_BUCKETS_OF_FRONT = 64  # far more than any model has; of more, the best layout is all there is time for
_SHORT = WorkloadPart(64, 512)
"""Weighs a bucket of windows or states as requests do that have filled neither: part of the default workload of
`nested`, whose block sizes do not depend on lengths."""


def find_slab(problem: Problem) -> Layouts:
    """Raises `LayoutUnsupported` or `CannotUnify` naming a layer, or `SpecInvalid`."""
    if len(problem.buckets) == 1:
        return [_side_by_side(problem)]
    _check_layers_inside_blocks(problem)
    searches = [SlabSearch(buckets, problem.demand, problem.limits.max_groups) for buckets in problem.variants()]

    def best(limits: Limits) -> Found | None:
        found = None
        for search in searches:
            found = search.best(limits, found)
        return found

    return _layouts(problem, best)


def find_nested(problem: Problem) -> Layouts:
    """Raises as `find_slab` does."""
    if len(problem.buckets) == 1:
        return [_side_by_side(problem)]
    _check_layers_inside_blocks(problem)
    demand = problem.demand
    if problem.request.workload is None:
        demand = problem.demand_of((*problem.workload, _SHORT))
    searches = [NestedSearch(buckets, demand, problem.limits.max_groups) for buckets in problem.variants()]

    def best(limits: Limits) -> Found | None:
        found = (search.best(limits) for search in searches)
        return min((one for one in found if one is not None), key=lambda one: one.order, default=None)

    return _layouts(problem, best)


def _layouts(problem: Problem, best: Callable[[Limits], Found | None]) -> Layouts:
    found = best(problem.limits)
    if found is None:
        roomy = best(replace(problem.limits, pool_bytes=None, addressable_bytes=None))
        if roomy is None:
            raise _nothing_fits(problem)
        return [_grouped(problem, roomy)]  # where blocks are counted it is said that memory is short
    is_small = len(problem.buckets) <= _MOST_BUCKETS_OF_FRONT
    others = [best(limits) for limits in _other_limits(problem.limits, found)] if is_small else []
    return [_grouped(problem, one) for one in _distinct([found, *others])]


def _distinct(found: Iterable[Found | None]) -> list[Found]:
    known: dict[tuple[object, ...], Found] = {}
    for one in found:
        if one is not None:
            shape = (one.slab_bytes, *((c.split.num_groups, c.block_size, c.blocks_per_slab) for c in one.choices))
            known.setdefault(shape, one)
    return list(known.values())


def _other_limits(limits: Limits, found: Found) -> Iterator[Limits]:
    """Bounds for which a user may give up some bytes, and the common multiple given up for bytes."""
    yield replace(limits, max_groups=max(1, found.num_groups // 2))
    yield replace(limits, max_block_stride_bytes=max(1, found.max_block_stride_bytes // 4))
    yield replace(limits, max_block_lcm=max(1, found.block_lcm // 4))
    yield replace(limits, max_block_lcm=MAX_BYTES)


def _side_by_side(problem: Problem) -> Grouping:
    return arrange(group_side_by_side(problem.buckets[0]), problem.owners, layered=False)


def _grouped(problem: Problem, found: Found) -> Grouping:
    """Kernels step by blocks and not by pages, so it is those strides that must suit them."""
    grouping = group_in_slabs(found)
    strides = {name: grouping.block_bytes(group) for group in grouping.groups for name in group.layers}
    stepping: dict[tuple[int, int], LayerSpec] = {}  # by identity: equal layers share their spec
    placed = []
    for layer in problem.owners:
        spec, stride = grouping.decided[layer.name].spec, strides[layer.name]
        key = (id(spec), stride)
        if key not in stepping:
            stepping[key] = spec.with_padding(stride)
        placed.append(replace(layer, spec=stepping[key]))
    check_layouts(placed)
    return grouping


def _check_layers_inside_blocks(problem: Problem) -> None:
    for layer in problem.owners:
        if layer.backend is not None and layer.backend.layers_are_outermost:
            detail = (
                f"layer {layer.name!r} asks for layout {layer.backend.name}, in which each layer has memory of its "
                f"own; this strategy puts layers side by side in every block: use BLNHC or BLHNC, or another strategy"
            )
            raise LayoutUnsupported(detail, errors=[layer.fault(detail, "backend")])
    for kin, block_size in ((kin, bucket.block_sizes[0]) for bucket in problem.buckets for kin in bucket.kin):
        if kin.backend is not None and not kin.backend.keeps_pages_whole(kin.sized(block_size)):
            layer = kin.layers[0]
            detail = (
                f"layer {layer.name!r}: backend {kin.backend.name} scatters a block over memory, as num_blocks is not "
                f"its outermost axis, but blocks of slabs are one piece; choose a backend with num_blocks outermost"
            )
            raise LayoutUnsupported(detail, errors=[layer.fault(detail, "backend")])


def _nothing_fits(problem: Problem) -> CannotUnify:
    dense = [kin.layers[0] for bucket in problem.buckets for kin in bucket.kin if bucket.must_be_dense]
    limits = problem.limits
    bounds = f"max_groups {limits.max_groups}, max_block_lcm {limits.max_block_lcm}"
    if limits.max_block_stride_bytes is not None:
        bounds += f", max_block_stride_bytes {limits.max_block_stride_bytes}"
    if limits.max_one_token_bytes is not None:
        bounds += f", max_one_token_bytes {limits.max_one_token_bytes}"
    if not dense:
        return CannotUnify(f"no slab holds a block of every layer within bounds: {bounds}; widen one of them")
    first: Layer = dense[0]
    assert first.backend is not None  # only states have none, and those may stride
    detail = (
        f"layer {first.name!r}: backend {first.backend.name} does not read pages through the stride of the block axis, "
        f"so a slab must be exactly one of its pages, and none is that suits all layers ({bounds}); choose a backend "
        f"that does (such as flash_attn or triton_mla)"
    )
    return CannotUnify(detail, details={"layer": first.name}, errors=[first.fault(detail, "backend")])
