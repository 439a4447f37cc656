"""What ranks must be, worked out from the plan of the whole model and nothing else of the planner.

By vLLM 0.24.0's `get_kv_cache_configs`: groups of the whole model with the layers of other ranks taken out; as many
pieces of memory side by side as the widest group of the rank needs; blocks of the rank that holds the fewest.
"""

from __future__ import annotations

from collections import Counter
from math import lcm
from typing import Any

from kvpage.plans import Plan

Json = dict[str, Any]


def groups(whole: Plan, kept: set[str]) -> list[list[str]]:
    return [[name for name in group.layers if name in kept] for group in whole.groups]


def least_bytes_per_block(whole: Plan, kept: set[str]) -> int:
    """Without gaps: for each page size, as many pages as the group with most of them on this rank has."""
    most: Counter[int] = Counter()
    for names in groups(whole, kept):
        layers = [whole.layers[name] for name in names]
        pages = Counter(layer.page_size_bytes for layer in layers if layer.kv_sharing_target is None)
        most |= pages  # the larger count of each
    return sum(page * count for page, count in most.items())


def num_blocks(memories: list[int], bytes_per_block: list[int]) -> int | None:
    """None where no rank has a cache."""
    fits = [memory // size for memory, size in zip(memories, bytes_per_block, strict=True) if size]
    return min(fits, default=None)


def may_need_more(plan: Plan) -> bool:
    """Pages side by side in blocks are aligned; K and V of all blocks apart share memory with their like only."""
    views = [view for layer in plan.layers.values() for view in layer.tensors]
    if {view.strides_bytes[view.block_axis] for view in views} == {plan.bytes_per_block}:
        return True
    return any(
        stride > view.strides_bytes[view.block_axis] and extent > 1
        for view in views
        for extent, stride in zip(view.shape, view.strides_bytes, strict=True)
    )


def group_pages(whole: Plan, part: Plan) -> list[int]:
    """A page that is one layer's stays; one that is that of all layers together loses those of the other ranks."""
    pages = []
    for before, after in zip(whole.groups, part.groups, strict=True):
        owners = [name for name in before.layers if whole.layers[name].kv_sharing_target is None]
        mine = [name for name in owners if name in after.layers]
        is_sum = sum(whole.layers[name].page_size_bytes for name in owners) == before.page_size_bytes
        pages.append(
            sum(whole.layers[name].page_size_bytes for name in mine) if mine and is_sum else before.page_size_bytes
        )
    return pages


def request_bytes(part: Plan) -> int:
    """Blocks of a request times those of a block; with windows over latent rows vLLM charges every page size for each
    layer of the page size that a group has most of."""
    blocks = sum(part.capacity.blocks_per_request or ())
    if not any(group.kind == "sliding_window_mla" for group in part.groups) or len(part.groups) == 1:
        return blocks * part.bytes_per_block
    owners = {name: layer.page_size_bytes for name, layer in part.layers.items() if layer.kv_sharing_target is None}
    members = [[owners[name] for name in group.layers if name in owners] for group in part.groups]
    tuples = max((max(Counter(pages).values(), default=0) for pages in members), default=0)
    return blocks * tuples * sum({page for pages in members for page in pages})


def least_slab_bytes(part: Plan) -> int:
    """What the widest group fills, rounded up so that every group cuts it into blocks of a multiple of 128 bytes."""
    filled, cut = 0, 1
    for group in part.groups:
        owners = [part.layers[name] for name in group.layers if part.layers[name].kv_sharing_target is None]
        if owners:
            filled = max(filled, group.blocks_per_slab * sum(layer.page_size_bytes for layer in owners))
            cut = lcm(cut, group.blocks_per_slab)
    return -(-filled // (128 * cut)) * 128 * cut
