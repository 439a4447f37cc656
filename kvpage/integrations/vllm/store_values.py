"""What the scheduler tells the workers of the store in each step, and what they say of it. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Blocks that were kept, to be copied into blocks of the engine: the i-th to the i-th."""

    store_blocks: tuple[int, ...]
    engine_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Blocks of the engine that are computed when the step is, in the order of the prompt."""

    engine_blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    """By which they are found."""
    era: int | None
    """Of the store, when the request began: nothing is kept of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Of one step. Loads come before it is computed, saves after."""

    step: int
    pool_id: str
    """The store that the scheduler means: of another of the same name nothing is read."""
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a worker tells the scheduler with its output."""

    step: int
    """Loads of the steps up to this one are done."""

    def aggregate(self, other: Self) -> StoreReport:
        """vLLM's: of several workers, what all have done."""
        return StoreReport(min(self.step, other.step))
