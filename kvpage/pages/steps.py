"""What a lease asks of its pool at once, and what it is given."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids

Counts = Mapping[int, int]
"""By group: blocks."""


class Content(NamedTuple):
    """Blocks that are computed, and the hashes by which others find them."""

    ids: Ids
    hashes: Sequence[bytes]
    era: int | None = None
    """That in which they were computed: nothing is kept of another than the pool's. None: of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All of it is done, or nothing: `commit`, then `retain`, `free`, `allocate`, each by group.

    Only what is committed stays so where the rest is refused: it is a fact about these blocks.
    """

    key: int = 0
    """Of the caller's choice, for one who asks again because no answer came: the same answer, and nothing is done
    twice. Another for each step; 0: none."""
    commit: Mapping[int, Content] = field(default_factory=dict)
    retain: Mapping[int, Ids] = field(default_factory=dict)
    free: Mapping[int, Ids] = field(default_factory=dict)
    allocate: Counts = field(default_factory=dict)
    as_runs: bool = False
    """Whether the blocks of each group must follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Blocks that the lease holds now. `clear`: those of them whose bytes may be another's; whoever is given them
    writes zeros before anything else, or what is read through a mask may be no number."""

    ids: dict[int, Ints] = field(default_factory=dict)
    clear: dict[int, Ints] = field(default_factory=dict)


def new_key() -> int:
    """For a request that may have to be made again. Whoever counts on from it meets no other's."""
    return 1 + secrets.randbits(61)


NOTHING = Grant()
NOT_KEPT = (0, NOTHING)
"""In place of a step's serial and what it was answered with."""
