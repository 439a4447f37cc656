"""The part of a grouping that one rank keeps (vLLM 0.24.0, `_project_kv_cache_groups_to_worker`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from kvpage.layers import Layer
from kvpage.planner.arrangement import sharing_pattern
from kvpage.planner.buckets import stride_alignment
from kvpage.planner.groups import Group, Grouping
from kvpage.planner.latent_windows import charged_bytes
from kvpage.planner.search import SLAB_ALIGNMENT_BYTES
from kvpage.specs import ceil_div


def project(grouping: Grouping, layers: Sequence[Layer]) -> Grouping:
    """`grouping` for a rank that keeps `layers` of its model's.

    All groups stay, in their order, the empty ones too: block tables are the same on every rank. The layers that are
    left move together, so that a rank has no more slots than its widest group fills.
    """
    by_name = {layer.name: layer for layer in layers}
    if grouping.decided.keys() <= by_name.keys():
        return grouping
    if grouping.verdict is not None:  # it is of the whole model, but for the name of the strategy
        grouping = replace(grouping, verdict=replace(grouping.verdict, efficiency=None, front=(), rejected=()))
    if grouping.slab_bytes is not None:
        return _in_slabs(grouping, by_name)
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


def _in_slabs(grouping: Grouping, mine: Mapping[str, Layer]) -> Grouping:
    """The layers that are left move together in their blocks, and the slab shrinks to what the widest group needs, cut
    evenly into as many blocks as on every rank. It never grows: the whole model's slab is cut as evenly."""
    groups = tuple(_moved_together(group, mine, grouping) for group in grouping.groups)
    decided = {name: choice for name, choice in grouping.decided.items() if name in mine}
    step = lcm(SLAB_ALIGNMENT_BYTES, *(stride_alignment(decided[name].spec, mine[name].backend) for name in decided))
    even = step * lcm(*(group.blocks_per_slab for group in groups if group.layers))
    needed = max((group.blocks_per_slab * _end(group, grouping) for group in groups), default=0)
    return replace(grouping, groups=groups, decided=decided, slab_bytes=ceil_div(needed, even) * even)


def _moved_together(group: Group, mine: Mapping[str, Layer], grouping: Grouping) -> Group:
    part = _part(group, mine, grouping)
    offsets, end = [], 0
    for name in part.layers:
        spec = grouping.decided[name].spec
        end += -end % spec.page_alignment
        offsets.append(end)
        end += spec.page_size_bytes
    return replace(part, offsets_in_block_bytes=tuple(offsets))


def _end(group: Group, grouping: Grouping) -> int:
    """Bytes of a block's data."""
    if not group.layers:
        return 0
    return group.offsets_in_block_bytes[-1] + grouping.decided[group.layers[-1]].spec.page_size_bytes


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
