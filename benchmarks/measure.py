"""Timing that survives a noisy machine: the two sides of a ratio take turns, and the medians are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each run, sorted."""

    name: str
    runs_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.runs_s)

    def divided(self, count: int) -> Timing:
        """Of one of `count` pieces of work that each run did."""
        return Timing(self.name, tuple(run_s / count for run_s in self.runs_s))

    def percentile_s(self, percent: int) -> float:
        return self.runs_s[min(len(self.runs_s) - 1, len(self.runs_s) * percent // 100)]


def take_turns(sides: dict[str, Callable[[], object]], *, rounds: int, warm_up: int = 3) -> list[Timing]:
    """Run every side once a round, so that a slow moment of the machine hits all of them."""
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        for name, work in sides.items():
            started = time.perf_counter()
            work()
            if number >= 0:
                runs[name].append(time.perf_counter() - started)
    return [Timing(name, tuple(sorted(times))) for name, times in runs.items()]


def print_table(title: str, timings: Sequence[Timing], *, floor: str) -> None:
    """One line a side: median, 99th percentile, and the median as a multiple of `floor`'s."""
    base = next(timing for timing in timings if timing.name == floor)
    print(f"{title}  (n = {len(base.runs_s)}, ratio to: {floor})")
    for timing in timings:
        p50, p99 = timing.median_s * 1e6, timing.percentile_s(99) * 1e6
        ratio = timing.median_s / base.median_s
        print(f"  {timing.name:<40} p50 {p50:>10,.1f} µs   p99 {p99:>10,.1f} µs   ratio {ratio:6.2f}")
