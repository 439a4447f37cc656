"""The oracle's view of how layers share the buffer: regions, side by side in every block, or interleaved in it."""

from __future__ import annotations

import math
from typing import Any

from planner import layouts
from planner.one_layer import RefusedError, check_gap, data_bytes, is_state, page_bytes, page_multiple, state_starts

Json = dict[str, Any]


def settle(grouping: Json, layers: list[Json], layered: bool) -> str:
    """How the layers share memory, or a refusal. `layers`: all that have a cache of their own."""
    attention = [layer for layer in layers if not is_state(layer)]
    asked = {layouts.sharing_of_blocks(layer) for layer in attention}
    if layered and attention:
        asked = {"interleaved"}
    if len(asked) > 1:
        raise RefusedError(why="layout-unsupported")
    if "interleaved" in asked:
        check_interleaved(layers)
        return "interleaved"
    if "packed" in asked or grouping["sharing"] == "packed":
        for layer in attention:
            if not layouts.is_whole(layer) or layouts.kernel_blocks_per_block(layer) > 1:
                # Where the layers do not ask to be packed, regions would do.
                raise RefusedError(why="layout-unsupported", arguable="packed" not in asked)
            if layouts.has_broken_rows(layer, block_offsets(grouping["slots"])[1]):
                raise RefusedError(why="layout-unsupported", layer=layer["name"])
        return "packed"
    return "regions"


def check_interleaved(layers: list[Json]) -> None:
    first = layers[0]
    for layer in layers:
        alike = {key: value for key, value in layer.items() if key not in ("name", "draft")}
        if alike != {key: value for key, value in first.items() if key not in ("name", "draft")}:
            raise RefusedError(why="layout-unsupported", layer=layer["name"])
    if first["layout"]["layered"] is None or page_bytes(first) != data_bytes(first):
        raise RefusedError(why="layout-unsupported", layer=first["name"])


def block_offsets(slots: list[tuple[int, list[Json]]]) -> tuple[list[int], int]:
    """Where each slot begins in a packed block, at a multiple of its items, and the bytes of the block: what the pages
    of every layer may step by."""
    starts, end = [], 0
    for page, members in slots:
        items = math.lcm(*(item for layer in members for _, item in state_starts(layer, 0)))
        while end % items:
            end += 1
        starts.append(end)
        end += page
    every = math.lcm(*(page_multiple(layer) for _, members in slots for layer in members))
    return starts, math.ceil(end / every) * every


def place(plan: Json, grouping: Json) -> None:
    """Where the memory of each layer starts, and how far its pages are apart."""
    slots, number = grouping["slots"], plan["num_blocks"]
    if grouping["sharing"] == "packed":
        starts, stride = block_offsets(slots)
        strides = [stride] * len(slots)
    else:
        starts = [sum(page for page, _ in slots[:i]) * number for i in range(len(slots))]
        strides = [page for page, _ in slots]
    plan["offsets"], plan["strides"] = {}, {}
    for start, stride, (_, members) in zip(starts, strides, slots, strict=True):
        for layer in members:
            plan["offsets"][layer["name"]], plan["strides"][layer["name"]] = start, stride
    plan["buffer_size_bytes"] = plan["bytes_per_block"] * number
    plan["sharing"] = grouping["sharing"]
    plan["slots"] = [[layer["name"] for layer in members] for _, members in slots]


def check_layouts(plan: Json, grouping: Json) -> None:
    """Refuse what no strided view can show."""
    if grouping["sharing"] == "interleaved":
        return
    for _, members in grouping["slots"]:
        for layer in members:
            starts = state_starts(layer, plan["offsets"][layer["name"]])
            if any(plan["strides"][layer["name"]] % item for _, item in starts):
                raise RefusedError(why="uneven", layer=layer["name"])
            if any(start % item for start, item in starts):  # a gap between the buffers would do as well
                raise RefusedError(why="uneven", layer=layer["name"], arguable=True)
            if page_bytes(layer) > data_bytes(layer):
                check_gap(layer)
        if grouping["sharing"] == "regions":
            check_unlike(members)


def check_unlike(members: list[Json]) -> None:
    """Layers that share memory must cut it into equal blocks; that those of unlike layouts may share is arguable."""
    for one in members:
        for two in members:
            scattered = not (layouts.is_whole(one) and layouts.is_whole(two))
            if scattered and layouts.concrete(one) != layouts.concrete(two):
                arguable = layouts.planes(one) == layouts.planes(two)
                raise RefusedError(why="layout-unsupported", layer=one["name"], arguable=arguable)
