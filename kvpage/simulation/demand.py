"""Blocks that a request of n tokens needs of every group, and when that changes. The same for all requests."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvpage.simulation.layout import SimulatedLayout

Wanted: TypeAlias = tuple[tuple[int, int], ...]
"""(index into `SimulatedLayout.groups`, blocks of each of these groups), without those of no blocks."""


class Change(NamedTuple):
    """What one more token does to the blocks of a request."""

    gone: Wanted
    """Blocks, the oldest, that are no longer needed."""
    new: Wanted


class Demand:
    """The demand of one layout; remembers what it was asked, as requests of all lengths ask again and again."""

    def __init__(self, layout: SimulatedLayout) -> None:
        self._growths = tuple(group.growth for group in layout.groups)
        self._changes: dict[int, Change] = {}
        self._next: dict[int, int | None] = {}

    def blocks(self, tokens: int) -> Wanted:
        """All blocks that a request of `tokens` tokens holds."""
        return tuple((index, growth.blocks(tokens)) for index, growth in enumerate(self._growths))

    def change(self, tokens: int) -> Change:
        """From `tokens` - 1 to `tokens` tokens."""
        known = self._changes.get(tokens)
        if known is None:
            firsts = [(i, g.first_block(tokens) - g.first_block(tokens - 1)) for i, g in enumerate(self._growths)]
            ends = [(i, g.end_block(tokens) - g.end_block(tokens - 1)) for i, g in enumerate(self._growths)]
            known = Change(tuple(pair for pair in firsts if pair[1]), tuple(pair for pair in ends if pair[1]))
            self._changes[tokens] = known
        return known

    def next_change(self, tokens: int) -> int | None:
        """The least number of tokens above `tokens` that changes blocks or the growth of live tokens, if any does."""
        if tokens not in self._next:
            changes = [growth.next_change(tokens) for growth in self._growths]
            self._next[tokens] = min((change for change in changes if change is not None), default=None)
        return self._next[tokens]
