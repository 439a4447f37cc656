"""Timing that survives a noisy machine: the sides of a ratio take turns, and their medians are compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["s", "bytes"]
MIN_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds: 1 is what a report takes, less is for trying out."""

    scale: float = 1.0

    def rounds(self, full: int) -> int:
        return max(MIN_ROUNDS, round(full * self.scale))


@dataclass(frozen=True, slots=True)
class Runs:
    """One side: seconds, or bytes, of each round, in the order of the rounds."""

    name: str
    values: tuple[float, ...]

    def divided(self, count: int) -> Runs:
        """Of one of `count` pieces of work that each round did."""
        return Runs(self.name, tuple(value / count for value in self.values))

    def named(self, name: str) -> Runs:
        return Runs(name, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. Below 1 we are quicker, or smaller."""

    name: str
    peer: str
    unit: Unit
    ours: float
    """The median of all rounds."""
    theirs: float
    """The same of the peer."""
    low: float
    """A quarter of the rounds had a smaller ratio than this: ours over the peer's in the same round."""
    ratio: float
    """The median of those."""
    high: float
    """A quarter had a larger one."""
    rounds: int

    def __post_init__(self) -> None:
        figures = (self.ours, self.theirs, self.low, self.ratio, self.high)
        possible = all(math.isfinite(figure) and figure > 0 for figure in figures)
        if not possible or not self.low <= self.ratio <= self.high:
            raise ValueError(f"{self.name!r} beside {self.peer!r} has figures that cannot be: {figures}")
        if self.rounds < MIN_ROUNDS:
            raise ValueError(f"{self.name!r} has {self.rounds} rounds; a spread takes at least {MIN_ROUNDS}")


def take_turns(sides: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 3) -> dict[str, Runs]:
    """Run every side once a round, so that a slow moment of the machine hits all of them. By their names."""
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        for name, work in sides.items():
            started = time.perf_counter()
            work()
            if number >= 0:
                runs[name].append(time.perf_counter() - started)
    return {name: Runs(name, tuple(times)) for name, times in runs.items()}


def compare(ours: Runs, peer: Runs, *, unit: Unit = "s") -> Row:
    """Raises `ValueError` unless both sides ran the same rounds."""
    ratios = [mine / theirs for mine, theirs in zip(ours.values, peer.values, strict=True)]
    low, ratio, high = quantiles(ratios, n=4, method="inclusive")
    return Row(
        name=ours.name,
        peer=peer.name,
        unit=unit,
        ours=median(ours.values),
        theirs=median(peer.values),
        low=low,
        ratio=ratio,
        high=high,
        rounds=len(ratios),
    )


def beside(peer: str, sides: dict[str, Runs], names: Sequence[str] | None = None) -> list[Row]:
    """`names`, or all other sides, beside `peer`."""
    chosen = [name for name in sides if name != peer] if names is None else names
    return [compare(sides[name], sides[peer]) for name in chosen]
