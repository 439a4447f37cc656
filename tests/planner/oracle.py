"""A second opinion on the unify rule: the same answers as `kvpage.plan`, reached another way.

Plain dicts, no class, nothing imported from kvpage, no thought of speed. Written from the description of the rule, vLLM
0.24.0 with its known faults put right, and not from the planner. `answer(request)` gives `{"refused": <why>, ...}` or
the facts of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from planner import layouts
from planner.one_layer import (
    RefusedError,
    ceil_div,
    check_alone,
    check_gap,
    data_bytes,
    expand,
    is_state,
    most_blocks,
    page_bytes,
    page_multiple,
    state_starts,
    unpadded_page,
)

Json = dict[str, Any]

NULL_BLOCKS = 1  # block 0 is never handed out


def answer(request: Json) -> Json:
    try:
        return _plan(request)
    except RefusedError as refusal:
        return {"refused": refusal.facts["why"], "arguable": False, "short_of_memory": False, **refusal.facts}


def _plan(request: Json) -> Json:
    everything = expand(request)
    layers = [layer for layer in everything if layer["kind"] != "encoder_only_attention"]
    aligns = request.get("align_hybrid", False) and {is_state(layer) for layer in layers} == {True, False}
    for layer in layers:
        check_alone(layer, aligns)
    before = [dict(layer) for layer in layers]
    if aligns:
        align(layers)
    for layer in layers:
        check_alone(layer, aligns=False)
    groups, width, page_sum = arrange(layers)
    plan = blocks_and_bytes(request, groups, width, page_sum)
    place(plan, groups, page_sum is not None)
    check_layouts(groups, page_sum is not None, plan["offsets"], is_short_of_memory(request, plan))
    if is_short_of_memory(request, plan):
        raise RefusedError(why="not-enough-memory")
    plan["layers"] = {layer["name"]: outcome(layer, old) for layer, old in zip(layers, before, strict=True)}
    if page_sum is not None:
        for layer_facts in plan["layers"].values():
            layer_facts["decision"] = "co_group"
    plan["no_cache"] = [layer["name"] for layer in everything if layer["kind"] == "encoder_only_attention"]
    return plan


# --- hybrid alignment -----------------------------------------------------------------------------


def align(layers: list[Json]) -> None:
    """Give every attention layer one block size whose page holds the largest state, and pad the states to it."""
    states = [layer for layer in layers if is_state(layer)]
    attention = [layer for layer in layers if not is_state(layer)]
    main = [layer for layer in attention if not layer.get("draft")] or attention
    largest = max(page_bytes(state) for state in states)
    per_token = min(data_bytes(layer) // layer["block_size"] for layer in main)
    configured = max(layer["block_size"] for layer in attention)
    step = max([smallest_kernel_block(layer) for layer in main] + [max(layer["block_size"] for layer in main)])
    if any(layer["kind"] == "mla_attention" for layer in main):
        step = max(step, 128)
    multiple = math.lcm(*(smallest_kernel_block(layer) for layer in attention))
    tokens = step
    while tokens * per_token < largest:
        tokens += step
    while tokens % multiple or tokens < configured:
        tokens += 1
    for layer in attention:
        layer["block_size"] = tokens
    for state in states:
        state["page_size_padded"] = tokens * per_token


def smallest_kernel_block(layer: Json) -> int:
    sizes = layer["layout"]["kernel_block_sizes"]
    return min([int(size["multiple_of"] if isinstance(size, dict) else size) for size in sizes] or [1])


# --- groups ---------------------------------------------------------------------------------------


def arrange(layers: list[Json]) -> tuple[list[list[Json]], int, int | None]:
    """The groups, how many layers the widest has, and for layers of one type the sum of their pages."""
    if not layers:
        return [], 0, None
    if can_merge(layers):
        return [layers], len(layers), None
    if same_life(layers):
        return [layers], len(layers), sum(page_bytes(layer) for layer in layers)
    unify(layers)
    groups = split(buckets(layers))
    return groups, max(len(group) for group in groups), None


def can_merge(layers: list[Json]) -> bool:
    if any(layer["kind"] != "full_attention" for layer in layers):
        return all_equal(identity(layer) for layer in layers)
    windows = {layer["sliding_window"] for layer in layers} - {None}
    chunks = {layer["attention_chunk_size"] for layer in layers} - {None}
    if len(windows) > 1 or len(chunks) > 1 or (windows and chunks):
        return False
    return all_equal(identity(layer | {"sliding_window": None, "attention_chunk_size": None}) for layer in layers)


def identity(layer: Json) -> tuple[Any, ...]:
    """All that makes two layers' specs the same."""
    if is_state(layer):
        keys: tuple[str, ...] = ("kind", "block_size", "shapes", "dtypes", "page_size_padded", "num_speculative_blocks")
        return tuple(repr(layer[key]) for key in keys)
    keys = ("kind", "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant", "page_size_padded")
    keys += ("sliding_window", "attention_chunk_size", "page_alignment_bytes")
    return (*(layer[key] for key in keys), layer["layout"]["reads_stride"])


def same_life(layers: list[Json]) -> bool:
    return all_equal((layer["block_size"], life(layer)) for layer in layers)


def life(layer: Json) -> tuple[Any, ...]:
    """Layers of equal life take and free the same blocks at the same moments (when their block sizes are equal too)."""
    if layer["kind"] in ("full_attention", "mla_attention"):
        return ("whole context",)
    if layer["kind"] == "sliding_window":
        return ("window", layer["sliding_window"])
    if layer["kind"] == "chunked_local_attention":
        return ("chunk", layer["attention_chunk_size"])
    return ("state", layer["num_speculative_blocks"])


def all_equal(values: Iterable[Any]) -> bool:
    return len(set(values)) == 1


def unify(layers: list[Json]) -> None:
    """Make every page as large as the largest, or refuse the first layer for which that cannot be done."""
    largest_layer = max(layers, key=page_bytes)  # the first of the largest
    largest = page_bytes(largest_layer)
    for layer in layers:
        page = page_bytes(layer)
        if page == largest:
            continue
        if largest % page == 0:
            stretch(layer, largest, largest // page)
        elif may_pad(layer, largest):
            layer["page_size_padded"] = largest
        else:
            raise RefusedError(
                why="cannot-unify-page-size",
                layer=layer["name"],
                page_size_bytes=page,
                largest_page_size_bytes=largest,
                largest_layer=largest_layer["name"],
            )


def may_pad(layer: Json, page: int) -> bool:
    if is_state(layer) or not (layer["layout"]["reads_stride"] and layer["layout"]["blocks_outermost"]):
        return False
    return layouts.kernel_blocks_per_block(layer) == 1 and page % page_multiple(layer) == 0


def stretch(layer: Json, largest: int, ratio: int) -> None:
    """A page that divides the largest: more tokens per block, but a state holds no tokens and is padded."""
    if is_state(layer):
        layer["page_size_padded"] = largest
        return
    layer["block_size"] *= ratio
    layer["page_size_padded"] = None
    if unpadded_page(layer) != largest:
        layer["page_size_padded"] = largest


def buckets(layers: list[Json]) -> list[list[Json]]:
    found: list[list[Json]] = []
    for layer in layers:
        for bucket in found:
            if identity(bucket[0]) == identity(layer):
                bucket.append(layer)
                break
        else:
            found.append([layer])
    return found


def split(of_equal_spec: list[list[Json]]) -> list[list[Json]]:
    sizes = sorted(len(bucket) for bucket in of_equal_spec)
    width = sizes[-1] if 2 * sizes[-1] < 3 * sizes[0] else sizes[0]
    groups = []
    for bucket in of_equal_spec:
        number = ceil_div(len(bucket), width)
        for first in range(number):
            groups.append([layer for position, layer in enumerate(bucket) if position % number == first])
    return groups


# --- blocks, bytes, places ------------------------------------------------------------------------


def blocks_and_bytes(request: Json, groups: list[list[Json]], width: int, page_sum: int | None) -> Json:
    if not groups:
        return {"groups": [], "num_blocks": 1, "bytes_per_block": 0, "request_bytes": 0, "blocks": []}
    page = page_bytes(groups[0][0])
    per_block = page_sum if page_sum is not None else width * page
    num_blocks = request.get("num_blocks") or request["memory_bytes"] // per_block
    blocks = [
        max(most_blocks(layer, request["max_model_len"], request["max_num_batched_tokens"]) for layer in group)
        for group in groups
    ]
    return {
        "groups": [
            {
                "layers": [layer["name"] for layer in group],
                "block_size": group[0]["block_size"],
                "page_size_bytes": page_sum if page_sum is not None else page,
            }
            for group in groups
        ],
        "num_blocks": num_blocks,
        "bytes_per_block": per_block,
        "request_bytes": sum(blocks) * per_block,
        "blocks": blocks,
    }


def is_short_of_memory(request: Json, plan: Json) -> bool:
    """There must be a block beside the null block, and room for one request where the number of blocks is asked for."""
    needed = NULL_BLOCKS + (sum(plan["blocks"]) if "num_blocks" in request else 1)
    return bool(plan["groups"]) and plan["num_blocks"] < needed


def place(plan: Json, groups: list[list[Json]], own_buffers: bool) -> None:
    """Where the memory of each layer starts: one buffer after the other."""
    offsets: dict[str, int] = {}
    for group in groups:
        offset = 0
        for layer in group:
            offsets[layer["name"]] = offset
            offset += page_bytes(layer) * plan["num_blocks"]
    plan["offsets"] = offsets
    plan["buffer_size_bytes"] = plan["bytes_per_block"] * plan["num_blocks"]
    plan["own_buffers"] = own_buffers


def check_layouts(groups: list[list[Json]], own_buffers: bool, offsets: dict[str, int], short_of_memory: bool) -> None:
    """Refuse what no strided view can show."""
    try:
        check_views(groups, offsets)
        if not own_buffers:
            check_sharing(groups)
    except RefusedError as refusal:
        refusal.facts["short_of_memory"] = short_of_memory
        raise


def check_views(groups: list[list[Json]], offsets: dict[str, int]) -> None:
    for layer in (layer for group in groups for layer in group):
        starts = state_starts(layer, offsets[layer["name"]])
        if any(page_bytes(layer) % item for _, item in starts):
            raise RefusedError(why="uneven", layer=layer["name"])
        if any(start % item for start, item in starts):  # a gap between the buffers would do as well
            raise RefusedError(why="uneven", layer=layer["name"], arguable=True)
        if page_bytes(layer) > data_bytes(layer):
            check_gap(layer)


def check_sharing(groups: list[list[Json]]) -> None:
    """Layers that share memory must cut it into equal blocks; that those of unlike layouts may share is arguable."""
    for first, second in ((a, b) for a in groups for b in groups if a is not b):
        for one, two in zip(first, second, strict=False):
            scattered = not (one["layout"]["blocks_outermost"] and two["layout"]["blocks_outermost"])
            if scattered and layouts.concrete(one) != layouts.concrete(two):
                arguable = layouts.planes(one) == layouts.planes(two)
                raise RefusedError(why="layout-unsupported", layer=one["name"], arguable=arguable)


def outcome(layer: Json, before: Json) -> Json:
    """What became of one layer; `before` is the layer as requested."""
    scaled = layer["block_size"] != before["block_size"]
    padded = page_bytes(layer) != page_bytes(before)
    if scaled:
        decision = "scale" if layer["page_size_padded"] is None else "scale_pad"
    else:
        decision = "pad" if padded else "keep"
    return {
        "decision": decision,
        "block_size": layer["block_size"],
        "page_size_bytes": page_bytes(layer),
        "page_size_padded": layer["page_size_padded"],
        "data_bytes": data_bytes(layer),
    }
