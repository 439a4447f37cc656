"""Which layers share a block table, and which share memory (vLLM 0.24.0, `get_kv_cache_groups`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvpage.layers import Layer
from kvpage.planner.groups import Group, Grouping, deal
from kvpage.planner.latent_windows import group_latent_windows
from kvpage.planner.unify import Decided, unify_page_sizes
from kvpage.specs import LayerSpec, ceil_div


def group_layers(layers: Sequence[Layer], unified: Callable[[Sequence[Layer]], Grouping] | None = None) -> Grouping:
    """Group layers that have a cache: one spec, one type, windows over latent rows, or unified page sizes, the first
    that applies.

    `unified`: how to make pages of one size, where the rule of 0.24.0 is not wanted. Raises `CannotUnify`, or
    `LayoutUnsupported` where windows over latent rows fit no page.
    """
    cached = [layer for layer in layers if layer.spec is not None]
    specs = {layer.name: layer.spec for layer in cached if layer.spec is not None}
    if not specs:
        return Grouping((), {}, (), ())
    values = list(specs.values())
    if (merged := type(values[0]).merge(values)) is not None:
        return _one_spec(specs, merged)
    if len({(spec.block_size, spec.lifecycle) for spec in values}) == 1:
        return _one_type(specs)
    if any(spec.kind == "sliding_window_mla" for spec in values):
        return group_latent_windows(cached)
    return (unified or _unified)(cached)


def _one_spec(specs: Mapping[str, LayerSpec], merged: LayerSpec) -> Grouping:
    page = merged.page_size_bytes
    reason = f"all layers have pages of {page:,} bytes and blocks of {merged.block_size} tokens"
    return Grouping(
        groups=(Group(tuple(specs), merged, page),),
        decided={name: Decided(spec, "keep", reason) for name, spec in specs.items()},
        slots=tuple((name,) for name in specs),
        slot_page_sizes_bytes=(page,) * len(specs),
    )


def _one_type(specs: Mapping[str, LayerSpec]) -> Grouping:
    """Same token slots for the same time: side by side under one block id, never padded against each other."""
    pages = tuple(spec.page_size_bytes for spec in specs.values())
    first = next(iter(specs.values()))
    decided = {
        name: Decided(
            spec,
            "co_group",
            f"page of {spec.page_size_bytes:,} bytes kept beside others: all layers need the same blocks of "
            f"{spec.block_size} tokens",
        )
        for name, spec in specs.items()
    }
    return Grouping(
        groups=(Group(tuple(specs), first, sum(pages)),),
        decided=decided,
        slots=tuple((name,) for name in specs),
        slot_page_sizes_bytes=pages,
    )


def _unified(layers: Sequence[Layer]) -> Grouping:
    decided = unify_page_sizes(layers)
    buckets = buckets_of(decided)
    return in_regions(decided, buckets, group_width([len(names) for names in buckets.values()]))


def buckets_of(decided: Mapping[str, Decided]) -> dict[LayerSpec, list[str]]:
    """Layers by the spec they were given."""
    buckets: dict[LayerSpec, list[str]] = {}
    for name, choice in decided.items():
        buckets.setdefault(choice.spec, []).append(name)
    return buckets


def in_regions(decided: Mapping[str, Decided], buckets: Mapping[LayerSpec, Sequence[str]], width: int) -> Grouping:
    """Layers of one page size in groups of at most `width`; the i-th layers of all groups share a region."""
    groups = tuple(
        Group(members, spec, spec.page_size_bytes)
        for spec, names in buckets.items()
        for members in deal(names, ceil_div(len(names), width))
    )
    widest = max(len(group.layers) for group in groups)
    slots = tuple(tuple(g.layers[slot] for g in groups if slot < len(g.layers)) for slot in range(widest))
    return Grouping(groups, decided, slots, (groups[0].page_size_bytes,) * widest)


def group_width(bucket_sizes: Sequence[int]) -> int:
    """Layers side by side: the smallest bucket, or the largest when it is less than 1.5 times the smallest."""
    smallest, largest = min(bucket_sizes), max(bucket_sizes)
    return largest if 2 * largest < 3 * smallest else smallest
