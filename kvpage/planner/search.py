"""The search for a slab: its bytes, the groups of each bucket, and what a block of each group is.

A slab is what one block id (or a few, `blocks_per_slab`) owns over all groups; groups lie over each other from its
first byte. Cost: mean over a workload of (bytes held / bytes kept), which adds up over buckets once the slab's bytes
are fixed. So: every size a slab can sensibly have, in the order of a bound from below on its cost, until the bound is
no better than the best found; for each, the exact choice under the bounds on groups and on the common multiple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from math import inf, lcm

from kvpage.planner.buckets import Bucket, Split
from kvpage.planner.workload import Demand
from kvpage.specs import ceil_div

TIE = 1e-9  # costs closer than this are equal
Bound = tuple[float, int, int]
"""A bound from below on the cost of a slab, the slab's bytes, and the fewest groups it takes."""
SLAB_ALIGNMENT_BYTES = 128  # of every block stride: a cache line pair, and what vectorised loads ask for
PARTLY_FILLED = 0.5
"""Of the slab that a group is cutting blocks from, the share that lies idle on average."""
_MOST_WORK, _LEAST_SLABS = 1_000_000, 16
_STEPS_OF_MAKING = 16
_MOST_BOUNDS = 250_000  # slabs times options that bounds are computed of
FINE_SHARE = 256  # a slab smaller than this part of the pool is not charged for the null block and the rest


@dataclass(frozen=True, slots=True)
class Limits:
    """What a layout may be. `pool_bytes` None: not known."""

    max_groups: int
    max_block_lcm: int
    max_block_stride_bytes: int | None = None
    max_one_token_bytes: int | None = None
    pool_bytes: int | None = None
    addressable_bytes: int | None = None
    """Of slabs: what kernels that count in 32 bits reach."""
    num_slabs: int | None = None
    """Where the request names a number, which they must reach then."""

    def slack(self, slab_bytes: int) -> float:
        """See `slack`."""
        most = None if self.addressable_bytes is None else self.addressable_bytes // slab_bytes
        if most is not None and self.num_slabs is not None and most < self.num_slabs:
            return inf
        return slack(slab_bytes, self.pool_bytes, most)

    def most_groups(self, slab_bytes: int) -> int:
        """Groups that a plan with such slabs may have: a request of one token holds a slab of each."""
        if self.max_one_token_bytes is None:
            return self.max_groups
        return min(self.max_groups, self.max_one_token_bytes // slab_bytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """What became of one bucket."""

    split: Split
    size_index: int
    blocks_per_slab: int
    cost: float

    @property
    def block_size(self) -> int:
        return self.split.bucket.block_sizes[self.size_index]


@dataclass(frozen=True, slots=True)
class Found:
    """A slab and what each bucket makes of it."""

    slab_bytes: int
    choices: tuple[Choice, ...]
    cost: float

    @property
    def num_groups(self) -> int:
        return sum(choice.split.num_groups for choice in self.choices)

    @property
    def block_lcm(self) -> int:
        """Least common multiple of the block sizes, in tokens: what prefix hits and schedules step by."""
        return lcm(*(c.block_size for c in self.choices if c.split.bucket.spec.is_attention))

    @property
    def max_block_stride_bytes(self) -> int:
        return max(self.slab_bytes // choice.blocks_per_slab for choice in self.choices)

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Smaller is better: cost, then groups, common multiple, slab, largest block."""
        largest = max(choice.block_size for choice in self.choices)
        return (round(self.cost / TIE), self.num_groups, self.block_lcm, self.slab_bytes, largest)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to deal a bucket out, and the block sizes it may take, ascending. A larger block that costs as much as a
    smaller one is left out."""

    split: Split
    indices: tuple[int, ...]
    """Of the block sizes, in the bucket's."""
    sizes_bytes: tuple[int, ...]
    """A block of the widest group, for each."""
    costs: tuple[float, ...]
    """Of each, for every byte of the slab that one block owns."""


Offer = Sequence[Option]
"""Of one bucket."""


class Offers:
    """Makes the options of a bucket."""

    def __init__(self, bucket: Bucket, demand: Demand, max_groups: int) -> None:
        self.bucket = bucket
        self._splits = tuple(bucket.splits(max_groups))
        self._blocks = [demand.blocks(bucket.spec, size) for size in bucket.block_sizes]

    def __call__(self, allowed: Set[int] | None = None) -> Offer:
        """All of them, or those with a block of an `allowed` number of tokens; of states, all."""
        kept: list[int] = []
        for index, size in enumerate(self.bucket.block_sizes):
            if allowed is not None and self.bucket.spec.is_attention and size not in allowed:
                continue
            is_better = not kept or self._blocks[index] < self._blocks[kept[-1]] * (1 - TIE)
            if is_better or self.bucket.must_be_dense:
                kept.append(index)
        return tuple(self._option(split, kept) for split in self._splits if kept)

    def _option(self, split: Split, kept: Sequence[int]) -> Option:
        sizes = tuple(split.sizes_bytes[index] for index in kept)
        return Option(split, tuple(kept), sizes, tuple(split.num_groups * self._blocks[index] for index in kept))


def slack(slab_bytes: int, pool_bytes: int | None, most_slabs: int | None = None) -> float:
    """What the null slab, bytes too few for another slab, and slabs beyond `most_slabs` add to the cost; infinite where
    not two slabs fit."""
    if pool_bytes is None:
        return 1.0
    slabs = pool_bytes // slab_bytes
    if slabs >= FINE_SHARE and (most_slabs is None or slabs <= most_slabs):
        return 1.0
    usable = (slabs if most_slabs is None else min(slabs, most_slabs)) - 1
    return pool_bytes / (usable * slab_bytes) if usable > 0 else inf


def choose(offers: Sequence[Sequence[Choice]], max_groups: int) -> tuple[Choice, ...] | None:
    """One offer of each bucket, of least cost with at most `max_groups` groups together; the fewest groups where
    costs are equal. None where there is none. Exact: step by step over the groups used so far."""
    fewest = [min((choice.split.num_groups for choice in offer), default=max_groups + 1) for offer in offers]
    spare = max_groups - sum(fewest)  # groups beyond the fewest
    best: dict[int, tuple[float, _Chain]] = {0: (0.0, None)} if spare >= 0 else {}
    for offer, least in zip(offers, fewest, strict=True):
        step: dict[int, tuple[float, _Chain]] = {}
        for used, (cost, chosen) in best.items():
            for choice in offer:
                more = used + choice.split.num_groups - least
                if more <= spare and cost + choice.cost < step.get(more, (inf,))[0]:
                    step[more] = (cost + choice.cost, (chosen, choice))
        best = step
    if not best:
        return None
    cheapest = min(cost for cost, _ in best.values())
    return _chosen(next(chosen for _, (cost, chosen) in sorted(best.items()) if cost <= cheapest + TIE))


_Chain = tuple["_Chain", Choice] | None
"""Choices so far, the last one outermost: many share their beginnings."""


def _chosen(chain: _Chain) -> tuple[Choice, ...]:
    choices = []
    while chain is not None:
        chain, choice = chain
        choices.append(choice)
    return tuple(reversed(choices))


Solve = Callable[[int, float], Found | None]
"""The best layout with slabs of so many bytes; None where it would cost more than the second argument."""


def best_of(
    bounds: Iterable[Bound], solve: Solve, limits: Limits, work: int, best: Found | None = None
) -> Found | None:
    """The best of `best` and the solutions of all slabs that may be better. `bounds` ascend; `work`: steps that one
    solution takes, about. Of models with very many options not all slabs are tried, and the first are the likeliest."""
    possible = (bound for bound in bounds if bound[2] <= limits.most_groups(bound[1]))
    for bound, slab_bytes, _ in islice(possible, max(_LEAST_SLABS, _MOST_WORK // work)):
        ceiling = inf if best is None else best.cost + TIE
        if bound > ceiling:
            break
        found = solve(slab_bytes, ceiling)
        if found is not None and (best is None or found.order < best.order):
            best = found
    return best


def work_of(num_options: Sequence[int], max_groups: int) -> int:
    """Steps of `choose` for buckets with so many options, and of making a choice of each."""
    return sum(num_options) * (_STEPS_OF_MAKING + max(1, max_groups - len(num_options) + 1))


def thinned(slabs: Iterable[int], num_options: Sequence[int]) -> list[int]:
    """Slabs to compute bounds of, ascending: an even choice, where all of them would take long, the largest among them,
    as it takes the fewest groups."""
    ordered = sorted(slabs, reverse=True)
    return ordered[:: ceil_div(max(1, len(ordered) * sum(num_options)), _MOST_BOUNDS)][::-1]


def solved(slab_bytes: int, offers: Sequence[Sequence[Choice]], max_groups: int, ceiling: float) -> Found | None:
    """The best choice among `offers`, where it may cost no more than `ceiling`."""
    if not all(offers) or sum(min(choice.cost for choice in offer) for offer in offers) > ceiling:
        return None
    chosen = choose(offers, max_groups)
    return None if chosen is None else Found(slab_bytes, chosen, sum(choice.cost for choice in chosen))
