"""`nested`: small blocks in slabs of any size. Every group cuts its slabs evenly into as many blocks as fit.

A block keeps the smallest size that kernels take, so tails stay short and prefix hits fine; what is chosen is the slab,
the groups of each bucket, and the blocks each cuts its slabs into. The stride of a block is slab / blocks, exactly, so
that one strided view covers the pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf, isqrt, lcm, log2

from kvpage.planner.buckets import Bucket, Split
from kvpage.planner.search import (
    FINE_SHARE,
    PARTLY_FILLED,
    SLAB_ALIGNMENT_BYTES,
    Bound,
    Choice,
    Found,
    Limits,
    Offers,
    best_of,
    choose,
    solved,
    thinned,
    work_of,
)
from kvpage.planner.workload import Demand
from kvpage.specs import ceil_div

_MOST_BLOCKS_OF_ONE = 64
"""Slabs are tried that hold 1 to so many blocks of some group."""
_MOST_GROWTH = 1.01
"""A slab is made larger by so much at most to be cut evenly."""
_CHURN = 0.002
"""Windows free blocks here and there while requests run, so slabs of many blocks stay partly filled: so much of their
bytes for each doubling of the blocks in a slab. A tenth of what simulation says of short windows under short requests:
enough to choose among layouts that are otherwise equal (docs/decisions/0011)."""
_MOST_DIVISORS = 2**12  # numbers tried, to find into how many blocks a slab may be cut
_GROUP_PRICE = 1e-5
"""Each group costs an engine time in every step: so much of a request's bytes is saved gladly for one group less."""


@dataclass(frozen=True, slots=True)
class _Offer:
    split: Split
    block_bytes: int
    cost: float
    """For every byte of a block's stride."""
    step: int
    """Bytes that the stride must be a multiple of."""
    recycles: bool
    """Frees blocks while a request runs."""

    def cost_of(self, slab: int, count: int) -> float:
        """Of slabs cut into `count` blocks. It falls with `count`: a shorter stride saves more than churn costs."""
        churn = 1 + _CHURN * log2(count) if self.recycles else 1.0
        return self.cost * (slab / count) * churn


class NestedSearch:
    def __init__(self, buckets: Sequence[Bucket], demand: Demand, max_groups: int) -> None:
        self._offers = [
            [
                _Offer(
                    option.split,
                    option.sizes_bytes[0],
                    option.costs[0],
                    lcm(SLAB_ALIGNMENT_BYTES, bucket.stride_alignment_bytes),
                    bucket.spec.is_attention and bucket.spec.keeps_at_most_tokens is not None,
                )
                for option in Offers(bucket, demand, max_groups)()
            ]
            for bucket in buckets
        ]
        self._step = lcm(*(offer[0].step for offer in self._offers))
        self._known: dict[Limits, list[Bound]] = {}

    def best(self, limits: Limits) -> Found | None:
        """The layout of least cost within `limits`; None where there is none."""
        bounds = self._bounds(limits)
        work = 2 * work_of([len(offer) for offer in self._offers], limits.max_groups)
        return best_of(bounds, partial(self._solve, limits), limits, work)

    def _bounds(self, of: Limits) -> list[Bound]:
        """In ascending order, as if blocks need not divide the slab evenly. Where the pool has 256 of some slabs, no
        larger ones."""
        limits = replace(of, max_groups=0, max_block_lcm=0, max_block_stride_bytes=None, max_one_token_bytes=None)
        if limits not in self._known:  # asked for again and again, for the front
            self._known[limits] = self._made_bounds(limits)
        return self._known[limits]

    def _made_bounds(self, limits: Limits) -> list[Bound]:
        pool_bytes = limits.pool_bytes
        least = max(min(offer.block_bytes for offer in offers) for offers in self._offers)
        slabs = [slab for slab in self._slabs() if slab >= least]
        fine = [slab for slab in slabs if pool_bytes is None or slab * FINE_SHARE <= pool_bytes]
        bounds = []
        for slab in thinned(fine or slabs, [len(offers) for offers in self._offers]):
            price, total, groups = _group_price(slab, limits), 0.0, 0
            for offers in self._offers:
                groups += next((o.split.num_groups for o in offers if o.block_bytes <= slab), 0)
                total += min(
                    (
                        offer.cost_of(slab, slab // offer.block_bytes) + price * offer.split.num_groups
                        for offer in offers
                        if offer.block_bytes <= slab
                    ),
                    default=inf,
                )
            bounds.append((total * limits.slack(slab), slab, groups))
        return sorted(bound for bound in bounds if bound[0] < inf)

    def _slabs(self) -> set[int]:
        step = self._step
        sizes = {offer.block_bytes for offers in self._offers for offer in offers}
        return {ceil_div(n * size, step) * step for size in sizes for n in range(1, _MOST_BLOCKS_OF_ONE + 1)}

    def _solve(self, limits: Limits, slab: int, ceiling: float) -> Found | None:
        """The slab, or one a little larger that all its groups cut evenly."""
        found = self._solve_at(limits, slab, ceiling)
        loose = choose([[*_uneven(of, slab)] for of in self._offers], limits.most_groups(slab))
        if loose is None:
            return found
        even = self._step * lcm(*(choice.blocks_per_slab for choice in loose))
        larger = ceil_div(slab, even) * even
        if larger == slab or larger > slab * _MOST_GROWTH:
            return found
        other = self._solve_at(limits, larger, ceiling)
        return min((one for one in (found, other) if one is not None), key=lambda one: one.order, default=None)

    def _solve_at(self, limits: Limits, slab: int, ceiling: float) -> Found | None:
        price, weight = _group_price(slab, limits), limits.slack(slab)
        offers = [[*_choices(of, slab, price, weight, limits)] for of in self._offers]
        return solved(slab, offers, limits.most_groups(slab), ceiling)


def _group_price(slab: int, limits: Limits) -> float:
    partly_filled = 0.0 if limits.pool_bytes is None else PARTLY_FILLED * slab / limits.pool_bytes
    return _GROUP_PRICE + partly_filled


def _choices(offers: Sequence[_Offer], slab: int, price: float, weight: float, limits: Limits) -> Iterator[Choice]:
    longest = limits.max_block_stride_bytes or slab
    for offer in offers:
        count = _blocks_per_slab(slab, offer)
        if count and slab // count <= longest:
            cost = offer.cost_of(slab, count) + price * offer.split.num_groups
            yield Choice(offer.split, 0, count, cost * weight)


def _uneven(offers: Sequence[_Offer], slab: int) -> Iterator[Choice]:
    """As if any number of blocks divided the slab evenly."""
    for offer in offers:
        if count := slab // offer.block_bytes:
            yield Choice(offer.split, 0, count, offer.cost_of(slab, count))


def _blocks_per_slab(slab: int, offer: _Offer) -> int:
    """The most blocks that divide the slab evenly into legal strides; 0 where there are none."""
    if offer.split.bucket.must_be_dense:
        return 0 if slab % offer.block_bytes or offer.block_bytes % offer.step else slab // offer.block_bytes
    units, rest = divmod(slab, offer.step)
    least = ceil_div(offer.block_bytes, offer.step)
    if rest or units < least:
        return 0
    divisors = _divisors(units)
    return divisors[bisect_right(divisors, units // least) - 1]


@lru_cache(maxsize=64)
def _divisors(value: int) -> tuple[int, ...]:
    """Ascending; of values above 2^24 those that are small or leave a small one."""
    small = [number for number in range(1, min(isqrt(value), _MOST_DIVISORS) + 1) if value % number == 0]
    return tuple(sorted({*small, *(value // number for number in small)}))
