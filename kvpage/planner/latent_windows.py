"""Windows over latent rows beside full latent rows (DeepSeek V4): vLLM 0.24.0, `_get_kv_cache_groups_uniform_groups`.

The full rows form one group of all their page sizes. Windows are padded to the next larger of those pages, put together
in tuples of one layer for each page size, and dealt into groups of about as many tuples as the full group has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvpage.errors import CannotUnify, LayoutUnsupported
from kvpage.latent_specs import SlidingWindowMLASpec
from kvpage.layers import Layer
from kvpage.planner.groups import Group, Grouping, deal
from kvpage.planner.unify import Decided
from kvpage.specs import LayerSpec, ceil_div


def group_latent_windows(layers: Sequence[Layer]) -> Grouping:
    """Group `layers`, all of them with latent rows. Raises `LayoutUnsupported` or `CannotUnify` naming the layer."""
    by_name = {layer.name: layer for layer in layers}
    full, windows = _split(layers)
    pages = {spec.page_size_bytes for spec in full.values()}
    decided = {name: Decided(spec, "co_group", "full latent rows keep their pages") for name, spec in full.items()}
    for members in windows:
        decided |= {name: _fitted(by_name[name], spec, pages) for name, spec in members.items()}
    tuples = [_num_tuples(full), *(_num_tuples(members) for members in windows)]
    width = tuples_side_by_side(tuples)
    groups = [_group(tuple(full), decided)]
    for members in windows:
        groups += [_group(names, decided) for names in _dealt(members, decided, by_name, width)]
    slots = _slots(groups, decided)
    return Grouping(
        groups=tuple(groups),
        decided=decided,
        slots=tuple(names for _, names in slots),
        slot_page_sizes_bytes=tuple(page for page, _ in slots),
        arrangement="packed" if all(_is_packable(layer, decided[layer.name].spec) for layer in layers) else "regions",
        charged_slots_bytes=charged_bytes(groups, decided),
    )


def charged_bytes(groups: Sequence[Group], decided: Mapping[str, Decided]) -> int:
    """What a request is charged for a block: the tuples of the group that has most of them, each of all page sizes."""
    specs = [{name: decided[name].spec for name in group.layers} for group in groups if group.layers]
    pages = {spec.page_size_bytes for members in specs for spec in members.values()}
    return max(map(_num_tuples, specs), default=0) * sum(pages)


def tuples_side_by_side(counts: Sequence[int]) -> int:
    """The width, at least that of the first count, for which rounding every count up to a multiple of it adds least;
    the larger one of two that are equal."""
    widths = range(counts[0], max(counts) + 1)
    return min(widths, key=lambda width: (sum(-count % width for count in counts), -width))


def _split(layers: Sequence[Layer]) -> tuple[dict[str, LayerSpec], list[dict[str, LayerSpec]]]:
    """The full rows, and the windows by block size and window."""
    full: dict[str, LayerSpec] = {}
    windows: dict[tuple[int, int], dict[str, LayerSpec]] = {}
    for layer in layers:
        if isinstance(layer.spec, SlidingWindowMLASpec):
            windows.setdefault((layer.spec.block_size, layer.spec.sliding_window), {})[layer.name] = layer.spec
        elif layer.spec is not None and layer.spec.kind == "mla_attention":
            full[layer.name] = layer.spec
        else:
            detail = (
                f"layer {layer.name!r} is of kind {layer.kind}; sliding_window_mla is planned beside mla_attention only"
            )
            raise LayoutUnsupported(detail, errors=[layer.fault(detail, "kind")])
    if not full or len({spec.block_size for spec in full.values()}) != 1:
        detail = "sliding_window_mla layers need mla_attention layers beside them, all of one block size"
        raise LayoutUnsupported(detail, errors=[layers[0].fault(detail)])
    return full, list(windows.values())


def _fitted(layer: Layer, spec: LayerSpec, pages: set[int]) -> Decided:
    """Padded to the smallest page of the full rows that holds it."""
    larger = [page for page in pages if page >= spec.page_size_bytes]
    if larger and min(larger) == spec.page_size_bytes:
        return Decided(spec, "co_group", f"page of {spec.page_size_bytes:,} bytes is one of the full rows' pages")
    target = min(larger, default=max(pages))
    is_whole = target % spec.page_alignment == 0
    if not larger or not is_whole or layer.backend is None or not layer.backend.can_pad(spec, target):
        detail = (
            f"layer {layer.name!r} has pages of {spec.page_size_bytes} bytes, the full latent rows have "
            f"{sorted(pages)}, and its pages cannot be padded to one of those; use a backend that reads pages by "
            f"block stride, a smaller block size, or sizes whose pages hold whole items"
        )
        facts = {"layer": layer.name, "page_size_bytes": spec.page_size_bytes, "largest_page_size_bytes": max(pages)}
        raise CannotUnify(detail, details=facts, errors=[layer.fault(detail)])
    gap = target - spec.real_page_size_bytes
    return Decided(
        spec.with_padding(target), "pad", f"page padded by {gap:,} bytes to {target:,}, a page of the full rows"
    )


def _num_tuples(specs: Mapping[str, LayerSpec]) -> int:
    """Layers of the page size that most layers have."""
    return max(Counter(spec.page_size_bytes for spec in specs.values()).values())


def _dealt(
    members: Mapping[str, LayerSpec], decided: Mapping[str, Decided], by_name: Mapping[str, Layer], width: int
) -> list[tuple[str, ...]]:
    by_page: dict[int, list[str]] = {}
    for name in members:
        by_page.setdefault(decided[name].spec.page_size_bytes, []).append(name)
    if len({len(names) for names in by_page.values()}) != 1:
        layer = by_name[next(iter(members))]
        counts = {page: len(names) for page, names in by_page.items()}
        detail = (
            f"windows of layer {layer.name!r} and its like need as many layers of each page size; there are {counts}"
        )
        raise LayoutUnsupported(detail, errors=[layer.fault(detail)])
    tuples = list(zip(*by_page.values(), strict=True))
    dealt = deal([str(index) for index in range(len(tuples))], ceil_div(len(tuples), width))
    return [tuple(name for index in share for name in tuples[int(index)]) for share in dealt]


def _group(names: tuple[str, ...], decided: Mapping[str, Decided]) -> Group:
    specs = [decided[name].spec for name in names]
    return Group(names, specs[0], sum(spec.page_size_bytes for spec in specs))


def _slots(groups: Sequence[Group], decided: Mapping[str, Decided]) -> list[tuple[int, tuple[str, ...]]]:
    """(page, layers): the i-th layer of a page size in each group shares the i-th slot of that page size."""
    by_page: dict[int, list[list[str]]] = {}
    for group in groups:
        used: Counter[int] = Counter()
        for name in group.layers:
            page = decided[name].spec.page_size_bytes
            slots = by_page.setdefault(page, [])
            if used[page] == len(slots):
                slots.append([])
            slots[used[page]].append(name)
            used[page] += 1
    return [(page, tuple(names)) for page, slots in by_page.items() for names in slots]


def _is_packable(layer: Layer, spec: LayerSpec) -> bool:
    """Kernels that address rows by a flat number, not by the block stride, must not meet a foreign page in between."""
    backend = layer.backend
    return backend is not None and backend.layout.indexes_kv_by_block_stride and backend.keeps_pages_whole(spec)
