"""Who may write into a block, and what is still being read by copies under way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvpage.pages.block_source import BlockSource, PrefixSource
from kvpage.pages.lifetimes import Lifetime


class Sharing:
    """Holds what copies are read from until they are done, so that nobody, in no process, is given it before."""

    def __init__(self, pool: BlockSource, prefix: PrefixSource | None) -> None:
        self._pool, self._prefix = pool, prefix
        self._sources: Counter[tuple[int, int]] = Counter()

    @property
    def sources(self) -> Counter[tuple[int, int]]:
        """(group, block), and how many copies read it."""
        return self._sources.copy()

    def copies_done(self) -> None:
        while self._sources:
            (group, block), times = self._sources.popitem()
            self._pool.free(group, [block] * times)

    def hold_source(self, group: int, block: int) -> None:
        """One holding of the block passes from a sequence to a copy."""
        self._sources[group, block] += 1

    def is_writable(self, group: int, block: int) -> bool:
        """Whether a sequence that holds the block is alone with it. Copies under way read before anybody writes."""
        if self._prefix and self._prefix.is_cached(group, block):
            return False
        return int(self._pool.times_held(group, [block])[0]) - self._sources[group, block] <= 1


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sequences of a pool have in common."""

    pool: BlockSource
    lifetimes: tuple[Lifetime, ...]
    prefix: PrefixSource | None
    sharing: Sharing
