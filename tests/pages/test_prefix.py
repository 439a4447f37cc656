"""The longest cached prefix, what keeps it and what ends it."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import Conflict, InternalError, SpecInvalid
from kvpage.pages.arrays import state_bytes
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import TokenHashes
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.prefix_index import PrefixIndex, index_bytes
from support.prefix_parts import CHUNK, FULL, STATE, WINDOW, lifetimes, longest_prefix, make_cache, needed_blocks


def known(cache: PrefixCache, tokens: Any, **identity: Any) -> TokenHashes:
    hashes = cache.hashes(**identity)
    hashes.append(tokens)
    return hashes


def keep(cache: PrefixCache, hashes: TokenHashes, group: int, blocks: range | set[int]) -> dict[int, int]:
    """Cache these blocks of a request, held by nobody afterwards; from their number to their id."""
    numbers = sorted(blocks)
    ids = cache.pool.allocate(group, len(numbers)).tolist()
    contents = hashes.of(group, max(numbers, default=-1) + 1)
    cache.commit(group, ids, [contents[number] for number in numbers])
    cache.pool.free(group, ids)
    return dict(zip(numbers, ids, strict=True))


def keep_all(cache: PrefixCache, hashes: TokenHashes) -> list[dict[int, int]]:
    return [
        keep(cache, hashes, group, range(len(hashes) // lifetime.block_size))
        for group, lifetime in enumerate(cache.lifetimes)
    ]


@given(st.data(), st.lists(lifetimes(), min_size=1, max_size=3), st.integers(0, 30))
def test_the_longest_prefix_is_that_of_all_lengths_tried(data: Any, groups: list[Lifetime], num_tokens: int) -> None:
    cache = make_cache(groups)
    hashes = known(cache, range(num_tokens))
    cached, ids = [], []
    for group, lifetime in enumerate(groups):
        blocks = num_tokens // lifetime.block_size
        # Mostly there, or nothing longer than a few tokens would ever be found.
        gone = data.draw(st.sets(st.integers(0, max(0, blocks - 1)), max_size=3))
        cached.append(set(range(blocks)) - gone)
        ids.append(keep(cache, hashes, group, cached[-1]))
    at_most = data.draw(st.integers(0, num_tokens))
    match = cache.find(hashes, at_most)
    assert match.num_tokens == longest_prefix(groups, cached, at_most)
    for group, lifetime in enumerate(groups):
        needed = sorted(needed_blocks(lifetime, match.num_tokens))
        assert match.blocks[group].tolist() == [ids[group][block] for block in needed]
    cache.check()


@pytest.mark.parametrize(
    ("lifetime", "cached", "found"),
    [
        (FULL, {0, 1, 3}, 4),
        (WINDOW, {2, 3}, 8),  # token 8 looks back to 4 … 7
        (WINDOW, {3}, 0),
        (CHUNK, {0}, 6),
        (CHUNK, {3}, 8),  # token 8 looks back to 6 and 7
        (CHUNK, set(), 6),  # token 6 begins a chunk, and looks back to none
        (STATE, {1}, 8),
        (STATE, {0}, 4),
    ],
)
def test_each_kind_by_example(lifetime: Lifetime, cached: set[int], found: int) -> None:
    cache = make_cache([lifetime])
    hashes = known(cache, range(10))
    keep(cache, hashes, 0, cached)
    assert cache.find(hashes, 9).num_tokens == found


def test_a_request_of_another_salt_finds_nothing() -> None:
    cache = make_cache([FULL])
    keep_all(cache, known(cache, range(10), salt=b"a"))
    assert cache.find(known(cache, range(10), salt=b"a"), 10).num_tokens == 10
    assert cache.find(known(cache, range(10), salt=b"b"), 10).num_tokens == 0
    assert cache.find(known(cache, range(10)), 10).num_tokens == 0


def test_what_is_taken_is_held_and_not_evicted_until_it_is_given_back() -> None:
    cache = make_cache([FULL, WINDOW], num_slabs=12)
    hashes = known(cache, range(10))
    keep_all(cache, hashes)
    match = cache.find(hashes, 8)
    assert cache.num_revived(match) == (4, 2)
    before = [cache.pool.available(group) for group in (0, 1)]
    cache.take(match)
    assert [cache.pool.available(group) for group in (0, 1)] == [available - 6 for available in before]
    assert cache.num_revived(match) == (0, 0)
    cache.pool.allocate(0, cache.pool.available(0))  # evicts everything else
    again = cache.find(hashes, 10)
    assert again.num_tokens == 8
    assert [blocks.tolist() for blocks in again.blocks] == [blocks.tolist() for blocks in match.blocks]
    cache.give_back(match)
    cache.pool.allocate(1, cache.pool.available(1))
    assert cache.find(hashes, 10).num_tokens == 0
    cache.check()


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    cache = make_cache([FULL], num_slabs=9)
    hashes = known(cache, range(16))
    keep_all(cache, hashes)
    found = []
    for _ in range(8):
        found.append(cache.find(hashes, 16).num_tokens)
        cache.pool.allocate_one(0)
    assert found == [16, 14, 12, 10, 8, 6, 4, 2]


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_match_that_was_evicted_meanwhile_is_not_taken(is_reused: bool) -> None:
    """Also when its blocks keep other content by then, and could be held."""
    cache = make_cache([FULL], num_slabs=3)
    hashes, others = known(cache, range(4)), known(cache, range(10, 14))
    keep_all(cache, hashes)
    match = cache.find(hashes, 4)
    evicting = cache.pool.allocate(0, 2)
    if is_reused:
        cache.commit(0, evicting.tolist(), others.of(0, 2))
    cache.pool.free(0, evicting)
    with pytest.raises(Conflict):
        cache.take(match)
    assert cache.pool.counts(0)[:2] == (0, 2 if is_reused else 0)


def test_of_two_blocks_with_the_same_content_the_first_is_found_and_the_second_is_its_holders_alone() -> None:
    cache = make_cache([FULL])
    hashes = known(cache, range(2))
    first, second = cache.pool.allocate(0, 2).tolist()
    cache.commit(0, [first], hashes.of(0, 1))
    cache.commit(0, [second], hashes.of(0, 1))
    cache.commit(0, [first], hashes.of(0, 1))  # once more: nothing new
    assert cache.find(hashes, 2).blocks[0].tolist() == [first]
    assert (cache.content_of(0, first), cache.content_of(0, second)) == (hashes.of(0, 1)[0], None)
    cache.pool.free(0, [first, second])
    assert cache.pool.counts(0)[:3] == (0, 1, 0)  # the second keeps nothing
    assert (cache.counts.stored, cache.counts.duplicates) == (1, 1)
    cache.check()


def test_two_blocks_with_the_same_content_in_one_batch() -> None:
    cache = make_cache([FULL])
    content = known(cache, range(2)).of(0, 1)[0]
    ids = cache.pool.allocate(0, 2).tolist()
    cache.commit(0, ids, [content, content])
    cache.pool.free(0, ids)
    assert cache.pool.counts(0).cached == 1
    cache.check()


def test_a_block_cannot_hold_something_else_before_it_is_evicted() -> None:
    cache = make_cache([FULL])
    hashes, others = known(cache, range(2)), known(cache, range(5, 9))
    block = cache.pool.allocate_one(0)
    cache.commit(0, [block], hashes.of(0, 1))
    other = cache.pool.allocate_one(0)
    with pytest.raises(Conflict):
        cache.commit(0, [other, block], others.of(0, 2))
    assert cache.find(others, 4).num_tokens == 0
    cache.check()


@pytest.mark.parametrize("wrong", [0, 7, 10_000, -1])
def test_only_held_blocks_are_committed(wrong: int) -> None:
    cache = make_cache([FULL])
    hashes = known(cache, range(4))
    block = cache.pool.allocate_one(0)
    with pytest.raises((Conflict, SpecInvalid)):
        cache.commit(0, [block, wrong], hashes.of(0, 2))
    assert cache.find(hashes, 4).num_tokens == 0
    cache.check()


def test_clearing_forgets_what_is_cached_and_what_is_held() -> None:
    cache = make_cache([FULL])
    hashes = known(cache, range(8))
    keep_all(cache, hashes)
    match = cache.find(hashes, 4)
    cache.take(match)
    cache.clear()
    assert cache.find(hashes, 8).num_tokens == 0
    assert cache.pool.counts(0)[:2] == (2, 0)
    cache.give_back(match)
    assert cache.pool.counts(0)[:2] == (0, 0)
    cache.check()


def test_with_an_encoder_there_is_no_prefix() -> None:
    cache = make_cache([FULL, Lifetime(kind="encoder", block_size=2)])
    hashes = known(cache, range(8))
    keep(cache, hashes, 0, range(4))
    assert cache.find(hashes, 8).num_tokens == 0


def test_counts_say_what_was_found_and_what_went() -> None:
    cache = make_cache([FULL], num_slabs=5)
    hashes = known(cache, range(8))
    keep_all(cache, hashes)
    cache.count(cache.find(hashes, 8), 9)
    cache.count(cache.find(known(cache, range(1, 9)), 8), 8)
    cache.pool.allocate(0, 3)
    counts = cache.counts
    assert (counts.hits, counts.misses, counts.asked_tokens, counts.found_tokens) == (1, 1, 17, 8)
    assert (counts.stored, counts.evicted, counts.blocks) == (4, 3, 1)


# --- what outlives a process --------------------------------------------------------------------------------------


def buffers(groups: int, num_slabs: int = 20) -> dict[str, Any]:
    geometry = Geometry(num_slabs, (2,) * groups)
    return {
        "num_slabs": num_slabs,
        "cut": geometry.blocks_per_slab,
        "pool_buffer": bytearray(state_bytes(geometry)),
        "index_buffer": bytearray(index_bytes(geometry)),
    }


def test_the_next_process_finds_what_the_one_before_cached() -> None:
    memory = buffers(2)
    cache = make_cache([FULL, WINDOW], **memory)
    hashes = known(cache, range(10))
    keep_all(cache, hashes)
    match = cache.find(hashes, 10)
    del cache
    heir = make_cache([FULL, WINDOW], **memory)
    again = heir.find(known(heir, range(10)), 10)
    assert again.num_tokens == 10
    assert [blocks.tolist() for blocks in again.blocks] == [blocks.tolist() for blocks in match.blocks]
    heir.take(again)
    heir.check()


def test_a_process_killed_while_it_committed_leaves_nothing_wrong() -> None:
    """Whether its hash was written and the block not committed, or half a hash."""
    memory = buffers(1)
    cache = make_cache([FULL], **memory)
    hashes = known(cache, range(4))
    first, second = cache.pool.allocate(0, 2).tolist()
    PrefixIndex(cache.pool.geometry, memory["index_buffer"]).add(0, [first], hashes.of(0, 1)[:1])
    memory["index_buffer"][second * 16 : second * 16 + 5] = hashes.of(0, 2)[1][:5]
    heir = make_cache([FULL], **memory)
    assert heir.find(hashes, 4).num_tokens == 0
    heir.check()
    heir.commit(0, [first, second], hashes.of(0, 2))
    assert heir.find(hashes, 4).num_tokens == 4
    heir.check()


def test_what_a_process_was_killed_before_evicting_is_gone_and_nothing_else() -> None:
    """It had told its index already; the block is free, not one whose content nobody can find."""
    memory = buffers(1)
    cache = make_cache([FULL], **memory)
    hashes = known(cache, range(8))
    ids = keep_all(cache, hashes)[0]
    index = PrefixIndex(cache.pool.geometry, memory["index_buffer"])
    index.restore(0, cache.pool.with_content(0))
    index.evicted(0, np.array([ids[3]], np.int32))
    heir = make_cache([FULL], **memory)
    assert heir.find(hashes, 8).num_tokens == 6
    heir.check()
    assert heir.pool.counts(0).cached == len(ids) - 1
    heir.check()


def test_content_that_was_kept_past_the_cache_is_dropped() -> None:
    memory = buffers(1)
    cache = make_cache([FULL], **memory)
    cache.pool.commit(0, cache.pool.allocate(0, 2))
    heir = make_cache([FULL], **memory)
    assert len(heir.pool.with_content(0)) == 0
    heir.check()


def test_of_two_blocks_that_claim_the_same_content_one_is_kept() -> None:
    memory = buffers(1)
    cache = make_cache([FULL], **memory)
    ids = keep_all(cache, known(cache, range(4)))[0]
    rows = memory["index_buffer"]
    rows[ids[1] * 16 : ids[1] * 16 + 16] = rows[ids[0] * 16 : ids[0] * 16 + 16]
    heir = make_cache([FULL], **memory)
    assert heir.pool.counts(0).cached == 1
    heir.check()


@pytest.mark.parametrize("buffer", [bytearray(16), bytes(12 * 16), bytearray(13 * 16)])
def test_an_index_wants_a_writable_buffer_of_its_size(buffer: Any) -> None:
    with pytest.raises(SpecInvalid):
        PrefixIndex(Geometry(12, (1,)), buffer)


def test_a_cache_wants_parts_of_one_plan() -> None:
    cache = make_cache([FULL])
    with pytest.raises(SpecInvalid):
        PrefixCache(cache.pool, PrefixIndex(cache.pool.geometry), [FULL, FULL])
    with pytest.raises(SpecInvalid):
        PrefixCache(cache.pool, PrefixIndex(Geometry(7, (1,))), [FULL])


def test_the_check_fires() -> None:
    memory = buffers(1)
    cache = make_cache([FULL], **memory)
    ids = keep_all(cache, known(cache, range(4)))[0]
    cache.check()
    row = slice(ids[0] * 16, ids[0] * 16 + 16)
    before = bytes(memory["index_buffer"][row])
    memory["index_buffer"][row] = bytes(16)
    with pytest.raises(InternalError):
        cache.check()
    memory["index_buffer"][row] = before
    cache.check()
    cache.pool.drop(0, [ids[1]])  # past the cache
    with pytest.raises(InternalError):
        cache.check()
    cache.pool.retain(0, np.array([ids[0]]))


# --- what routers are told ----------------------------------------------------------------------------------------


def test_routers_hear_of_everything_that_comes_and_goes() -> None:
    cache = make_cache([FULL, WINDOW], num_slabs=9)
    start = cache.events.cursor
    numbers = count()
    for _ in range(6):
        first = 100 * next(numbers)
        keep_all(cache, known(cache, range(first, first + 6)))
    cache.pool.allocate(0, 2)
    page = cache.events.read(start)
    assert not page.has_missed
    assert {event.kind for event in page.events} == {"stored", "removed"}
    assert [event.number for event in page.events] == list(range(1, len(page.events) + 1))
    there: list[set[bytes]] = [set(), set()]
    for event in page.events:
        if event.kind == "stored":
            assert there[event.group].isdisjoint(event.hashes)
            there[event.group] |= set(event.hashes)
        else:
            assert there[event.group] >= set(event.hashes)
            there[event.group] -= set(event.hashes)
    snapshot = cache.snapshot()
    assert [set(hashes) for hashes in snapshot.hashes] == there
    assert snapshot.cursor == page.cursor
    cache.clear()
    assert [set(hashes) for hashes in cache.snapshot().hashes] == [set(), set()]
    assert {event.kind for event in cache.events.read(page.cursor).events} == {"removed"}
