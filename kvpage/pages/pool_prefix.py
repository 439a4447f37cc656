"""The prefix cache of a pool that leases hold blocks of, where its plan allows one."""

from __future__ import annotations

from collections.abc import Sequence

from kvpage.errors import KvpageError, NotSupported, SpecInvalid, shorten
from kvpage.pages.allocator import BlockPool
from kvpage.pages.hashing import HASH_BYTES, ROOT
from kvpage.pages.leases import LeaseBook
from kvpage.pages.lifetimes import Lifetime, lifetimes_of
from kvpage.pages.prefix import Match, PrefixCache, PrefixCounts
from kvpage.pages.prefix_index import PrefixIndex, Snapshot
from kvpage.pages.steps import Content
from kvpage.plans import Plan


class GivenHashes:
    """Hashes of a prompt's blocks that somebody else has computed, as `TokenHashes` would have them."""

    def __init__(self, hashes: Sequence[Sequence[bytes]], lifetimes: Sequence[Lifetime]) -> None:
        """By group. Raises `SpecInvalid` for another number of groups or what is no hash."""
        if len(hashes) != len(lifetimes):
            raise SpecInvalid(f"hashes of {len(hashes)} groups for a pool of {len(lifetimes)}; give those of each")
        self._hashes = [[_checked(one) for one in some] for some in hashes]
        self._num_tokens = min(
            len(some) * lifetime.block_size for some, lifetime in zip(hashes, lifetimes, strict=True)
        )

    def __len__(self) -> int:
        """Tokens that every group has hashes of."""
        return self._num_tokens

    def of(self, group: int, num_blocks: int) -> list[bytes]:
        return self._hashes[group][:num_blocks]


def _checked(content: bytes) -> bytes:
    if len(content) != HASH_BYTES or content == ROOT:
        raise SpecInvalid(f"{shorten(content.hex())} is no hash: those have {HASH_BYTES} bytes, and are not all zeros")
    return content


class PoolPrefix:
    def __init__(self, plan: Plan, blocks: BlockPool, index: PrefixIndex, book: LeaseBook) -> None:
        self._blocks, self._book = blocks, book
        self._cache: PrefixCache | None = None
        self._before: PrefixCounts | None = None
        self.why_not = ""
        try:
            self._cache = PrefixCache(blocks, index, lifetimes_of(plan))
        except KvpageError as error:  # a plan without max_model_len does not say how many states a request has
            self.why_not = error.message
        if self._cache is not None and book.is_forgetting:  # a process was killed in the middle of it
            self._cache.clear()
            book.end_forgetting()

    @property
    def cache(self) -> PrefixCache:
        """Raises `NotSupported` where the plan allows none."""
        if self._cache is None or not self._cache.is_usable:
            why_not = self.why_not or "what a decoder computes depends on the encoder's input, which hashes do not name"
            raise NotSupported(f"this pool keeps no prefixes: {why_not}")
        return self._cache

    def find(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> Match:
        cache = self.cache
        return cache.find(GivenHashes(hashes, cache.lifetimes), at_most_tokens)

    def count(self, match: Match, asked_tokens: int) -> None:
        self.cache.count(match, asked_tokens)

    def commit(self, group: int, content: Content) -> None:
        """Raises `SpecInvalid` where blocks and hashes are not as many, and as `PrefixCache.commit` does."""
        cache = self.cache
        if content.era not in (None, self._book.era):
            return
        if len(content.ids) != len(content.hashes):
            raise SpecInvalid(
                f"{len(content.ids)} blocks of group {group} are to be committed with {len(content.hashes)} hashes;"
                " each block has one"
            )
        if len(set(ids := [int(block) for block in content.ids])) < len(ids):
            raise SpecInvalid(f"a block of group {group} is to be committed twice at once; it holds one content")
        cache.commit(group, ids, [_checked(one) for one in content.hashes])

    def clear(self) -> None:
        """Forget everything: weights have changed."""
        cache = self.cache
        self._book.begin_era()
        cache.clear()
        self._book.end_forgetting()

    def snapshot(self) -> Snapshot:
        return self.cache.snapshot()

    def went_on(self, before: PrefixCounts | None) -> None:
        """This takes the place of one that has counted so far."""
        self._before = before

    @property
    def counts(self) -> PrefixCounts | None:
        if self._cache is None or self._before is None:
            return None if self._cache is None else self._cache.counts
        now = self._cache.counts
        return PrefixCounts(*map(sum, zip(self._before, now, strict=True)))._replace(blocks=now.blocks)

    def check(self) -> None:
        """Raises `InternalError`."""
        if self._cache is None:
            self._blocks.check()
        else:
            self._cache.check()
