"""Several layouts in the same memory, several seeds each: the figures that are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from kvpage.errors import SpecInvalid
from kvpage.simulation.caching import CachingReplay, CachingResult, Policy
from kvpage.simulation.conversations import Conversations
from kvpage.simulation.layout import SimulatedLayout
from kvpage.simulation.replay import MAX_STEPS, Replay, ReplayResult
from kvpage.simulation.streams import Stream

MAX_RUNS = 1_000
CONVERSATION_STEPS = 4_000
CONVERSATION_WARM_UP_STEPS = 4_000  # some three turns of everybody: the pool is full and the cache as old as it gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much to replay. Raises `SpecInvalid` for what is out of bounds."""

    steps: int
    """Measured steps of a run."""
    warm_up_steps: int = 0
    """Steps before them. 0: measuring begins with an empty pool, when no request is old yet."""
    runs: int = 3
    """Runs with the seeds `seed`, `seed` + 1, …"""
    seed: int = 1

    def __post_init__(self) -> None:
        bounds = {"steps": (1, MAX_STEPS), "warm_up_steps": (0, MAX_STEPS), "runs": (1, MAX_RUNS), "seed": (0, 2**62)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise SpecInvalid(f"{name} is {getattr(self, name)}; choose from {low} to {high:,}")

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout: means over the runs."""

    name: str
    memory_bytes: int
    mean_running: float
    """Requests running, a mean over the measured steps."""
    fewest_running: float
    """Of the runs' means the least; with the next, how far chance goes."""
    most_running: float
    live_share: float
    """Bytes of tokens and states still needed, over the memory."""
    held_share: float
    """Bytes of slabs that belong to a group, over the memory."""
    preemptions: float
    finished: float
    refused: float
    """Requests that do not fit even alone."""


def replay_layouts(layouts: Iterable[SimulatedLayout], stream: Stream, extent: Extent) -> Iterator[Row]:
    """A row for each layout, all from the same requests."""
    for layout in layouts:
        results = [
            Replay(layout, stream.make(seed)).run(extent.steps, warm_up_steps=extent.warm_up_steps)
            for seed in extent.seeds
        ]
        yield _row(layout, results)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """One layout and policy: means over the runs. Shares of the memory but for the first."""

    name: str
    policy: Policy
    memory_bytes: int
    found_share: float
    """Prefix tokens found, over prefix tokens asked for."""
    least_found: float
    most_found: float
    mean_running: float
    mean_waiting: float
    cached_share: float
    """Bytes of cached blocks."""
    pinned_share: float
    """Bytes of slabs that belong to a group for cached blocks alone."""
    preemptions: float
    evicted_blocks: float


def replay_conversations(
    layouts: Iterable[SimulatedLayout], conversations: Conversations, extent: Extent
) -> Iterator[CacheRow]:
    """A row for each layout, and a second one, of the other policy, where a slab holds several blocks."""
    for layout in layouts:
        policies: list[Policy] = ["older_of_block_and_slab"]
        if any(group.blocks_per_slab > 1 for group in layout.groups):
            policies.insert(0, "own_oldest")
        for policy in policies:
            results = [
                CachingReplay(layout, conversations, seed, policy).run(extent.steps, warm_up_steps=extent.warm_up_steps)
                for seed in extent.seeds
            ]
            yield _cache_row(layout, policy, results)


def _cache_row(layout: SimulatedLayout, policy: Policy, results: list[CachingResult]) -> CacheRow:
    found = [result.found_share for result in results]
    return CacheRow(
        name=layout.name,
        policy=policy,
        memory_bytes=layout.memory_bytes,
        found_share=fmean(found),
        least_found=min(found),
        most_found=max(found),
        mean_running=fmean(result.mean_running for result in results),
        mean_waiting=fmean(result.mean_waiting for result in results),
        cached_share=fmean(result.cached_share for result in results),
        pinned_share=fmean(result.pinned_share for result in results),
        preemptions=fmean(result.preemptions for result in results),
        evicted_blocks=fmean(result.evicted_blocks for result in results),
    )


def _row(layout: SimulatedLayout, results: list[ReplayResult]) -> Row:
    running = [result.mean_running for result in results]
    return Row(
        name=layout.name,
        memory_bytes=layout.memory_bytes,
        mean_running=fmean(running),
        fewest_running=min(running),
        most_running=max(running),
        live_share=fmean(result.live_share for result in results),
        held_share=fmean(result.held_share for result in results),
        preemptions=fmean(result.preemptions for result in results),
        finished=fmean(result.finished for result in results),
        refused=fmean(result.refused for result in results),
    )
