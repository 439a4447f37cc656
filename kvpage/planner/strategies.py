"""What each strategy makes of the layers, and which one is best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from kvpage.errors import CannotUnify, FieldError, KvpageError, LayoutUnsupported
from kvpage.layers import Layer
from kvpage.planner.addressing import most_slabs
from kvpage.planner.align import is_hybrid
from kvpage.planner.by_rule import group_by_rule
from kvpage.planner.efficiency import describe, front_point, held_over_live, outside_bounds
from kvpage.planner.grouping import buckets_of, in_regions
from kvpage.planner.groups import Grouping, Verdict
from kvpage.planner.problem import Problem
from kvpage.planner.scale_then_pad import BlockLimits, scale_then_pad
from kvpage.planner.search import TIE, slack
from kvpage.planner.slab_strategies import Layouts, find_nested, find_slab
from kvpage.plans import FrontPoint, RejectedStrategy
from kvpage.request import PlanRequest
from kvpage.specs import ceil_div


def group_by_strategy(request: PlanRequest, layers: tuple[Layer, ...]) -> Grouping:
    """The groups of `layers` by the request's strategy, and what is to be said of them. Raises as the strategy does."""
    problem = Problem(request, layers)
    if request.strategy == "unify":
        grouping = group_by_rule(layers, aligned=request.align_hybrid, layered=request.layered)
        return grouping if request.workload is None or not problem.owners else _judged(problem, "unify", [grouping])
    if not problem.owners:
        return group_by_rule(layers, aligned=False)
    if request.strategy == "auto":
        return _auto(problem)
    layouts = _found(problem)
    if outside := outside_bounds(layouts[0], request):
        field, words = outside
        detail = f"strategy {request.strategy}: {words}; raise it, or use another strategy"
        raise LayoutUnsupported(detail, errors=[FieldError(f"/{field}", detail)])
    return _judged(problem, request.strategy, layouts)


def _found(problem: Problem) -> Layouts:
    if problem.request.strategy == "scale_then_pad":
        return _scaled(problem, problem.request.align_hybrid)
    return find_slab(problem) if problem.request.strategy == "slab" else find_nested(problem)


def scaled_then_padded(problem: Problem, *, aligned: bool) -> Grouping:
    """By the rule `scale_then_pad`, in groups of the width that costs least. Raises as `group_by_rule` does."""
    unified = partial(_in_best_width, problem)
    return group_by_rule(problem.layers, aligned=aligned, unified=unified)


def _in_best_width(problem: Problem, layers: Sequence[Layer]) -> Grouping:
    request = problem.request
    decided = scale_then_pad(layers, BlockLimits(request.max_block_size, request.max_block_lcm))
    buckets = buckets_of(decided)
    page = next(iter(buckets)).page_size_bytes
    blocks = [(len(names), problem.demand.blocks(spec, spec.block_size)) for spec, names in buckets.items()]
    limits = replace(
        problem.limits, max_groups=max(problem.limits.max_groups, 0 if request.max_groups else len(buckets))
    )
    # A region's blocks are a page apart, however wide groups are.
    reach = None if limits.addressable_bytes is None else limits.addressable_bytes // page
    ranked = []
    for width in range(1, max(count for count, _ in blocks) + 1):
        groups = [ceil_div(count, width) for count, _ in blocks]
        slab = width * page
        held = slab * sum(n * each for n, (_, each) in zip(groups, blocks, strict=True))
        cost = held * slack(slab, limits.pool_bytes, reach)
        is_outside = sum(groups) > limits.most_groups(slab)
        ranked.append((is_outside, round(cost / TIE) if cost < inf else inf, sum(groups), width))
    is_outside, _, num_groups, width = min(ranked)
    if is_outside:
        detail = f"{num_groups} groups are needed, more than are allowed; raise max_groups or max_one_token_bytes"
        field = "max_one_token_bytes" if request.max_groups is None else "max_groups"
        raise LayoutUnsupported(detail, errors=[FieldError(f"/{field}", detail)])
    return in_regions(decided, buckets, width)


def _judged(problem: Problem, strategy: str, layouts: Layouts, rejected: tuple[RejectedStrategy, ...] = ()) -> Grouping:
    """The first of `layouts`, and what is to be said of it; the others are the rest of the front."""
    costs = [_cost(problem, grouping) for grouping in layouts]
    points = [front_point(strategy, grouping, cost) for grouping, cost in zip(layouts, costs, strict=True)]
    return replace(
        layouts[0],
        verdict=Verdict(
            strategy=strategy,
            efficiency=describe(layouts[0], costs[0], problem.floor, problem.workload),
            front=(points[0], *_not_worse(points[0], points[1:])),
            rejected=rejected,
        ),
    )


def _cost(problem: Problem, grouping: Grouping) -> float:
    return held_over_live(grouping, problem.owners, problem.demand, problem.request.memory_bytes)


def _not_worse(first: FrontPoint, others: Sequence[FrontPoint]) -> Iterator[FrontPoint]:
    """Those that no other point, nor `first`, is at least as good as in everything."""
    kept = {_merits(first): first}
    for point in sorted(others, key=_merits):
        merits = _merits(point)
        if not any(all(a <= b for a, b in zip(known, merits, strict=True)) for known in kept):
            kept[merits] = point
            yield point


def _merits(point: FrontPoint) -> tuple[float, ...]:
    return (
        point.held_over_live,
        point.max_block_stride_bytes,
        point.block_lcm_tokens,
        point.num_groups,
    )


# --- auto ---------------------------------------------------------------------------------------------------------

_Candidate = tuple[str, Callable[[], Layouts]]
_Tried = tuple[str, float, str]
"""Strategy, cost, and what speaks against it whatever it costs."""
_TOO_MANY = "needs {} groups, and an engine keeps a block table of each; {} are usual (max_groups)"


def _auto(problem: Problem) -> Grouping:
    """The strategy of least cost; of equal ones the first, which are those that keep each layer's pages together.

    One that needs more groups than a search may make is taken only where no other has a layout.
    """
    best: tuple[bool, float, str, Layouts] | None = None
    tried: list[_Tried] = []
    failures: list[KvpageError] = []
    for strategy, find in _candidates(problem):
        try:
            layouts = find()
        except KvpageError as error:
            failures.append(error)
            tried.append((strategy, inf, error.message))
            continue
        cost = _cost(problem, layouts[0])
        if narrow := _out_of_reach(problem, layouts[0]):
            tried.append((strategy, inf, narrow))
            continue
        if outside := outside_bounds(layouts[0], problem.request):
            tried.append((strategy, inf, outside[1]))
            continue
        groups = len(layouts[0].groups)
        has_many = groups > problem.usual_max_groups
        tried.append((strategy, cost, _TOO_MANY.format(groups, problem.usual_max_groups) if has_many else ""))
        if best is None or (has_many, cost + (0.0 if has_many < best[0] else TIE)) < best[:2]:
            best = (has_many, cost, strategy, layouts)
    if best is None:
        raise _nothing_left(tried, failures)
    _, cost, strategy, layouts = best
    return _judged(problem, strategy, layouts, tuple(_rejected(tried, strategy, cost)))


def _out_of_reach(problem: Problem, grouping: Grouping) -> str:
    """What is in the way of the number of blocks that the request names; "" when nothing is."""
    asked, most = problem.request.num_blocks, most_slabs(grouping, problem.owners)
    if asked is None or most is None or most[0] >= asked:
        return ""
    return f"{asked:,} blocks are named, and kernels of layer {most[1]!r} count in 32 bits, which end at {most[0]:,}"


def _candidates(problem: Problem) -> Iterator[_Candidate]:
    alignments = (False, True) if is_hybrid(problem.owners) else (False,)
    for aligned in alignments:
        yield "unify", partial(_unified, problem, aligned)
    if problem.request.layered:
        return
    for aligned in alignments:
        yield "scale_then_pad", partial(_scaled, problem, aligned)
    yield "slab", partial(find_slab, problem)
    if problem.request.allocator == "slabs":
        yield "nested", partial(find_nested, problem)


def _unified(problem: Problem, aligned: bool) -> Layouts:
    return [group_by_rule(problem.layers, aligned=aligned, layered=problem.request.layered)]


def _scaled(problem: Problem, aligned: bool) -> Layouts:
    return [scaled_then_padded(problem, aligned=aligned)]


def _rejected(tried: Sequence[_Tried], taken: str, cost: float) -> Iterator[RejectedStrategy]:
    """Each other strategy once, by the best that it did."""
    for strategy in dict.fromkeys(name for name, _, _ in tried if name != taken):
        other, why = min((other, why) for name, other, why in tried if name == strategy)
        if other == inf:
            yield RejectedStrategy(strategy=strategy, cost=None, reason=why or "not two slabs fit into the memory")
        elif why and other <= cost + TIE:
            yield RejectedStrategy(strategy=strategy, cost=other, reason=why)
        elif other <= cost + TIE:
            yield RejectedStrategy(strategy=strategy, cost=other, reason=f"holds as much as {taken}, which is simpler")
        else:
            more = f"holds {other - 1:.1%} more than requests need, {taken} {cost - 1:.1%}"
            yield RejectedStrategy(strategy=strategy, cost=other, reason=more)


def _nothing_left(tried: Sequence[_Tried], failures: Sequence[KvpageError]) -> KvpageError:
    reasons = "; ".join(dict.fromkeys(f"{name}: {why}" for name, _, why in tried if why))
    faults = next((error.errors for error in failures if error.errors), (FieldError("/strategy", reasons),))
    details = next((error.details for error in failures if error.details), {})
    known = CannotUnify if any(isinstance(error, CannotUnify) for error in failures) else LayoutUnsupported
    return known(f"no strategy has a layout for these layers. {reasons}", details=details, errors=faults)
