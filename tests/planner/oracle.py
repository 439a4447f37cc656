"""A second opinion on the unify rule: the same answers as `kvpage.plan`, reached another way.

Plain dicts, no class, nothing imported from kvpage, no thought of speed. Written from the description of the rule, vLLM
0.24.0 with its known faults put right, and not from the planner. `answer(request)` gives `{"refused": <why>, ...}` or
the facts of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from planner import latent_oracle, layouts, sharing_oracle
from planner.one_layer import (
    RefusedError,
    ceil_div,
    check_alone,
    data_bytes,
    expand,
    is_state,
    most_blocks,
    page_bytes,
    page_multiple,
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
    cached = [layer for layer in everything if layer["kind"] != "encoder_only_attention"]
    check_sharers(everything, cached)
    aligns = request.get("align_hybrid", False) and {is_state(layer) for layer in cached} == {True, False}
    for layer in cached:
        check_alone(layer, aligns)
    before = [dict(layer) for layer in cached]
    if aligns:
        align(cached)
    for layer in cached:
        check_alone(layer, aligns=False)
    owners = [layer for layer in cached if layer["kv_sharing_target"] is None]
    grouping = arrange(owners)
    grouping["sharing"] = sharing_oracle.settle(grouping, owners, request.get("layered", False))
    plan = blocks_and_bytes(request, grouping)
    sharing_oracle.place(plan, grouping)
    try:
        sharing_oracle.check_layouts(plan, grouping)
    except RefusedError as refusal:
        refusal.facts["short_of_memory"] = is_short_of_memory(request, plan)
        raise
    if is_short_of_memory(request, plan):
        raise RefusedError(why="not-enough-memory")
    old = {layer["name"]: layer for layer in before}
    plan["layers"] = {layer["name"]: outcome(layer, old[layer["name"]], grouping) for layer in owners}
    add_sharers(plan, cached)
    plan["no_cache"] = [layer["name"] for layer in everything if layer["kind"] == "encoder_only_attention"]
    return plan


# --- layers that read another's cache -------------------------------------------------------------


def check_sharers(everything: list[Json], cached: list[Json]) -> None:
    owners = {layer["name"]: layer for layer in cached if layer["kv_sharing_target"] is None}
    for layer in everything:
        if layer["kv_sharing_target"] is None:
            continue
        owner = owners.get(layer["kv_sharing_target"])
        if owner is None or layer not in cached or not alike(owner, layer):
            raise RefusedError(why="spec-invalid", layer=layer["name"])


def alike(one: Json, two: Json) -> bool:
    return identity(one) == identity(two) and one["layout"] == two["layout"]


def add_sharers(plan: Json, cached: list[Json]) -> None:
    """Each sharer is as its owner, listed last in the owner's group; it costs nothing."""
    plan["owners"] = {}
    for layer in cached:
        owner = layer["kv_sharing_target"]
        if owner is not None:
            plan["owners"][layer["name"]] = owner
            plan["layers"][layer["name"]] = plan["layers"][owner] | {"decision": "share"}
            next(group for group in plan["groups"] if owner in group["layers"])["layers"].append(layer["name"])


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


def arrange(layers: list[Json]) -> Json:
    """`groups`; `slots` (page, layers over one piece of memory); `page_sums`: a group's page is that of all its layers;
    `charged`: bytes a request pays for a block where that is not what a block has; `decision` where all get the same.
    """
    if layers and not can_merge(layers) and not same_life(layers):
        if any(layer["kind"] == "sliding_window_mla" for layer in layers):
            return latent_oracle.group(layers)
        unify(layers)
        groups = split(buckets(layers))
        found: Json = {"page_sums": False, "decision": None}
    else:
        groups = [layers] if layers else []
        one_type = bool(layers) and not can_merge(layers)
        found = {"page_sums": one_type, "decision": "co_group" if one_type else None}
    places = [[group[i] for group in groups if i < len(group)] for i in range(max(map(len, groups), default=0))]
    slots = [(page_bytes(members[0]), members) for members in places]
    return found | {"groups": groups, "slots": slots, "sharing": "regions", "charged": None}


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
    keys += ("sliding_window", "attention_chunk_size", "page_alignment_bytes", "compress_ratio")
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
    if layer["kind"] == "sliding_window_mla":
        return ("window of latent rows", layer["sliding_window"])
    if layer["kind"] == "cross_attention":
        return ("encoder",)
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
    return layouts.reads_pages_of(layer, page) and page % page_multiple(layer) == 0


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


def blocks_and_bytes(request: Json, grouping: Json) -> Json:
    groups, slots = grouping["groups"], grouping["slots"]
    if not groups:
        return {"groups": [], "num_blocks": 1, "bytes_per_block": 0, "request_bytes": 0, "blocks": []}
    per_block = sum(page for page, _ in slots)
    if grouping["sharing"] == "packed":
        _, per_block = sharing_oracle.block_offsets(slots)
    blocks = [max(most_blocks(layer, request) for layer in group) for group in groups]
    pages = [sum(map(page_bytes, group)) if grouping["page_sums"] else page_bytes(group[0]) for group in groups]
    return {
        "groups": [
            {
                "layers": [layer["name"] for layer in group],
                "block_size": group[0]["block_size"],
                "page_size_bytes": page,
            }
            for group, page in zip(groups, pages, strict=True)
        ],
        "num_blocks": request.get("num_blocks") or request["memory_bytes"] // per_block,
        "bytes_per_block": per_block,
        "request_bytes": sum(blocks) * (grouping["charged"] or per_block),
        "blocks": blocks,
    }


def is_short_of_memory(request: Json, plan: Json) -> bool:
    """Memory must hold a block beside the null block; a number of blocks asked for, one request as vLLM counts it."""
    needed = sum(plan["blocks"]) if "num_blocks" in request else 1 + NULL_BLOCKS
    return bool(plan["groups"]) and plan["num_blocks"] < needed


def outcome(layer: Json, before: Json, grouping: Json) -> Json:
    """What became of one layer; `before` is the layer as requested."""
    scaled = layer["block_size"] != before["block_size"]
    padded = page_bytes(layer) != page_bytes(before)
    if scaled:
        decision = "scale" if layer["page_size_padded"] is None else "scale_pad"
    else:
        decision = "pad" if padded else grouping["decision"] or "keep"
    return {
        "decision": decision,
        "block_size": layer["block_size"],
        "page_size_bytes": page_bytes(layer),
        "page_size_padded": layer["page_size_padded"],
        "data_bytes": data_bytes(layer),
    }
