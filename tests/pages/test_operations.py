"""What a block pool promises, one thing at a time; and the allocator's cases among the public bugs (R…)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import kvpage
from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.geometry import Geometry
from support.checkout import ROOT


def flat(num_blocks: int, **more: Any) -> BlockPool:
    """So many blocks that can be handed out, one to a slab."""
    return BlockPool(Geometry(num_blocks + 1, (1,)), **more)


def cached(pool: BlockPool, group: int, count: int) -> list[int]:
    ids = pool.allocate(group, count)
    pool.commit(group, ids)
    pool.free(group, ids)
    return list(ids.tolist())


# --- public bugs ------------------------------------------------------------------------------------------------------


def test_r06_a_block_named_twice_in_one_free_comes_back_once() -> None:
    pool = flat(15)
    [block] = pool.allocate(0, 1).tolist()
    pool.retain(0, [block])
    assert pool.slab_counts().free == 14
    pool.free(0, [block, block])
    assert pool.slab_counts().free == 15
    assert sorted(pool.allocate(0, 15).tolist()) == list(range(1, 16))


@pytest.mark.parametrize("cut", [1, 3])
def test_r07_a_second_free_is_refused_and_no_block_gets_two_owners(cut: int) -> None:
    pool = BlockPool(Geometry(8, (cut,)))
    block = pool.allocate_one(0)
    pool.free_one(0, block)
    with pytest.raises(Conflict):
        pool.free_one(0, block)
    with pytest.raises(Conflict):
        pool.free(0, [block])
    assert pool.allocate_one(0) != pool.allocate_one(0)
    pool.check()


def test_r08_a_negative_request_is_refused_and_frees_nothing() -> None:
    pool = flat(10)
    pool.allocate_one(0)
    for refused in (lambda: pool.allocate(0, -3), lambda: pool.allocate_all({0: -3}), lambda: pool.allocate_run(0, -3)):
        with pytest.raises(SpecInvalid):
            refused()
    assert pool.slab_counts().free == 9


def test_r10_what_is_cached_and_let_go_is_not_used() -> None:
    pool = flat(10)
    block = pool.allocate_one(0)
    pool.commit_one(0, block)
    pool.free_one(0, block)
    assert pool.counts(0) == (0, 1, 0, 1)
    assert pool.available(0) == 10


def test_r20_what_is_said_to_be_available_is() -> None:
    pool = BlockPool(Geometry(9, (3, 1)))
    cached(pool, 0, 5)
    pool.allocate(1, 2)
    for group in (0, 1):
        count = pool.available(group)
        assert len(pool.allocate(group, count)) == count
        with pytest.raises(OutOfBlocks):
            pool.allocate_one(group)
        pool.check()


# --- order ------------------------------------------------------------------------------------------------------------


def test_blocks_without_content_are_used_again_last_freed_first_and_before_any_is_evicted() -> None:
    evicted: list[int] = []
    pool = flat(4, on_evict=lambda _group, ids: evicted.extend(ids.tolist()))
    first, second, third, _ = pool.allocate(0, 4).tolist()
    pool.commit_one(0, first)
    for block in (first, second, third):
        pool.free_one(0, block)
    assert [pool.allocate_one(0), pool.allocate_one(0)] == [third, second]
    assert evicted == []
    assert pool.allocate_one(0) == first
    assert evicted == [first]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_tail_of_what_was_freed_together_is_evicted_first(one_by_one: bool) -> None:
    evicted: list[int] = []
    pool = flat(5, on_evict=lambda _group, ids: evicted.extend(ids.tolist()))
    early, late = cached(pool, 0, 2), cached(pool, 0, 3)
    for count in [1] * 5 if one_by_one else [3, 2]:
        pool.allocate(0, count)
    assert evicted == [*early[::-1], *late[::-1]]


@pytest.mark.parametrize("cut", [2, 200])
def test_so_is_the_slab_of_the_tail(cut: int) -> None:
    evicted: list[tuple[int, list[int]]] = []
    pool = BlockPool(Geometry(4, (cut, 1)), on_evict=lambda group, ids: evicted.append((group, ids.tolist())))
    ids = pool.allocate(0, 3 * cut)
    pool.commit(0, ids)
    pool.free(0, ids)
    for slab in (2, 1, 0):
        pool.allocate_one(1)
        assert evicted.pop() == (0, sorted(ids[slab * cut : (slab + 1) * cut].tolist()))


def test_no_more_slabs_are_evicted_than_are_needed() -> None:
    evicted: list[int] = []
    pool = BlockPool(Geometry(6, (2, 3)), on_evict=lambda _group, ids: evicted.extend(ids.tolist()))
    old, young = cached(pool, 0, 6), cached(pool, 0, 4)
    pool.allocate(1, 4)
    assert sorted(evicted) == sorted(old[2:])  # two slabs, of the tail
    pool.allocate(1, 2)
    assert len(evicted) == 4
    assert pool.counts(0).cached == 6
    assert not set(evicted) & set(young)


def test_the_fullest_slab_is_taken_from_first_so_that_others_empty() -> None:
    pool = BlockPool(Geometry(4, (4,)))
    ids = pool.allocate(0, 12).tolist()
    pool.free(0, [*ids[:3], ids[4]])  # slab 1 has three free blocks, slab 2 has one
    assert pool.allocate_one(0) == ids[4]
    pool.free(0, ids[3:4])
    assert pool.slab_counts() == (2, 0, 1)


def test_a_slab_goes_back_with_its_last_block_and_another_group_can_have_it() -> None:
    pool = BlockPool(Geometry(2, (4, 1)))
    ids = pool.allocate(0, 4)
    with pytest.raises(OutOfBlocks):
        pool.allocate_one(1)
    pool.free(0, ids)
    assert pool.allocate_one(1) == 1


def test_the_older_of_an_own_block_and_a_whole_idle_slab_is_evicted() -> None:
    evicted: list[tuple[int, list[int]]] = []
    pool = BlockPool(Geometry(4, (2, 1)), on_evict=lambda group, ids: evicted.append((group, ids.tolist())))
    own = pool.allocate(0, 2).tolist()
    [old] = cached(pool, 1, 1)
    pool.commit(0, own[:1])
    pool.free(0, own[:1])  # its slab stays in use
    [young] = cached(pool, 1, 1)
    assert (old, young) == (2, 3)
    assert [pool.allocate_one(0) // 2 for _ in range(2)] == [2, 2]  # the slab of the state used longest ago
    pool.allocate_one(0)
    assert evicted == [(1, [old]), (0, own[:1])]


def test_what_is_told_of_evictions_cannot_call_the_pool() -> None:
    calls: list[Any] = []
    pool = BlockPool(Geometry(3, (2,)), on_evict=lambda group, ids: calls.pop()(group, ids))
    ids = cached(pool, 0, 4)
    for call in (pool.free, pool.retain, lambda group, _: pool.allocate_one(group), lambda *_: pool.check()):
        for take in (lambda: pool.allocate(0, 3), lambda: pool.allocate_one(0)):
            calls.append(call)
            with pytest.raises(Conflict):
                take()
            assert pool.counts(0) == (0, 4, 0, 2)
            pool.check()
    calls += [lambda *_: None] * 4
    assert sorted(pool.allocate(0, 4).tolist()) == sorted(ids)


def test_using_cached_blocks_again_and_again_takes_no_more_memory() -> None:
    for cut in (1, 4):
        pool = BlockPool(Geometry(2000 // cut + 1, (cut,)))
        ids = pool.allocate(0, 2000)
        pool.commit(0, ids[::2])
        pool.free(0, ids)
        for _ in range(300):
            pool.retain(0, ids[::2])
            again = pool.allocate(0, 500)
            pool.free(0, again)
            pool.free(0, ids[::2])
        held: Any = pool._groups[0]
        queues = [pool._ledger.idle, held.oldest] if cut > 1 else [pool._ledger.idle]
        assert max(len(queue.ids_at) for queue in queues) <= 4 * 2000
        if cut > 1:
            assert len(held.roomy) + len(held.roomy_idle) <= 5 * 500 + 500
        pool.check()


# --- several groups ---------------------------------------------------------------------------------------------------


def test_all_groups_get_what_they_need_or_none_gets_anything() -> None:
    pool = BlockPool(Geometry(4, (4, 1)))
    with pytest.raises(OutOfBlocks) as refused:
        pool.allocate_all({0: 5, 1: 2})
    assert refused.value.details == {
        "wanted": {"0": 5, "1": 2},
        "slabs_wanted": 4,
        "slabs_available": 3,
        "slabs_evictable": 0,
    }
    assert pool.slab_counts() == (0, 0, 3)
    taken = pool.allocate_all({0: 5, 1: 1})
    assert {group: len(ids) for group, ids in taken.items()} == {0: 5, 1: 1}


def test_a_group_leaves_the_others_their_slabs_and_evicts_its_own_instead() -> None:
    pool = BlockPool(Geometry(3, (4, 1)))
    ids = pool.allocate(0, 4)
    pool.commit(0, ids[1:])
    pool.free(0, ids[1:])
    taken = pool.allocate_all({0: 3, 1: 1})  # the free slab is the other group's
    assert sorted(taken[0].tolist()) == sorted(ids[1:].tolist())
    pool.check()


# --- holding ----------------------------------------------------------------------------------------------------------


def test_a_prefix_hit_holds_cached_blocks_again_and_keeps_their_content() -> None:
    pool = flat(3)
    ids = cached(pool, 0, 2)
    pool.retain(0, ids)
    assert pool.counts(0) == (2, 0, 0, 2)
    pool.free(0, ids)
    assert pool.counts(0) == (0, 2, 0, 2)
    pool.drop(0, ids)
    with pytest.raises(Conflict):
        pool.retain(0, ids)


def test_a_shared_or_cached_block_is_copied_before_it_is_written() -> None:
    pool = flat(4)
    block = pool.allocate_one(0)
    assert pool.copy_on_write(0, block) == block
    pool.retain(0, [block])
    copy = pool.copy_on_write(0, block)
    assert copy != block
    assert pool.counts(0).used == 2
    pool.commit_one(0, block)
    other = pool.copy_on_write(0, block)
    assert other not in (block, copy)
    assert pool.counts(0) == (2, 1, 0, 3)


@pytest.mark.parametrize("size", [100, 2**15, 2**15 + 1, 100_000])
def test_a_block_named_twice_is_seen_in_batches_of_every_size(size: int) -> None:
    pool = flat(100_000)
    ids = pool.allocate(0, size)
    with pytest.raises(Conflict):
        pool.free(0, [*ids.tolist(), int(ids[0])])
    assert pool.counts(0).used == size
    pool.free(0, ids)
    pool.check()


def test_a_block_cannot_be_held_more_often_than_can_be_counted() -> None:
    pool = flat(1)
    block = pool.allocate_one(0)
    pool._arrays.refs[block] = 2**31 - 2
    pool.retain(0, [block])
    with pytest.raises(SpecInvalid):
        pool.retain(0, [block])
    pool.check()


def test_a_run_needs_no_eviction_where_there_is_room_without() -> None:
    evicted: list[int] = []
    pool = flat(8, on_evict=lambda _group, ids: evicted.extend(ids.tolist()))
    ids = np.sort(pool.allocate(0, 8))
    pool.commit(0, ids[:3])
    pool.free(0, [*ids[:3], *ids[4:7]])
    assert pool.allocate_run(0, 3).tolist() == [5, 6, 7]
    assert evicted == []
    assert pool.allocate_run(0, 3).tolist() == [1, 2, 3]
    assert sorted(evicted) == [1, 2, 3]
    with pytest.raises(OutOfBlocks):
        pool.allocate_run(0, 1)


def test_a_run_crosses_slabs() -> None:
    pool = BlockPool(Geometry(4, (4, 1)))
    assert pool.allocate_run(0, 10).tolist() == list(range(4, 14))
    pool.check()


# --- bounds and plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_slabs", "cut"),
    [(1, (1,)), (0, (1,)), (-5, (1,)), (5, ()), (5, (0,)), (5, (2, -1)), (2**31, (1,)), (2**20, (2**11,))],
)
def test_a_pool_with_nothing_to_hand_out_or_too_many_ids_is_refused(num_slabs: int, cut: tuple[int, ...]) -> None:
    with pytest.raises(SpecInvalid):
        Geometry(num_slabs, cut)


@pytest.mark.parametrize("bad", [[[1]], 1, None, "12", [1.5], [1, None], [[1], [1, 2]], [True], {1: 2}, [2**70]])
def test_what_is_no_sequence_of_ids_is_refused(bad: Any) -> None:
    pool = flat(4)
    pool.allocate(0, 4)
    for call in (pool.free, pool.retain, pool.commit, pool.drop):
        with pytest.raises(SpecInvalid):
            call(0, bad)
    assert pool.counts(0).used == 4


def test_an_empty_batch_does_nothing() -> None:
    pool = flat(4)
    for call in (pool.free, pool.retain, pool.commit, pool.drop):
        call(0, [])
    assert len(pool.allocate(0, 0)) == len(pool.allocate_run(0, 0)) == 0
    assert pool.allocate_all({}) == {}
    pool.check()


def test_a_pool_of_a_plan_has_its_groups_and_slabs() -> None:
    request = json.loads((ROOT / "examples" / "mimo.json").read_text())
    plan = kvpage.plan({**request, "strategy": "nested", "allocator": "slabs"})
    assert max(group.blocks_per_slab for group in plan.groups) > 1
    pool = BlockPool.of(plan)
    assert pool.geometry.num_slabs == plan.num_blocks
    for group, of_plan in enumerate(plan.groups):
        assert pool.available(group) == (plan.num_blocks - 1) * of_plan.blocks_per_slab


def test_the_state_is_seen_at_a_glance() -> None:
    pool = flat(4)
    pool.allocate_one(0)
    assert repr(pool) == "<BlockPool of 5 slabs, 3 free; 0: 1 used 0 cached>"
    pool.close()
    assert repr(pool) == "<BlockPool, closed>"


def test_a_pool_without_content_takes_less_than_20_bytes_a_block() -> None:
    program = (
        "import resource; from kvpage.pages.allocator import BlockPool; from kvpage.pages.geometry import Geometry\n"
        "import numpy as np; from pathlib import Path\n"
        "def resident(): return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()\n"
        "warm = BlockPool(Geometry(1000, (1,))); warm.free(0, warm.allocate(0, 500))\n"
        "before = resident(); pool = BlockPool(Geometry(1_000_001, (1,)))\n"
        "for _ in range(1000): pool.allocate(0, 1000)\n"
        "print((resident() - before) / 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 1 < float(done.stdout) < 20
