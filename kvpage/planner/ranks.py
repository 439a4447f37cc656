"""All ranks of a model: grouped once, projected on each rank, planned at the blocks of the smallest.

vLLM 0.24.0, `get_kv_cache_configs`: one scheduler names the blocks of all ranks, so groups, block sizes and numbers of
blocks are the same everywhere; bytes of a block, strides and offsets are each rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.errors import FieldError, NotEnoughMemory, SpecInvalid, shorten
from kvpage.layers import Layer
from kvpage.planner.assemble import assemble
from kvpage.planner.groups import Grouping
from kvpage.planner.planner import group_request, num_blocks_of
from kvpage.planner.projection import project
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan
from kvpage.ranked_request import RankedRequest
from kvpage.request_faults import faults_at_model

IDLE_SHARE = 0.1
"""A rank that leaves more of its memory unused is warned of."""


def plan_ranks(request: Mapping[str, Any]) -> RankedPlan:
    """Compute the page layouts of all ranks of `request` (docs/ranks.md): of its `ranks`, or of its model's tp and pp.

    Raises as `plan` does; `NotEnoughMemory` names the rank, `SpecInvalid` a layer that two ranks keep differently.
    """
    if not isinstance(request, Mapping):
        raise SpecInvalid(f"a plan request of ranks is a mapping, not {type(request).__name__}")
    with faults_at_model(request):
        asked = RankedRequest.parse(request)
        with asked.faults_at_ranks():
            return _plan_ranks(asked)


@dataclass(frozen=True, slots=True)
class _Share:
    """What the ranks that keep the same layers have in common."""

    layers: tuple[Layer, ...]
    grouping: Grouping


def _plan_ranks(asked: RankedRequest) -> RankedPlan:
    layers, grouping = group_request(asked.whole())
    shares = {kept: _share(kept, rank, layers, grouping) for rank, kept in _first_of_each(asked.kept)}
    fits = [_blocks_that_fit(asked, rank, shares[kept]) for rank, kept in enumerate(asked.kept)]
    num_blocks = min((blocks for blocks in fits if blocks is not None), default=1)  # 1: as `plan` without any cache
    plans: dict[tuple[tuple[str, ...], int | None], Plan] = {}
    for rank, key in enumerate(zip(asked.kept, asked.memory_bytes, strict=True)):
        if key not in plans:
            share = shares[key[0]]
            plans[key] = assemble(asked.of_rank(rank), share.layers, share.grouping, num_blocks)
    is_sized = asked.merged.num_blocks is None
    return RankedPlan(
        num_blocks=num_blocks,
        kv_replicas=asked.kv_replicas,
        blocks_that_fit=tuple(fits) if is_sized else (None,) * len(fits),
        warnings=_warnings(fits, num_blocks) if is_sized else (),
        efficiency=None if grouping.verdict is None else grouping.verdict.efficiency,
        rejected=() if grouping.verdict is None else grouping.verdict.rejected,
        ranks=tuple(plans[key] for key in zip(asked.kept, asked.memory_bytes, strict=True)),
    )


def _first_of_each(kept: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
    first: dict[tuple[str, ...], int] = {}
    for rank, names in enumerate(kept):
        first.setdefault(names, rank)
    return [(rank, names) for names, rank in first.items()]


def _share(kept: tuple[str, ...], rank: int, layers: Sequence[Layer], grouping: Grouping) -> _Share:
    names = set(kept)
    mine = tuple(layer for layer in layers if layer.name in names)
    for layer in mine:
        if layer.kv_sharing_target is not None and layer.kv_sharing_target not in names:
            detail = (
                f"layer {shorten(layer.name)!r} is on rank {rank} and reads the cache of layer "
                f"{shorten(layer.kv_sharing_target)!r}, which is not; keep both on one rank"
            )
            raise SpecInvalid(detail, errors=[layer.fault(detail, "kv_sharing_target")])
    return _Share(mine, project(grouping, mine))


def _blocks_that_fit(asked: RankedRequest, rank: int, share: _Share) -> int | None:
    """None for a rank without caches: it must not pull the others down. Raises `NotEnoughMemory` naming the rank."""
    if not any(group.layers for group in share.grouping.groups):
        return None
    try:
        return num_blocks_of(asked.of_rank(rank), share.grouping, share.layers)
    except NotEnoughMemory as error:
        where = "/num_blocks" if asked.merged.num_blocks is not None else f"/ranks/{rank}"
        detail = f"rank {rank}: {error.message}"
        details = {**error.details, "rank": rank}
        raise NotEnoughMemory(detail, details=details, errors=[FieldError(where, detail)]) from None


def _warnings(fits: Sequence[int | None], num_blocks: int) -> tuple[str, ...]:
    """One sentence about memory that ranks leave unused because another holds fewer blocks."""
    tightest = next((rank for rank, blocks in enumerate(fits) if blocks == num_blocks), None)
    idle = [rank for rank, blocks in enumerate(fits) if blocks and 1 - num_blocks / blocks > IDLE_SHARE]
    if tightest is None or not idle:
        return ()
    worst = max(idle, key=lambda rank: fits[rank] or 0)
    share = 1 - num_blocks / (fits[worst] or 1)
    sentence = (
        f"rank {tightest} holds only {num_blocks:,} blocks, so {len(idle)} of {len(fits)} ranks leave more than "
        f"{IDLE_SHARE:.0%} of their memory unused, rank {worst} the most: {share:.0%}, as it could hold "
        f"{fits[worst]:,} blocks; give rank {tightest} more memory or fewer layers"
    )
    return (sentence,)
