"""The oracle's groups for windows over latent rows: whole rows first, then each sort of window in tuples."""

from __future__ import annotations

from collections import Counter
from typing import Any

from planner import layouts
from planner.one_layer import RefusedError, ceil_div, page_bytes, page_multiple

Json = dict[str, Any]


def group(layers: list[Json]) -> Json:
    """Sets `page_size_padded` of the windows. The answer is as that of `oracle.arrange`."""
    whole, sorts = sort(layers)
    pages = {page_bytes(layer) for layer in whole}
    counts = [tuples(whole), *(tuples(members) for members in sorts)]
    for members in sorts:
        for layer in members:
            fit(layer, pages)
    width = best_width(counts)
    groups = [whole]
    for members in sorts:
        groups += deal(members, width)
    slots: list[tuple[int, list[Json]]] = []
    for page in dict.fromkeys(page_bytes(layer) for members in groups for layer in members):
        alike = [[layer for layer in members if page_bytes(layer) == page] for members in groups]
        for i in range(max(len(some) for some in alike)):
            slots.append((page, [some[i] for some in alike if i < len(some)]))
    packs = all(layer["layout"]["reads_stride"] and layouts.is_whole(layer) for layer in layers)
    return {
        "groups": groups,
        "page_sums": True,
        "slots": slots,
        "sharing": "packed" if packs else "regions",
        "charged": max(tuples(members) for members in groups) * sum(pages),
        "decision": "co_group",
    }


def sort(layers: list[Json]) -> tuple[list[Json], list[list[Json]]]:
    whole = [layer for layer in layers if layer["kind"] == "mla_attention"]
    windows = [layer for layer in layers if layer["kind"] == "sliding_window_mla"]
    if len(whole) + len(windows) < len(layers) or len({layer["block_size"] for layer in whole}) != 1:
        raise RefusedError(why="layout-unsupported")
    keys = dict.fromkeys((layer["block_size"], layer["sliding_window"]) for layer in windows)
    return whole, [[w for w in windows if (w["block_size"], w["sliding_window"]) == key] for key in keys]


def fit(layer: Json, pages: set[int]) -> None:
    """Pad a window's page to the next larger page of the whole rows."""
    page = page_bytes(layer)
    larger = sorted(other for other in pages if other >= page)
    if larger and larger[0] == page:
        return
    if not larger or not layouts.reads_pages_of(layer, larger[0]):
        facts = {"layer": layer["name"], "page_size_bytes": page, "largest_page_size_bytes": max(pages)}
        raise RefusedError(why="cannot-unify-page-size", **facts)
    if larger[0] % page_multiple(layer):
        raise RefusedError(why="uneven", layer=layer["name"], arguable=True)
    layer["page_size_padded"] = larger[0]


def tuples(layers: list[Json]) -> int:
    """How many tuples of one layer per page size the layers make."""
    return max(Counter(page_bytes(layer) for layer in layers).values())


def best_width(counts: list[int]) -> int:
    """Rounding all counts up to a multiple of it adds as little as any width from the first count on; the largest."""
    best, least = counts[0], -1
    for width in range(counts[0], max(counts) + 1):
        added = sum(ceil_div(count, width) * width - count for count in counts)
        if least < 0 or added <= least:
            best, least = width, added
    return best


def deal(members: list[Json], width: int) -> list[list[Json]]:
    pages = list(dict.fromkeys(page_bytes(layer) for layer in members))
    columns = [[layer for layer in members if page_bytes(layer) == page] for page in pages]
    if len({len(column) for column in columns}) != 1:
        raise RefusedError(why="layout-unsupported")
    number = ceil_div(len(columns[0]), width)
    hands: list[list[Json]] = [[] for _ in range(number)]
    for position, of_each_page in enumerate(zip(*columns, strict=True)):
        hands[position % number] += of_each_page
    return hands
