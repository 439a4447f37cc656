"""Sequences whose blocks are held by a lease: what one process has cached, another that leases of the same pool finds.

    sequences = leased_sequences(plan, lease)
    with sequences.new(prompt) as sequence:
        copies = sequence.advance()

As `Sequences` over a `BlockPool` of this process. Each step that takes or gives back blocks asks the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

import numpy as np

from kvpage.errors import Conflict
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids
from kvpage.pages.block_lease import FoundPrefix
from kvpage.pages.hashing import TokenHashes
from kvpage.pages.lifetimes import Lifetime, lifetimes_of
from kvpage.pages.prefix import Match
from kvpage.pages.sequences import Sequences
from kvpage.pages.steps import Content, Step
from kvpage.plans import Plan


class Lease(Protocol):
    """`SocketLease` or `LocalLease`."""

    @property
    def era(self) -> int: ...
    @property
    def salt(self) -> bytes: ...
    def new_key(self) -> int: ...
    def step(self, step: Step, /) -> object: ...
    def allocate_all(self, counts: Mapping[int, int], /) -> dict[int, Ints]: ...
    def free(self, group: int, ids: Ids, /) -> None: ...
    def retain(self, group: int, ids: Ids, /) -> None: ...
    def inspect(self, group: int, ids: Ids, /) -> tuple[Ints, Ints]: ...
    def find_contents(self, group: int, hashes: Sequence[bytes], /) -> Ints: ...
    def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int, /) -> FoundPrefix: ...
    def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int, /) -> FoundPrefix: ...


def leased_sequences(plan: Plan, lease: Lease, lifetimes: Sequence[Lifetime] | None = None) -> Sequences:
    """Raises as `lifetimes_of` does where it is to find them."""
    return Sequences.cached(LeasedPrefixes(lease, lifetimes_of(plan) if lifetimes is None else lifetimes))


class LeasedBlocks:
    """A `BlockSource`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def allocate_all(self, counts: Mapping[int, int]) -> dict[int, Ints]:
        if any(counts.values()):
            return self._lease.allocate_all(counts)
        return {group: np.empty(0, np.int32) for group in counts}

    def free(self, group: int, ids: Ids) -> None:
        if len(ids):
            self._lease.free(group, ids)

    def retain(self, group: int, ids: Ids) -> None:
        if len(ids):
            self._lease.retain(group, ids)

    def times_held(self, group: int, ids: Ids) -> Ints:
        return self._lease.inspect(group, ids)[0]


@dataclass(frozen=True, slots=True)
class LeasedMatch(Match):
    """With what it takes to ask for it again."""

    given: tuple[tuple[bytes, ...], ...] = ()
    """By group, hashes of all blocks up to the end of the match."""
    num_revived: tuple[int, ...] = ()


class LeasedPrefixes:
    """A `PrefixSource`."""

    def __init__(self, lease: Lease, lifetimes: Sequence[Lifetime]) -> None:
        self._lease, self.lifetimes, self.pool = lease, tuple(lifetimes), LeasedBlocks(lease)
        self.step_tokens = lcm(*(one.block_size for one in lifetimes))
        self.is_usable = not any(one.kind == "encoder" for one in lifetimes)

    @property
    def era(self) -> int:
        """As of the last prefix that was looked for."""
        return self._lease.era

    @property
    def salt(self) -> bytes:
        """Of the lease's tenant, who finds no other's prefixes."""
        return self._lease.salt

    def find(self, hashes: TokenHashes, at_most_tokens: int) -> LeasedMatch:
        whole_tokens = at_most_tokens // self.step_tokens * self.step_tokens
        found = self._lease.find_prefix(self._given(hashes, whole_tokens), whole_tokens)
        given = tuple(map(tuple, self._given(hashes, found.num_tokens)))
        needed = tuple(some[len(some) - len(ids) :] for some, ids in zip(given, found.ids, strict=True))
        return LeasedMatch(found.num_tokens, found.ids, needed, given, found.num_revived)

    def _given(self, hashes: TokenHashes, num_tokens: int) -> list[list[bytes]]:
        ends = [num_tokens // one.block_size for one in self.lifetimes]
        return [hashes.of(group, end)[:end] for group, end in enumerate(ends)]

    def num_revived(self, match: Match) -> tuple[int, ...]:
        assert isinstance(match, LeasedMatch)
        return match.num_revived

    def take(self, match: Match) -> None:
        """Raises `Conflict`, and holds none, when one of its blocks has been evicted since it was found."""
        assert isinstance(match, LeasedMatch)
        if not match.num_tokens:
            return
        taken = self._lease.take_prefix(match.given, match.num_tokens)
        if [ids.tolist() for ids in taken.ids] != [ids.tolist() for ids in match.blocks]:
            for group, ids in enumerate(taken.ids):
                self.pool.free(group, ids)
            raise Conflict("blocks of a prefix have been evicted since it was found; find it again")

    def give_back(self, match: Match) -> None:
        for group, ids in enumerate(match.blocks):
            self.pool.free(group, ids)

    def count(self, match: Match, asked_tokens: int) -> None:
        """The worker has, when it was taken."""

    def commit(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        if blocks:
            content = Content(blocks, hashes, self.era)
            self._lease.step(Step(key=self._lease.new_key(), commit={group: content}))

    def knows(self, group: int, content: bytes) -> bool:
        return bool(self._lease.find_contents(group, [content])[0])

    def is_cached(self, group: int, block: int) -> bool:
        return bool(self._lease.inspect(group, [block])[1][0])
