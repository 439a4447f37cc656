"""Which layers share a block table, and which share memory (vLLM 0.24.0, `get_kv_cache_groups`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpage.layers import Layer
from kvpage.planner.unify import Decided, unify_page_sizes
from kvpage.specs import LayerSpec, ceil_div


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table. `spec` stands for all of them: blocks a request needs, block size, page size."""

    layers: tuple[str, ...]
    spec: LayerSpec
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """`slots[j]` names the layers over one region of memory; a region steps by `slot_page_sizes_bytes[j]` a block."""

    groups: tuple[Group, ...]
    decided: Mapping[str, Decided]
    slots: tuple[tuple[str, ...], ...]
    slot_page_sizes_bytes: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(self.slot_page_sizes_bytes)


def group_layers(layers: Sequence[Layer]) -> Grouping:
    """Group layers that have a cache: one spec, one type, or unified page sizes, the first that applies.

    Raises `CannotUnify`.
    """
    specs = {layer.name: layer.spec for layer in layers if layer.spec is not None}
    if not specs:
        return Grouping((), {}, (), ())
    values = list(specs.values())
    if (merged := type(values[0]).merge(values)) is not None:
        return _one_spec(specs, merged)
    if len({(spec.block_size, spec.lifecycle) for spec in values}) == 1:
        return _one_type(specs)
    return _unified(layers)


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
    decided = unify_page_sizes([layer for layer in layers if layer.spec is not None])
    buckets: dict[LayerSpec, list[str]] = {}
    for name, choice in decided.items():
        buckets.setdefault(choice.spec, []).append(name)
    width = group_width([len(names) for names in buckets.values()])
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


def deal(names: Sequence[str], num_groups: int) -> list[tuple[str, ...]]:
    """Group i takes layers i, i + num_groups, …: consecutive layers spread over groups, so pipeline stages balance."""
    return [tuple(names[start::num_groups]) for start in range(num_groups)]
