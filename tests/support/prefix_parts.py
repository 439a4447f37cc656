"""A prefix cache over given lifetimes, and what the longest prefix is by definition, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from kvpage.pages.allocator import BlockPool
from kvpage.pages.events import EventLog
from kvpage.pages.geometry import Geometry
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import PrefixIndex

FULL = Lifetime(kind="full", block_size=2)
WINDOW = Lifetime(kind="window", block_size=2, reach=5)
CHUNK = Lifetime(kind="chunk", block_size=2, reach=6)
STATE = Lifetime(kind="state", block_size=4)


def lifetimes(kinds: Sequence[str] = ("full", "window", "chunk", "state")) -> st.SearchStrategy[Lifetime]:
    """Small ones, so that short prompts show every case."""

    def build(kind: Any, block_size: int, reach: int, speculative: int) -> Lifetime:
        has_reach = kind in ("window", "chunk")
        return Lifetime(
            kind=kind,
            block_size=block_size,
            reach=reach if has_reach else 0,
            num_speculative_blocks=speculative if kind == "state" else 0,
        )

    return st.builds(build, st.sampled_from(kinds), st.sampled_from([1, 2, 3, 4]), st.integers(1, 9), st.integers(0, 2))


def make_cache(
    groups: Sequence[Lifetime],
    *,
    num_slabs: int = 200,
    cut: Sequence[int] | None = None,
    pool_buffer: Any = None,
    index_buffer: Any = None,
    events: EventLog | None = None,
) -> PrefixCache:
    geometry = Geometry(num_slabs, tuple(cut or [1] * len(groups)))
    index = PrefixIndex(geometry, index_buffer, events=events)
    return PrefixCache(BlockPool(geometry, pool_buffer, on_evict=index.evicted), index, groups)


def looks_back_to(lifetime: Lifetime, token: int) -> range:
    """Tokens before `token` whose data is read when it is computed. States are not read by token."""
    if lifetime.kind == "window":
        return range(max(0, token - (lifetime.reach - 1)), token)
    if lifetime.kind == "chunk":
        return range(token - token % lifetime.reach, token)
    return range(token)


def needed_blocks(lifetime: Lifetime, num_tokens: int) -> set[int]:
    """Blocks of a prefix of so many tokens that must be there."""
    if lifetime.kind == "state":
        return {num_tokens // lifetime.block_size - 1} if num_tokens else set()
    return {token // lifetime.block_size for token in looks_back_to(lifetime, num_tokens)}


def longest_prefix(groups: Sequence[Lifetime], cached: Sequence[set[int]], at_most_tokens: int) -> int:
    """By trying every length; `cached`: by group, the blocks that are there."""
    return max(
        num_tokens
        for num_tokens in range(at_most_tokens + 1)
        if all(
            num_tokens % lifetime.block_size == 0 and needed_blocks(lifetime, num_tokens) <= there
            for lifetime, there in zip(groups, cached, strict=True)
        )
    )
