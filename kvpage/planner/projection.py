"""The part of a grouping that one rank keeps (vLLM 0.24.0, `_project_kv_cache_groups_to_worker`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvpage.layers import Layer
from kvpage.planner.arrangement import sharing_pattern
from kvpage.planner.groups import Group, Grouping
from kvpage.planner.latent_windows import charged_bytes


def project(grouping: Grouping, layers: Sequence[Layer]) -> Grouping:
    """`grouping` for a rank that keeps `layers` of its model's.

    All groups stay, in their order, the empty ones too: block tables are the same on every rank. The layers that are
    left move together, so that a rank has no more slots than its widest group fills.
    """
    by_name = {layer.name: layer for layer in layers}
    groups = tuple(_part(group, by_name, grouping) for group in grouping.groups)
    slots = _slots(grouping, groups, by_name)
    decided = {name: choice for name, choice in grouping.decided.items() if name in by_name}
    return replace(
        grouping,
        groups=groups,
        decided=decided,
        slots=tuple(names for names, _ in slots),
        slot_page_sizes_bytes=tuple(page for _, page in slots),
        charged_slots_bytes=None if grouping.charged_slots_bytes is None else charged_bytes(groups, decided),
    )


def _part(group: Group, mine: Mapping[str, Layer], grouping: Grouping) -> Group:
    names = tuple(name for name in group.layers if name in mine)
    is_sum = group.page_size_bytes == _pages(group.layers, grouping)  # of layers whose pages differ
    page = _pages(names, grouping) if names and is_sum else group.page_size_bytes
    return replace(group, layers=names, page_size_bytes=page)


def _pages(names: Sequence[str], grouping: Grouping) -> int:
    return sum(grouping.decided[name].spec.page_size_bytes for name in names)


def _slots(grouping: Grouping, groups: Sequence[Group], mine: Mapping[str, Layer]) -> list[tuple[tuple[str, ...], int]]:
    """(layers, page) of each slot: the i-th layer of a sort in each group shares the i-th slot of that sort.

    Layers are of one sort where their slots have pages of one size and they may share memory. In order of the slots
    that their first layers had.
    """
    slot_of = {name: slot for slot, names in enumerate(grouping.slots) for name in names}
    found: dict[tuple[object, ...], list[str]] = {}
    for group in groups:
        used: Counter[tuple[object, ...]] = Counter()
        for name in sorted(group.layers, key=slot_of.__getitem__):
            page = grouping.slot_page_sizes_bytes[slot_of[name]]
            sort = (page, sharing_pattern(mine[name], grouping))
            found.setdefault((sort, used[sort]), []).append(name)
            used[sort] += 1
    ordered = sorted(found.values(), key=lambda names: min(slot_of[name] for name in names))
    return [(tuple(names), grouping.slot_page_sizes_bytes[slot_of[names[0]]]) for names in ordered]
