"""Slabs of one kind of group whose free blocks may still hold what a later turn asks for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from kvpage.simulation.slabs import Run, append_run


@dataclass(slots=True, eq=False)
class Prefix:
    """What a conversation left in the pool; of use only while all of it is there."""

    is_whole: bool = True
    entries: list[list[Entry]] = field(default_factory=list)
    """Group by group, oldest blocks first."""


@dataclass(slots=True, eq=False)
class Entry:
    """Cached blocks of one prefix in one slab."""

    prefix: Prefix
    slab: int
    blocks: int
    used_at: int
    """Number of the turn that used it last, in the order in which turns end; the same for all of a prefix."""
    is_cached: bool = True


class Evicted(NamedTuple):
    """What an eviction freed."""

    blocks: int
    slabs: int
    """Slabs that became empty and are given up."""


@dataclass(slots=True, eq=False)
class _Slab:
    used: int = 0
    cached: int = 0
    entries: dict[Entry, None] = field(default_factory=dict)
    newest: int | None = None
    """Last use of anything cached in it."""

    def add(self, entry: Entry) -> None:
        self.entries[entry] = None
        if self.newest is None or entry.used_at > self.newest:
            self.newest = entry.used_at

    def remove(self, entry: Entry) -> None:
        del self.entries[entry]
        if entry.used_at == self.newest:
            self.newest = max((each.used_at for each in self.entries), default=None)


class CachedSlabs:
    """Every block of an owned slab is used, cached or free: used + cached + free = blocks per slab × slabs owned.

    Of equally full slabs the one is taken from that has not changed the longest; of equally old idle slabs (those that
    only cached blocks keep) the one that has been owned the longest is evicted. With one block per slab no slab is told
    from another: all of them are slab 0, and each cached block is an idle slab.
    """

    def __init__(self, blocks_per_slab: int) -> None:
        self._blocks_per_slab = blocks_per_slab
        self._slabs: dict[int, _Slab] = {}
        self._by_free: list[dict[int, None]] = [{} for _ in range(blocks_per_slab + 1)]
        self._with_room = 0  # bit f is set when _by_free[f] has a slab, f > 0
        self._oldest: list[tuple[int, int, Entry]] = []  # heap; what is no longer cached is skipped
        self._pushes = 0
        self._idle: list[tuple[int, int]] = []  # heap of (newest use, slab); what changed is skipped
        self._numbers = 0
        self.used_blocks = self.cached_blocks = self.owned_slabs = self.idle_slabs = 0
        self.cached_beside_used = 0
        """Cached blocks in slabs that are in use as well."""

    @property
    def free_blocks(self) -> int:
        return self._blocks_per_slab * self.owned_slabs - self.used_blocks - self.cached_blocks

    @property
    def free_beside_used(self) -> int:
        """Free blocks in slabs that are in use as well."""
        in_idle = self._blocks_per_slab * self.idle_slabs - (self.cached_blocks - self.cached_beside_used)
        return self.free_blocks - in_idle

    def add_slab(self) -> None:
        """Own one slab more, all free."""
        self.owned_slabs += 1
        if self._blocks_per_slab > 1:
            self._numbers += 1
            self._slabs[self._numbers] = _Slab()
            self._file(self._numbers, self._blocks_per_slab)

    def drop_empty(self) -> int:
        """Give up the slabs of which nothing is used or cached. Returns how many."""
        if self._blocks_per_slab == 1:
            empty = self.free_blocks
        else:
            numbers = list(self._by_free[self._blocks_per_slab])
            empty = len(numbers)
            for number in numbers:
                self._unfile(number, self._blocks_per_slab)
                del self._slabs[number]
        self.owned_slabs -= empty
        return empty

    def take(self, blocks: int, into: deque[Run]) -> None:
        """Use `blocks` of the free blocks, of which there are so many; fullest slab first."""
        if self._blocks_per_slab == 1:
            self.used_blocks += blocks
            append_run(into, 0, blocks)
            return
        while blocks:
            free = (self._with_room & -self._with_room).bit_length() - 1
            number = next(iter(self._by_free[free]))
            taken = min(free, blocks)
            self._change(number, used=taken)
            append_run(into, number, taken)
            blocks -= taken

    def give_back(self, blocks: int, oldest_first: deque[Run]) -> int:
        """Free the first `blocks` used blocks. Returns the slabs that became empty and are given up."""
        before = self.owned_slabs
        while blocks:
            number, run = oldest_first.popleft()
            given = min(run, blocks)
            if given < run:
                oldest_first.appendleft(Run(number, run - given))
            blocks -= given
            self._unused(number, given)
        return before - self.owned_slabs

    def _unused(self, number: int, blocks: int) -> None:
        if self._blocks_per_slab == 1:
            self.used_blocks -= blocks
            self.owned_slabs -= blocks
        else:
            self._change(number, used=-blocks)

    def cache(self, runs: deque[Run], prefix: Prefix, used_at: int) -> list[Entry]:
        """Used blocks become cached ones."""
        entries = [Entry(prefix, number, blocks, used_at) for number, blocks in runs]
        for entry in entries:
            self._put(entry)
        return entries

    def _put(self, entry: Entry) -> None:
        entry.is_cached = True
        self._pushes += 1
        heappush(self._oldest, (entry.used_at, self._pushes, entry))
        if self._blocks_per_slab == 1:
            self.used_blocks -= entry.blocks
            self.cached_blocks += entry.blocks
            self.idle_slabs += entry.blocks
        else:
            self._slabs[entry.slab].add(entry)
            self._change(entry.slab, used=-entry.blocks, cached=entry.blocks)

    def reuse(self, entries: list[Entry]) -> deque[Run]:
        """Cached blocks become used ones."""
        for entry in entries:
            entry.is_cached = False
            if self._blocks_per_slab == 1:
                self.used_blocks += entry.blocks
                self.cached_blocks -= entry.blocks
                self.idle_slabs -= entry.blocks
            else:
                self._slabs[entry.slab].remove(entry)
                self._change(entry.slab, used=entry.blocks, cached=-entry.blocks)
        return deque(Run(entry.slab, entry.blocks) for entry in entries)

    def undo_reuse(self, entries: list[Entry]) -> None:
        """As if `reuse` had not been."""
        for entry in entries:
            self._put(entry)

    def forget(self, entries: list[Entry]) -> int:
        """Free what is left of cached blocks. Returns the slabs given up."""
        before = self.owned_slabs
        for entry in entries:
            if entry.is_cached:
                self._evict(entry, entry.blocks)
        return before - self.owned_slabs

    def oldest(self) -> int | None:
        """When the least recently used cached block was used; None without any."""
        while self._oldest and not self._oldest[0][2].is_cached:
            heappop(self._oldest)
        return self._oldest[0][0] if self._oldest else None

    def evict_oldest(self, at_most: int) -> Evicted:
        """Free `at_most` blocks of the least recently used ones, or as many as lie together."""
        before = self.owned_slabs
        assert self.oldest() is not None  # the caller asked
        entry = self._oldest[0][2]
        blocks = min(at_most, entry.blocks)
        self._evict(entry, blocks)
        return Evicted(blocks, before - self.owned_slabs)

    def oldest_idle(self) -> int | None:
        """Of the slabs that only cached blocks keep, the least newest use; None without any."""
        if self._blocks_per_slab == 1:
            return self.oldest()
        while self._idle and self._newest_if_idle(self._idle[0][1]) != self._idle[0][0]:
            heappop(self._idle)
        return self._idle[0][0] if self._idle else None

    def evict_idle(self) -> Evicted:
        """Give up the slab of `oldest_idle` with all that is cached in it."""
        assert self.oldest_idle() is not None  # the caller asked
        if self._blocks_per_slab == 1:
            return self.evict_oldest(1)
        entries = list(self._slabs[self._idle[0][1]].entries)
        blocks = sum(entry.blocks for entry in entries)
        for entry in entries:
            self._evict(entry, entry.blocks)
        return Evicted(blocks, 1)

    def _evict(self, entry: Entry, blocks: int) -> None:
        entry.prefix.is_whole = False
        entry.blocks -= blocks
        entry.is_cached = entry.blocks > 0
        if self._blocks_per_slab == 1:
            self.cached_blocks -= blocks
            self.idle_slabs -= blocks
            self.owned_slabs -= blocks
            return
        if not entry.blocks:
            self._slabs[entry.slab].remove(entry)
        self._change(entry.slab, cached=-blocks)

    def _newest_if_idle(self, number: int) -> int | None:
        slab = self._slabs.get(number)
        return None if slab is None or slab.used else slab.newest

    def _change(self, number: int, *, used: int = 0, cached: int = 0) -> None:
        """Change what the blocks of a slab are, file it again, give it up when it is empty."""
        slab = self._slabs[number]
        self._count(slab, -1)
        self._unfile(number, self._blocks_per_slab - slab.used - slab.cached)
        slab.used += used
        slab.cached += cached
        self._count(slab, 1)
        free = self._blocks_per_slab - slab.used - slab.cached
        if free == self._blocks_per_slab:
            del self._slabs[number]
            self.owned_slabs -= 1
            return
        self._file(number, free)
        if not slab.used and slab.newest is not None:
            heappush(self._idle, (slab.newest, number))

    def _count(self, slab: _Slab, sign: int) -> None:
        self.used_blocks += sign * slab.used
        self.cached_blocks += sign * slab.cached
        self.idle_slabs += sign * (slab.cached > 0 and not slab.used)
        self.cached_beside_used += sign * (slab.cached if slab.used else 0)

    def _file(self, number: int, free: int) -> None:
        if free:
            self._by_free[free][number] = None
            self._with_room |= 1 << free

    def _unfile(self, number: int, free: int) -> None:
        if free:
            filed = self._by_free[free]
            del filed[number]
            if not filed:
                self._with_room ^= 1 << free
