"""`slab`: one block of a group is one slab, as in any engine's own allocator; block sizes are chosen with the slab."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from math import gcd, inf, lcm

from kvpage.planner.buckets import Bucket
from kvpage.planner.search import (
    SLAB_ALIGNMENT_BYTES,
    Bound,
    Choice,
    Found,
    Limits,
    Option,
    best_of,
    options,
    solved,
)
from kvpage.planner.workload import Demand
from kvpage.specs import ceil_div

_Offers = Sequence[Sequence[Option]]


class SlabSearch:
    """Layouts of `buckets`. Exact, but for how unlike layers of one bucket are dealt out (`partition.compositions`)."""

    def __init__(self, buckets: Sequence[Bucket], demand: Demand, max_groups: int) -> None:
        self._all = [options(bucket, demand, max_groups) for bucket in buckets]
        self._step = lcm(SLAB_ALIGNMENT_BYTES, *(bucket.stride_alignment_bytes for bucket in buckets))

    def best(self, limits: Limits, best: Found | None = None) -> Found | None:
        """The layout of least cost within `limits`, or `best` where that is better; None where there is none."""
        found = self._best(self._all, limits, best)
        if found is best or found is None or found.block_lcm <= limits.max_block_lcm:
            return found
        for offers in self._with_common_multiple(limits.max_block_lcm):
            best = self._best(offers, limits, best)
        return best

    def _best(self, offers: _Offers, limits: Limits, best: Found | None) -> Found | None:
        ceiling = inf if best is None else best.cost
        return best_of(self._bounds(offers, limits, ceiling), partial(_solve, offers, limits), best)

    def _with_common_multiple(self, most: int) -> Iterator[_Offers]:
        """The options narrowed to the divisors of each number up to `most`, but for numbers that divide another: block
        sizes whose common multiple is within bounds are among the divisors of one."""
        sizes = [offer[0].split.bucket.block_sizes for offer in self._all if offer[0].split.bucket.spec.is_attention]
        unit = gcd(*(size for of in sizes for size in of))
        for multiple in range(most // 2 // unit * unit + unit, most + 1, unit):
            allowed = {size for of in sizes for size in of if multiple % size == 0}
            offers = [
                [option.narrowed(allowed) if option.split.bucket.spec.is_attention else option for option in offer]
                for offer in self._all
            ]
            if all(offer[0].indices for offer in offers):
                yield offers

    def _bounds(self, offers: _Offers, limits: Limits, ceiling: float) -> list[Bound]:
        """What each slab costs at least: every bucket's best option, whatever the number of groups."""
        tables = [[(option.sizes_bytes, option.costs) for option in offer] for offer in offers]
        is_dense = [offer[0].split.bucket.must_be_dense for offer in offers]
        bounds = []
        for slab in self._slabs(offers, limits):
            per_byte = 0.0
            for dense, table in zip(is_dense, tables, strict=True):
                least = inf
                for sizes, costs in table:
                    place = bisect_right(sizes, slab) - 1
                    if place >= 0 and costs[place] < least and (not dense or sizes[place] == slab):
                        least = costs[place]
                per_byte += least
                if per_byte * slab > ceiling:
                    break
            else:
                bounds.append((per_byte * slab * limits.slack(slab), slab))
        return sorted(bound for bound in bounds if bound[0] < inf)

    def _slabs(self, offers: _Offers, limits: Limits) -> list[int]:
        """At an optimum some group fills its slab, or the slab could be smaller: so these are all that matter."""
        least = max(min(sizes[0] for option in offer if (sizes := option.sizes_bytes)) for offer in offers)
        step = self._step
        slabs = {ceil_div(size, step) * step for offer in offers for option in offer for size in option.sizes_bytes}
        most = limits.max_block_stride_bytes or inf
        return [slab for slab in slabs if least <= slab <= most]


def _solve(offers: _Offers, limits: Limits, slab: int, ceiling: float) -> Found | None:
    weight = slab * limits.slack(slab)
    return solved(slab, [[*_choices(offer, slab, weight)] for offer in offers], limits.most_groups(slab), ceiling)


def _choices(offer: Sequence[Option], slab: int, weight: float) -> Iterator[Choice]:
    for option in offer:
        place = bisect_right(option.sizes_bytes, slab) - 1
        if place >= 0 and (not option.split.bucket.must_be_dense or option.sizes_bytes[place] == slab):
            yield Choice(option.split, option.indices[place], 1, option.costs[place] * weight)
