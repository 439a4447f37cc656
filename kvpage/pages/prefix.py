"""A prefix cache: the longest beginning of a prompt whose blocks are still there, in all groups of a plan at once.

    cache = PrefixCache.of(plan)
    match = cache.find(hashes, len(hashes) - 1)    # takes nothing
    cache.take(match)                              # holds its blocks
    cache.commit(group, blocks, hashes)            # from now on others find them

A prefix is a whole number of blocks in every group. Of it a full group needs every block, a window or chunk group those
that the next token looks back to, and a state group the state at exactly its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Ints
from kvpage.pages.events import EventLog
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import TokenHashes
from kvpage.pages.lifetimes import Lengths, Lifetime, lifetimes_of
from kvpage.pages.prefix_index import PrefixIndex, Snapshot
from kvpage.plans import Plan


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix found, and its blocks that are needed: of each group those that end where the prefix ends."""

    num_tokens: int
    blocks: tuple[Ints, ...]
    """By group, in the order of the sequence; the last one ends with the prefix."""
    hashes: tuple[tuple[bytes, ...], ...]
    """What these blocks hold."""

    @classmethod
    def of_nothing(cls, num_groups: int) -> Self:
        return cls(0, (np.empty(0, np.int32),) * num_groups, ((),) * num_groups)


class Hashes(Protocol):
    """Hashes of a prompt's blocks: `TokenHashes`, or as many as somebody else has computed."""

    def __len__(self) -> int:
        """Tokens."""

    def of(self, group: int, num_blocks: int) -> list[bytes]:
        """Of the first whole blocks in the group, at least so many."""


class PrefixCounts(NamedTuple):
    """Since the cache was made; `blocks` is now."""

    hits: int
    """Prompts of which a prefix was taken."""
    misses: int
    """Prompts of which there was none."""
    asked_tokens: int
    found_tokens: int
    stored: int
    """Blocks committed that nobody had committed before."""
    duplicates: int
    """Blocks committed whose content another block had already."""
    evicted: int
    """Blocks whose content went because their room was needed."""
    blocks: int


class PrefixCache:
    def __init__(self, pool: BlockPool, index: PrefixIndex, lifetimes: Sequence[Lifetime]) -> None:
        """`index.evicted` must be the pool's `on_evict`. What the pool keeps and the index's buffer names is found
        again; other content is dropped. Raises `SpecInvalid` where pool, index and lifetimes are not of one plan.
        """
        if pool.geometry != index.geometry or len(lifetimes) != len(pool.geometry.blocks_per_slab):
            raise SpecInvalid(
                f"a prefix cache needs pool, index and lifetimes of one plan; these are of {pool.geometry}, "
                f"{index.geometry} and {len(lifetimes)} groups"
            )
        self.pool, self.lifetimes = pool, tuple(lifetimes)
        self._index = index
        self._hits = self._misses = self._asked_tokens = self._found_tokens = self._duplicates = 0
        self.step_tokens = lcm(*(one.block_size for one in lifetimes))
        """Prefixes end after a multiple of it."""
        self.era = 0
        """How often it was cleared: what began in another era is not to be committed."""
        # Full groups first: how far they reach bounds what is looked up in the others.
        self._order = sorted(range(len(lifetimes)), key=lambda group: lifetimes[group].kind != "full")
        self.is_usable = not any(one.kind == "encoder" for one in lifetimes)
        """What a decoder computes depends on the encoder's input, which hashes of its own tokens do not name."""
        for group in range(len(lifetimes)):
            pool.drop(group, index.restore(group, pool.with_content(group)))

    @classmethod
    def of(
        cls,
        plan: Plan,
        lifetimes: Sequence[Lifetime] | None = None,
        *,
        pool_buffer: Any = None,
        index_buffer: Any = None,
        events: EventLog | None = None,
    ) -> Self:
        """With a pool and an index of its own. Raises as `BlockPool`, `PrefixIndex` and `lifetimes_of` do."""
        index = PrefixIndex(Geometry.of(plan), index_buffer, events=events)
        pool = BlockPool.of(plan, pool_buffer, on_evict=index.evicted)
        return cls(pool, index, lifetimes_of(plan) if lifetimes is None else lifetimes)

    @property
    def events(self) -> EventLog:
        return self._index.events

    @property
    def salt(self) -> bytes:
        """What hashes begin with where nobody says otherwise."""
        return b""

    def hashes(self, **identity: Any) -> TokenHashes:
        """Of a new request; `identity`: `salt` and `spans`, as `TokenHashes` takes them."""
        return TokenHashes([one.block_size for one in self.lifetimes], **identity)

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, hashes: Hashes, at_most_tokens: int) -> Match:
        """The longest prefix of at most `at_most_tokens` tokens. Takes nothing, so it may be evicted meanwhile."""
        most = min(at_most_tokens, len(hashes)) // self.step_tokens if self.is_usable else 0
        lengths: Lengths = np.arange(max(0, most) + 1) * self.step_tokens
        found: dict[int, list[int]] = {}
        for group in self._order:
            lifetime, end = self.lifetimes[group], int(lengths[-1]) // self.lifetimes[group].block_size
            found[group] = self._index.blocks_of(group, hashes.of(group, end)[:end])
            # Entry i: how many of the group's first i blocks are not there.
            gone = np.zeros(end + 1, np.int64)
            np.cumsum(np.asarray(found[group], np.int64) == 0, out=gone[1:])
            first = lifetime.first_prefix_blocks(lengths)
            lengths = lengths[gone[lengths // lifetime.block_size] == gone[first]]
        return self._match(int(lengths[-1]), hashes, found)

    def _match(self, num_tokens: int, hashes: Hashes, found: dict[int, list[int]]) -> Match:
        blocks, contents = [], []
        for group, lifetime in enumerate(self.lifetimes):
            first = int(lifetime.first_prefix_blocks(np.array([num_tokens]))[0])
            end = num_tokens // lifetime.block_size
            blocks.append(np.array(found[group][first:end], np.int32))
            contents.append(tuple(hashes.of(group, end)[first:end]))
        return Match(num_tokens, tuple(blocks), tuple(contents))

    def num_revived(self, match: Match) -> tuple[int, ...]:
        """By group: blocks of the match that nobody holds, so that taking it leaves as many fewer to be had."""
        held = (self.pool.times_held(group, blocks) for group, blocks in enumerate(match.blocks))
        return tuple(int(np.count_nonzero(times == 0)) for times in held)

    def take(self, match: Match) -> None:
        """Hold the blocks of a match; whoever does frees them, group by group. Raises `Conflict`, and holds none, when
        one of them has been evicted since it was found."""
        for group, blocks in enumerate(match.blocks):
            if self._index.blocks_of(group, match.hashes[group]) != blocks.tolist():
                raise Conflict(
                    f"blocks of a prefix in group {group} have been evicted since it was found; find it again"
                )
        taken = 0
        try:
            for group, blocks in enumerate(match.blocks):
                self.pool.retain(group, blocks)
                taken += 1
        except BaseException:
            self.give_back(match, taken)
            raise

    def give_back(self, match: Match, num_groups: int | None = None) -> None:
        """Undo `take`, in all groups or in the first `num_groups`."""
        for group, blocks in enumerate(match.blocks[:num_groups]):
            self.pool.free(group, blocks)

    def count(self, match: Match, asked_tokens: int) -> None:
        """A prompt of `asked_tokens` begins with this match."""
        self._hits += match.num_tokens > 0
        self._misses += match.num_tokens == 0
        self._asked_tokens += asked_tokens
        self._found_tokens += match.num_tokens

    # --- keeping ------------------------------------------------------------------------------------------------------

    def commit(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """These blocks, which must be held, hold what these hashes say: others find them from now on.

        Of two blocks with the same content the first stays the one that is found; the second is its holder's alone, and
        is free when that lets go. Raises as `BlockPool.commit`, and `Conflict` for a block that holds something else.
        """
        if len(blocks) == 1 and self._commit_one(group, blocks[0], hashes):
            return
        held = self.pool.times_held(group, blocks)
        if not held.all():
            self.pool.commit(group, blocks)  # says why not
        added = self._index.add(group, blocks, hashes)
        self._duplicates += added.num_duplicates
        try:
            self.pool.commit(group, added.new)
        except BaseException:
            self._index.remove(group, added.new)
            raise

    def _commit_one(self, group: int, block: int, hashes: Sequence[bytes]) -> bool:
        """Whether it was free to do so: the block is held, and its content is new. Changes nothing otherwise."""
        if not self.pool.is_held(group, block) or self._index.blocks_of(group, hashes) != [0]:
            return False
        added = self._index.add(group, [block], hashes)
        try:
            self.pool.commit_one(group, block)
        except BaseException:
            self._index.remove(group, added.new)
            raise
        return True

    def knows(self, group: int, content: bytes) -> bool:
        """Whether some block holds this."""
        return self._index.blocks_of(group, [content]) != [0]

    def content_of(self, group: int, block: int) -> bytes | None:
        """What others find in the block, which nobody may write into then; None where they do not find it."""
        return self._index.hash_of(group, block)

    def is_cached(self, group: int, block: int) -> bool:
        """Whether others find what is in the block."""
        return self._index.hash_of(group, block) is not None

    def clear(self) -> None:
        """Forget everything: weights have changed. Sequences go on with what they hold, and keep nothing for others."""
        self.era += 1
        for group in range(len(self.lifetimes)):
            blocks = self._index.blocks(group)
            self.pool.drop(group, blocks)
            self._index.remove(group, blocks)

    def snapshot(self) -> Snapshot:
        """All hashes, for a router that has missed events."""
        return self._index.snapshot()

    @property
    def counts(self) -> PrefixCounts:
        return PrefixCounts(
            hits=self._hits,
            misses=self._misses,
            asked_tokens=self._asked_tokens,
            found_tokens=self._found_tokens,
            stored=self._index.num_stored,
            duplicates=self._duplicates,
            evicted=self._index.num_evicted,
            blocks=len(self._index),
        )

    def check(self) -> None:
        """Prove pool and index, and that they agree. Raises `InternalError`."""
        self.pool.check()
        for group in range(len(self.lifetimes)):
            self._index.check(group, self.pool.with_content(group))
