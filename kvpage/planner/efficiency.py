"""What a grouping holds beside what requests need: the number that strategies are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvpage.layers import Layer
from kvpage.planner.addressing import most_slabs
from kvpage.planner.groups import Grouping
from kvpage.planner.search import PARTLY_FILLED, slack
from kvpage.planner.workload import Demand, Workload
from kvpage.plans import Efficiency, FrontPoint, WorkloadShare
from kvpage.request_search import SearchFields


def held_over_live(grouping: Grouping, layers: Sequence[Layer], demand: Demand, pool_bytes: int | None) -> float:
    """Mean over the workload of (bytes a request holds / bytes it needs); infinite where not two slabs fit."""
    slab = grouping.bytes_per_block
    held = sum(grouping.block_bytes(g) * demand.blocks(g.spec, g.spec.block_size) for g in grouping.groups)
    if pool_bytes is None:
        return held
    idle = sum(PARTLY_FILLED * slab / pool_bytes for group in grouping.groups if group.blocks_per_slab > 1)
    return held * slack(slab, pool_bytes, _most_slabs(grouping, layers)) + idle


def _most_slabs(grouping: Grouping, layers: Sequence[Layer]) -> int | None:
    most = most_slabs(grouping, layers)
    return None if most is None else most[0]


def describe(grouping: Grouping, cost: float, floor: float, workload: Workload) -> Efficiency:
    """The numbers of a grouping whose `held_over_live` is `cost`."""
    return Efficiency(
        workload=tuple(
            WorkloadShare(min_tokens=part.min_tokens, max_tokens=part.max_tokens, weight=part.weight)
            for part in workload
        ),
        held_over_live=cost,
        floor_over_live=floor,
        one_token_bytes=one_token_bytes(grouping),
        block_lcm_tokens=block_lcm(grouping),
    )


def front_point(strategy: str, grouping: Grouping, cost: float) -> FrontPoint:
    return FrontPoint(
        strategy=strategy,
        held_over_live=cost,
        slab_bytes=grouping.bytes_per_block,
        max_block_stride_bytes=max_block_stride(grouping),
        block_lcm_tokens=block_lcm(grouping),
        num_groups=len(grouping.groups),
        one_token_bytes=one_token_bytes(grouping),
    )


def one_token_bytes(grouping: Grouping) -> int:
    """A slab of every group, however few tokens."""
    return grouping.bytes_per_block * len(grouping.groups)


def block_lcm(grouping: Grouping) -> int:
    """In tokens."""
    return lcm(*(group.spec.block_size for group in grouping.groups if group.spec.is_attention))


def max_block_stride(grouping: Grouping) -> int:
    """The most bytes from one block of a layer to its next."""
    if grouping.arrangement == "regions":
        return max(grouping.slot_page_sizes_bytes)
    return max(grouping.block_bytes(group) for group in grouping.groups)


def outside_bounds(grouping: Grouping, asked: SearchFields) -> tuple[str, str] | None:
    """The field of the request whose bound the layout passes, and how, in words; None when none."""
    largest = max((group.spec.block_size for group in grouping.groups if group.spec.is_attention), default=1)
    for name, value, words in (
        ("max_groups", len(grouping.groups), "{:,} groups"),
        ("max_block_size", largest, "blocks of {:,} tokens"),
        ("max_block_lcm", block_lcm(grouping), "block sizes with a common multiple of {:,} tokens"),
        ("max_block_stride_bytes", max_block_stride(grouping), "blocks {:,} bytes apart"),
        ("max_one_token_bytes", one_token_bytes(grouping), "{:,} bytes for a request of one token"),
    ):
        bound = getattr(asked, name)
        if bound is not None and value > bound:
            return name, f"its layout has {words.format(value)}, and {name} is {bound:,}"
    return None
