"""`slab`: one block of a group is one slab, as in any engine's own allocator; block sizes are chosen with the slab."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from heapq import nlargest
from math import gcd, inf, lcm

from kvpage.planner.buckets import Bucket
from kvpage.planner.search import (
    SLAB_ALIGNMENT_BYTES,
    TIE,
    Bound,
    Choice,
    Found,
    Limits,
    Offer,
    Offers,
    best_of,
    solved,
    thinned,
    work_of,
)
from kvpage.planner.workload import Demand
from kvpage.specs import ceil_div

_MOST_COMMON_TOKENS = 4096
"""Where the bound is looser, and not loose enough: common multiples up to here are searched."""
_MOST_MULTIPLES, _LEAST_MULTIPLES = 512, 2  # for all buckets together, and for each at least


class SlabSearch:
    """Layouts of `buckets`. Exact, but for how unlike layers of one bucket are dealt out (`partition.compositions`)."""

    def __init__(self, buckets: Sequence[Bucket], demand: Demand, max_groups: int) -> None:
        self._offers = [Offers(bucket, demand, max_groups) for bucket in buckets]
        self._step = lcm(SLAB_ALIGNMENT_BYTES, *(bucket.stride_alignment_bytes for bucket in buckets))
        self._known: dict[object, list[Bound]] = {}

    def best(self, limits: Limits, best: Found | None = None) -> Found | None:
        """The layout of least cost within `limits`, or `best` where that is better; None where there is none."""
        found = self._best(self._unrestricted, limits, best)
        if found is best or found is None or found.block_lcm <= limits.max_block_lcm:
            return found
        for offers in self._with_common_multiple(limits.max_block_lcm):
            best = self._best(offers, limits, best)
        return best

    @cached_property
    def _unrestricted(self) -> Sequence[Offer]:
        return [make() for make in self._offers]

    def _best(self, offers: Sequence[Offer], limits: Limits, best: Found | None) -> Found | None:
        if offers is self._unrestricted:
            key = replace(limits, max_groups=0, max_block_lcm=0, max_one_token_bytes=None)
            if key not in self._known:  # asked for again and again, for the front
                self._known[key] = self._bounds(offers, limits, inf)
            bounds = self._known[key]
        else:
            bounds = self._bounds(offers, limits, inf if best is None else best.cost + TIE)
        work = work_of([len(offer) for offer in offers], limits.max_groups)
        return best_of(bounds, partial(_solve, offers, limits), limits, work, best)

    def _with_common_multiple(self, most: int) -> Iterator[Sequence[Offer]]:
        """The options narrowed to the divisors of each number up to `most`, but for numbers that divide another: block
        sizes whose common multiple is within bounds are among the divisors of one. Of very many numbers, those with
        most divisors."""
        sizes = [make.bucket.block_sizes for make in self._offers if make.bucket.spec.is_attention]
        unit = gcd(*(size for of in sizes for size in of))
        end = min(most, _MOST_COMMON_TOKENS)
        multiples = range(end // 2 // unit * unit + unit, end + 1, unit)
        divisors = {multiple: {size for of in sizes for size in of if multiple % size == 0} for multiple in multiples}
        most = max(_LEAST_MULTIPLES, _MOST_MULTIPLES // len(sizes))
        for multiple in nlargest(most, multiples, key=lambda multiple: len(divisors[multiple])):
            offers = [make(divisors[multiple]) for make in self._offers]
            if all(offers):
                yield offers

    def _bounds(self, offers: Sequence[Offer], limits: Limits, ceiling: float) -> list[Bound]:
        """What each slab costs at least: every bucket's best option, whatever the number of groups."""
        tables = [[(o.sizes_bytes, o.costs, o.split.num_groups) for o in offer] for offer in offers]
        is_dense = [offer[0].split.bucket.must_be_dense for offer in offers]
        bounds = []
        for slab in thinned(self._slabs(offers, limits), [len(offer) for offer in offers]):
            per_byte, groups = 0.0, 0
            for dense, table in zip(is_dense, tables, strict=True):
                least, fewest = inf, 0
                for sizes, costs, num_groups in table:
                    place = bisect_right(sizes, slab) - 1
                    if place >= 0 and (not dense or sizes[place] == slab):
                        least = min(least, costs[place])
                        fewest = fewest or num_groups  # options come with more and more groups
                per_byte += least
                groups += fewest
                if per_byte * slab > ceiling:
                    break
            else:
                bounds.append((per_byte * slab * limits.slack(slab), slab, groups))
        return sorted(bound for bound in bounds if bound[0] < inf)

    def _slabs(self, offers: Sequence[Offer], limits: Limits) -> list[int]:
        """At an optimum some group fills its slab, or the slab could be smaller: so these are all that matter."""
        least = max(min(option.sizes_bytes[0] for option in offer) for offer in offers)
        step = self._step
        slabs = {ceil_div(size, step) * step for offer in offers for option in offer for size in option.sizes_bytes}
        most = limits.max_block_stride_bytes or inf
        return [slab for slab in slabs if least <= slab <= most]


def _solve(offers: Sequence[Offer], limits: Limits, slab: int, ceiling: float) -> Found | None:
    weight = slab * limits.slack(slab)
    return solved(slab, [[*_choices(offer, slab, weight)] for offer in offers], limits.most_groups(slab), ceiling)


def _choices(offer: Offer, slab: int, weight: float) -> Iterator[Choice]:
    for option in offer:
        place = bisect_right(option.sizes_bytes, slab) - 1
        if place >= 0 and (not option.split.bucket.must_be_dense or option.sizes_bytes[place] == slab):
            yield Choice(option.split, option.indices[place], 1, option.costs[place] * weight)
