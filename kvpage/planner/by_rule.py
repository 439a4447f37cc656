"""Grouping by a fixed rule, hybrid alignment before it where that is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpage.layers import Layer, check_layouts
from kvpage.planner.align import align_hybrid, alignment_offered, is_hybrid, with_alignment, with_offer
from kvpage.planner.arrangement import arrange
from kvpage.planner.grouping import group_layers
from kvpage.planner.groups import Grouping

Unified = Callable[[Sequence[Layer]], Grouping]


def group_by_rule(
    asked: Sequence[Layer], *, aligned: bool, layered: bool = False, unified: Unified | None = None
) -> Grouping:
    """The groups of `asked`, pages made equal by vLLM 0.24's rule, or by `unified`.

    `aligned`: attention blocks and states are fitted to each other first, those of a draft only by vLLM's rule;
    `layered`: one cross-layer buffer. Raises `CannotUnify`, `LayoutUnsupported` or `SpecInvalid` naming the layer.
    """
    layers = align_hybrid(tuple(asked), keep_drafts=unified is not None) if aligned else tuple(asked)
    check_layouts(layers)
    owners = [layer for layer in layers if layer.kv_sharing_target is None]
    is_unaligned = not aligned and is_hybrid(layers)
    with alignment_offered(is_unaligned):
        grouping = arrange(group_layers(owners, unified), owners, layered=layered)
    if any(before is not after for before, after in zip(asked, layers, strict=True)):
        return _explained(grouping, asked, layers)
    return replace(grouping, decided=with_offer(grouping.decided)) if is_unaligned else grouping


def _explained(grouping: Grouping, asked: Sequence[Layer], aligned: Sequence[Layer]) -> Grouping:
    """The same grouping; decisions and reasons cover the alignment before it as well."""
    decided = dict(grouping.decided)
    for before, after in zip(asked, aligned, strict=True):
        if before.spec is not None and before.spec != after.spec and before.name in decided:
            decided[before.name] = with_alignment(before.spec, decided[before.name])
    return replace(grouping, decided=decided)
