"""Layers of unlike pages dealt into groups so that the widest group is as narrow as can be."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from kvpage.specs import ceil_div

Composition = tuple[int, ...]
"""How many layers of each kin one group has."""

_MOST_STEPS = 20_000  # of the exact search; above, the greedy answer stands


def compositions(counts: tuple[int, ...], weights: tuple[int, ...], num_groups: int) -> tuple[Composition, ...]:
    """What each of `num_groups` groups gets of `counts` layers of `weights` bytes, the widest group first.

    The widest group is the narrowest possible for layers of one weight; for two weights where that is found in a
    bounded number of steps; else it is what the greedy rule finds, heaviest layers first (at most 4/3 of it: Graham,
    1969).
    """
    if len(counts) == 1:
        fewer, more = divmod(counts[0], num_groups)
        return ((fewer + 1,),) * more + ((fewer,),) * (num_groups - more)
    found = _greedy(counts, weights, num_groups)
    total = sum(count * weight for count, weight in zip(counts, weights, strict=True))
    least = max(*weights, ceil_div(total, num_groups))
    if len(counts) == 2 and _load(found[0], weights) > least:
        found = _exact(counts, weights, num_groups, least, found)
    return found


def _load(composition: Composition, weights: Sequence[int]) -> int:
    return sum(count * weight for count, weight in zip(composition, weights, strict=True))


def _greedy(counts: tuple[int, ...], weights: tuple[int, ...], num_groups: int) -> tuple[Composition, ...]:
    """Each layer, the heaviest first, to the group that is the lightest so far."""
    loads = [(0, group) for group in range(num_groups)]
    dealt = [[0] * len(counts) for _ in range(num_groups)]
    for kin in sorted(range(len(counts)), key=lambda kin: -weights[kin]):
        for _ in range(counts[kin]):
            load, group = loads[0]
            dealt[group][kin] += 1
            heapq.heapreplace(loads, (load + weights[kin], group))
    return _widest_first(dealt, weights)


def _widest_first(dealt: Sequence[Sequence[int]], weights: tuple[int, ...]) -> tuple[Composition, ...]:
    return tuple(sorted((tuple(one) for one in dealt), key=lambda one: -_load(one, weights)))


def _exact(
    counts: tuple[int, ...], weights: tuple[int, ...], num_groups: int, least: int, greedy: tuple[Composition, ...]
) -> tuple[Composition, ...]:
    """The least load of which a deal exists, by bisection over the loads that can be."""
    first, second = counts
    most = _load(greedy[0], weights)
    if (first + 1) ** 2 * num_groups > _MOST_STEPS or first * second > _MOST_STEPS:
        return greedy
    loads = sorted(
        {
            load
            for x in range(first + 1)
            for y in range(second + 1)
            if least <= (load := x * weights[0] + y * weights[1]) < most
        }
    )
    deals: dict[int, tuple[Composition, ...]] = {}

    def fits(load: int) -> bool:
        deal = _deal_within(counts, weights, num_groups, load)
        if deal is not None:
            deals[load] = deal
        return deal is not None

    at = bisect_left(loads, True, key=fits)
    return deals[loads[at]] if at < len(loads) else greedy


def _deal_within(
    counts: tuple[int, ...], weights: tuple[int, ...], num_groups: int, load: int
) -> tuple[Composition, ...] | None:
    """A deal in which no group is heavier than `load`. Step by step: the most of the second kin that groups can take
    for each number of the first that they have taken."""
    first, second = counts
    takes = [(load - x * weights[0]) // weights[1] for x in range(first + 1) if x * weights[0] <= load]
    reached: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # x taken -> (y taken, x of the last group)
    for _ in range(num_groups):
        step: dict[int, tuple[int, int]] = {}
        for x, (y, _last) in reached[-1].items():
            for more, take in enumerate(takes[: first - x + 1]):
                total = min(second, y + take)
                if total > step.get(x + more, (-1, 0))[0]:
                    step[x + more] = (total, more)
        reached.append(step)
    if reached[-1].get(first, (-1, 0))[0] < second:
        return None
    dealt, x, left = [], first, second
    for step in reversed(reached[1:]):
        more = step[x][1]
        take = min(left, takes[more])
        dealt.append((more, take))
        x, left = x - more, left - take
    return _widest_first(dealt, weights)
