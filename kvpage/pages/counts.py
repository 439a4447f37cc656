"""How many blocks and slabs are where."""

from __future__ import annotations

from typing import NamedTuple

from kvpage.pages.arrays import Ints


class BlockCounts(NamedTuple):
    """Of one group: used + cached + free = blocks of its slabs."""

    used: int
    """Held by somebody."""
    cached: int
    """Held by nobody, and with content."""
    free: int
    """Of its slabs, neither."""
    slabs: int
    """Slabs it owns: something of them is used or cached."""


class SlabCounts(NamedTuple):
    """Of the pool: owned + free + 1 (the null block's) = slabs."""

    owned: int
    idle: int
    """Of the owned ones, those with cached blocks only: any group may have them when none is free."""
    free: int


class SlabTable(NamedTuple):
    """Slabs of one group, an entry each."""

    slabs: Ints
    used: Ints
    cached: Ints
