"""From what a search found to groups of layers: in slabs, or, for one life cycle, in memory of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpage.planner.buckets import Bucket, Kin
from kvpage.planner.groups import Group, Grouping
from kvpage.planner.partition import Composition
from kvpage.planner.search import Choice, Found
from kvpage.planner.unify import Decided
from kvpage.plans import Decision
from kvpage.specs import LayerSpec


def group_in_slabs(found: Found) -> Grouping:
    """Every bucket's layers dealt into its groups, the layers of a group side by side in its blocks."""
    decided: dict[str, Decided] = {}
    groups: list[Group] = []
    for choice in found.choices:
        specs = _specs(choice.split.bucket, choice.block_size)
        reasons = _reasons(choice, found.slab_bytes, specs)
        for kin, spec in zip(choice.split.bucket.kin, specs, strict=True):
            of_kin = Decided(spec, _decision(choice.split.bucket, kin, spec), reasons[kin])
            decided |= dict.fromkeys((layer.name for layer in kin.layers), of_kin)
        for names, offsets in _dealt(choice):
            groups.append(_group(names, decided, specs[0], choice.blocks_per_slab, offsets))
    return Grouping(tuple(groups), decided, (), (), arrangement="slabs", slab_bytes=found.slab_bytes)


def group_side_by_side(bucket: Bucket) -> Grouping:
    """One life cycle needs no slab: one group of small blocks, each layer with memory of its own, nothing padded."""
    specs = _specs(bucket, bucket.block_sizes[0])
    decided: dict[str, Decided] = {}
    for kin, spec in zip(bucket.kin, specs, strict=True):
        reason = f"page of {spec.page_size_bytes:,} bytes{_resized(kin, spec)}: all layers need the same blocks"
        of_kin = Decided(spec, _decision(bucket, kin, spec), reason)
        decided |= dict.fromkeys((layer.name for layer in kin.layers), of_kin)
    return Grouping(
        groups=(_group(bucket.names, decided, specs[0]),),
        decided=decided,
        slots=tuple((name,) for name in bucket.names),
        slot_page_sizes_bytes=tuple(decided[name].spec.page_size_bytes for name in bucket.names),
    )


def _specs(bucket: Bucket, block_size: int) -> list[LayerSpec]:
    return [kin.sized(block_size) for kin in bucket.kin]


def _group(
    names: tuple[str, ...],
    decided: dict[str, Decided],
    spec: LayerSpec,
    blocks_per_slab: int = 1,
    offsets: tuple[int, ...] = (),
) -> Group:
    pages = [decided[name].spec.page_size_bytes for name in names]
    page = pages[0] if len(set(pages)) == 1 else sum(pages)
    return Group(names, spec, page, blocks_per_slab, offsets)


def _dealt(choice: Choice) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(layers, where the page of each begins in a block), group by group. Consecutive layers of a kind go to
    different groups, so that pipeline stages balance."""
    split, bucket = choice.split, choice.split.bucket
    pages = bucket.pages_bytes[choice.size_index]
    shares: list[list[list[str]]] = [[[] for _ in bucket.kin] for _ in split.dealt]
    for index, kin in enumerate(bucket.kin):
        for name, group in zip((layer.name for layer in kin.layers), _turns(split.dealt, index), strict=True):
            shares[group][index].append(name)
    place = {name: number for number, name in enumerate(bucket.names)}
    for composition, share in zip(split.dealt, shares, strict=True):
        starts = bucket.offsets_bytes(pages, composition)
        offset_of = {
            name: start + number * page
            for names, start, page in zip(share, starts, pages, strict=False)
            for number, name in enumerate(names)
        }
        ordered = sorted(offset_of, key=place.__getitem__)
        yield tuple(ordered), tuple(offset_of[name] for name in ordered)


def _turns(dealt: Sequence[Composition], kin: int) -> Iterator[int]:
    """The group of each layer of a kin: round and round, until each group has its share."""
    left = [composition[kin] for composition in dealt]
    while any(left):
        for group, count in enumerate(left):
            if count:
                left[group] -= 1
                yield group


def _decision(bucket: Bucket, kin: Kin, spec: LayerSpec) -> Decision:
    if len(bucket.kin) > 1:
        return "co_group"
    return "keep" if spec == kin.spec else "scale"


def _resized(kin: Kin, spec: LayerSpec) -> str:
    return "" if spec == kin.spec else f", block size {kin.spec.block_size} → {spec.block_size}"


def _reasons(choice: Choice, slab_bytes: int, specs: Sequence[LayerSpec]) -> dict[Kin, str]:
    """One sentence for the layers of each kin."""
    split, widest = choice.split, choice.split.sizes_bytes[choice.size_index]
    owned = slab_bytes // choice.blocks_per_slab
    groups = "one group" if split.num_groups == 1 else f"{split.num_groups} groups"
    most = sum(split.dealt[0])
    layers = "a layer each" if most == 1 else f"up to {most} layers side by side"
    fill = f"{groups} of {layers}, {widest:,} bytes a block"
    if choice.blocks_per_slab == 1:
        fill += f" in slabs of {slab_bytes:,} ({1 - widest / owned:.1%} left)"
    else:
        cut = f"{choice.blocks_per_slab:,} blocks {owned:,} bytes apart in slabs of {slab_bytes:,}"
        fill += f"; {cut} ({1 - widest / owned:.1%} left)"
    return {
        kin: f"page of {spec.page_size_bytes:,} bytes{_resized(kin, spec)}: {fill}"
        for kin, spec in zip(split.bucket.kin, specs, strict=True)
    }
