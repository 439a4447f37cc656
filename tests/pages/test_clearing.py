"""Which blocks are to be cleared before they are used: told once, to whoever is given them, and never too few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpage
from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Arrays, state_bytes
from kvpage.pages.clearing import NOTHING, Clearing
from kvpage.pages.geometry import Geometry
from support.block_scenarios import CLEARING, GEOMETRIES, OPERATIONS, Furnished, furnish, open_pool, state_of
from support.watched_stores import watch, watch_arrays

STATES = Clearing(on_group_change=True, on_reuse=(True, False))
"""Group 0 keeps states, group 1 attention."""
ATTENTION = {"kind": "full_attention", "block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
WINDOW = ATTENTION | {"kind": "sliding_window", "sliding_window": 64}
STATE = {"kind": "mamba", "shapes": [[4, 64], [64, 64]], "dtypes": ["bfloat16", "float32"]}
QUANTISED = {"dtype": "int8", "kv_quant": "int8_per_token_head", "backend": "triton_attn"}


def plan_of(*layers: dict[str, Any], strategy: str = "nested") -> kvpage.Plan:
    named = [{"name": f"layer.{index}.{{i}}", "count": 2, **layer} for index, layer in enumerate(layers)]
    allocator = {"allocator": "slabs"} if strategy == "nested" else {}
    return kvpage.plan(
        {"layers": named, "strategy": strategy, "memory_bytes": 8 << 20, "max_model_len": 512, **allocator}
    )


# --- which plans clear ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "on_group_change", "on_reuse"),  # the last by layer
    [
        ([ATTENTION], False, [False]),
        ([ATTENTION, WINDOW], False, [False, False]),
        ([ATTENTION, WINDOW | {"head_size": 128}], False, [False, False]),
        ([ATTENTION, WINDOW | {"dtype": "float16"}], True, [False, False]),
        ([ATTENTION, STATE], True, [False, True]),
        ([ATTENTION | {"dtype": "float8_e4m3fn"}, WINDOW | {"dtype": "float8_e4m3fn"}], False, [False, False]),
        ([ATTENTION | QUANTISED, WINDOW | QUANTISED], False, [False, False]),
        ([ATTENTION | QUANTISED, WINDOW | QUANTISED | {"head_size": 128}], True, [False, False]),
        ([ATTENTION | QUANTISED, WINDOW | {"dtype": "int8", "head_size": 128}], True, [False, False]),
    ],
)
def test_a_plan_says_what_is_cleared(layers: list[dict[str, Any]], on_group_change: bool, on_reuse: list[bool]) -> None:
    plan = plan_of(*layers)
    assert (len(plan.groups) > 1) is (len(layers) > 1)
    for index, expected in enumerate(on_reuse):
        group = plan.layers[f"layer.{index}.0"].group
        assert group is not None
        assert Clearing.of(plan).on_reuse[group] is expected
    assert Clearing.of(plan).on_group_change is on_group_change
    assert bool(Clearing.of(plan)) is (on_group_change or any(on_reuse))
    with BlockPool.of(plan) as pool:
        assert pool._arrays.clearing == Clearing.of(plan)


def test_states_alone_are_cleared_too() -> None:
    clearing = Clearing.of(plan_of(STATE, strategy="unify"))
    assert clearing == Clearing(on_group_change=False, on_reuse=(True,))
    assert clearing


def test_what_is_cleared_is_said_for_every_group_or_for_none() -> None:
    with pytest.raises(SpecInvalid, match="1 groups; there are 2"):
        BlockPool(Geometry(4, (1, 1)), clearing=Clearing(on_group_change=True, on_reuse=(True,)))


def test_a_buffer_whose_blocks_were_cleared_by_other_rules_is_refused() -> None:
    """What went unnoted there cannot be made up for."""
    buffer = bytearray(state_bytes(Geometry(4, (1, 1))))
    BlockPool(Geometry(4, (1, 1)), buffer).close()
    with pytest.raises(Conflict, match="other rules"):
        BlockPool(Geometry(4, (1, 1)), buffer, clearing=STATES)
    BlockPool(Geometry(4, (1, 1)), buffer, clearing=Clearing(on_group_change=False, on_reuse=(False, False))).close()


# --- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "take", [lambda pool: pool.allocate(1, 2).tolist(), lambda pool: [pool.allocate_one(1), pool.allocate_one(1)]]
)
def test_r15_blocks_of_a_slab_that_changed_group_are_to_be_cleared_each_by_who_gets_it(
    take: Callable[[BlockPool], list[int]],
) -> None:
    pool = BlockPool(Geometry(2, (1, 4)), clearing=STATES)
    state = pool.allocate_one(0)
    assert pool.to_clear(0, [state]).tolist() == []  # nobody wrote to it yet
    pool.free_one(0, state)
    first, second = take(pool)
    assert pool.to_clear(1, [first]).tolist() == [first]
    assert pool.to_clear(1, [second, second]).tolist() == [second]
    pool.free_one(1, first)
    assert pool.allocate_one(1) == first
    assert pool.to_clear(1, [first]).tolist() == []  # of the same dtype, since it was cleared
    third = pool.allocate_one(1)
    assert pool.to_clear(1, [first, second, third]).tolist() == [third]
    pool.check()


def test_what_was_not_cleared_outlives_the_process() -> None:
    geometry = Geometry(2, (1, 4))
    buffer = bytearray(state_bytes(geometry))
    with BlockPool(geometry, buffer, clearing=STATES) as pool:
        pool.free_one(0, pool.allocate_one(0))
        pool.allocate(1, 2)
    with BlockPool(geometry, buffer, clearing=STATES) as pool:
        assert pool.to_clear(1, [5, 4]).tolist() == [5, 4]
    with BlockPool(geometry, buffer, clearing=STATES) as pool:
        assert pool.to_clear(1, [5, 4]).tolist() == []


def give_up(how: str, pool: BlockPool, block: int) -> None:
    """So that somebody else can get this block of group 0, and nobody has it."""
    if how == "free_one":
        pool.free_one(0, block)
    elif how == "free":
        pool.retain(0, [block])
        pool.free(0, [block, block])
    elif how == "copy_on_write":
        pool.commit(0, [block])
        assert pool.copy_on_write(0, block) != block
        pool.drop(0, [block])
    elif how == "take back":
        pool.free(0, [block])
        pool.take_back(0, [block])
        pool.free(0, [block])
    else:
        pool.commit_one(0, block)
        pool.free_one(0, block)
        if how == "drop":
            pool.drop(0, [block])


TAKE: dict[str, Callable[[BlockPool], list[int]]] = {
    "allocate_one": lambda pool: [pool.allocate_one(0) for _ in range(pool.available(0))],
    "allocate": lambda pool: pool.allocate(0, pool.available(0)).tolist(),
    "allocate_all": lambda pool: pool.allocate_all({1: 0, 0: pool.available(0)})[0].tolist(),
    "allocate_run": lambda pool: [*pool.allocate_run(0, 1).tolist(), *pool.allocate(0, pool.available(0)).tolist()],
}


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("how", ["free_one", "free", "drop", "evict", "copy_on_write", "take back"])
@pytest.mark.parametrize("take", TAKE)
def test_a_state_is_cleared_whenever_somebody_had_it_before(cut: int, how: str, take: str) -> None:
    pool = BlockPool(Geometry(4, (cut, 1)), clearing=STATES)
    block, other = pool.allocate_one(0), pool.allocate_one(0)
    assert pool.to_clear(0, [block, other]).tolist() == []
    give_up(how, pool, block)
    taken = TAKE[take](pool)
    assert block in taken
    assert pool.to_clear(0, taken).tolist() == [number for number in taken if number == block]
    assert pool.to_clear(0, taken).tolist() == []
    pool.check()


def test_a_prefix_hit_clears_nothing() -> None:
    pool = BlockPool(Geometry(4, (1, 1)), clearing=STATES)
    block = pool.allocate_one(0)
    pool.commit_one(0, block)
    pool.free_one(0, block)
    pool.retain(0, [block])
    assert pool.to_clear(0, [block]).tolist() == []
    pool._arrays.stale[block] = 1  # as if killed between the note and the eviction
    assert pool.to_clear(0, [block]).tolist() == []


def test_blocks_of_a_holder_that_died_are_cleared_by_the_next() -> None:
    pool = BlockPool(Geometry(2, (1, 4)), clearing=STATES)
    pool.free_one(0, pool.allocate_one(0))
    ids = pool.allocate(1, 2)
    assert len(pool.to_clear(1, ids)) == 2
    pool.mark_stale(1, ids[:1])
    with pytest.raises(Conflict):
        pool.mark_stale(1, [6])
    pool.free(1, ids[::-1])
    again = pool.allocate(1, 2)
    assert pool.to_clear(1, again).tolist() == ids[:1].tolist()


@pytest.mark.parametrize("cut", [(1,), (1, 1), (4, 1), (3, 2)])
def test_a_pool_that_clears_nothing_touches_nothing_for_it(cut: tuple[int, ...]) -> None:
    pool = BlockPool(Geometry(6, cut), clearing=NOTHING)
    pool._arrays.stale.flags.writeable = False  # a store would raise
    for group in range(len(cut)):
        ids = pool.allocate(group, pool.available(group))
        pool.mark_stale(group, ids)
        pool.commit(group, ids[::2])
        assert pool.to_clear(group, ids).tolist() == []
        pool.free(group, ids)
        pool.free_one(group, pool.allocate_one(group))
        pool.free(group, pool.allocate_run(group, 1))
    pool.check()
    assert not pool._arrays.stale.any()


# --- killed at any store ----------------------------------------------------------------------------------------------


def stored_by(here: Furnished, work: Callable[[], object]) -> list[bytes]:
    """The buffer before, amid and after every store."""
    found: list[bytes] = []

    def on_store(store: Callable[[bool], None]) -> None:
        for only_half in (True, False):
            found.append(bytes(here.buffer))
            store(only_half)

    watch(here.pool, on_store)
    work()
    return [*found, bytes(here.buffer)]


@pytest.mark.parametrize("name", CLEARING)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_after_a_kill_at_any_store_no_block_is_thought_clean_that_is_not(name: str, operation: str) -> None:
    """Every block that was given to somebody is taken for written to."""
    here = furnish(name)
    cut, clearing = here.pool.geometry.blocks_per_slab, CLEARING[name]
    written = {(group, block) for group in here.held for block in here.held[group] + here.cached[group]}
    writer = {block // cut[group]: group for group, block in written}
    left = stored_by(here, lambda: OPERATIONS[operation](here))
    assert len(left) > 2
    num_stale = 0
    for buffer in dict.fromkeys(left):
        for group in range(len(cut)):
            pool = open_pool(name, bytearray(buffer))
            taken = pool.allocate(group, pool.available(group)).tolist()
            told = set(pool.to_clear(group, taken).tolist())
            reused = {block for block in taken if clearing.on_reuse[group] and (group, block) in written}
            changed = {block for block in taken if writer.get(block // cut[group], group) != group}
            assert told >= reused | changed
            num_stale += len(reused | changed)
    assert num_stale, "nothing was ever to be cleared"


# --- counts from elsewhere --------------------------------------------------------------------------------------------

EVERY = pytest.mark.parametrize("name", GEOMETRIES)


def other_counts(here: Furnished) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Of each group the first held block is not held, another one twice, and a cached one, and one that is free."""
    counts, geometry = here.pool._arrays.refs.copy(), here.pool.geometry
    for group, held in here.held.items():
        extra = held[-1]
        places = geometry.slots_of(group, np.array([held[0], held[1], here.cached[group][0], extra]))
        counts[places] = [0, 2, 1, 0]
    return counts


@EVERY
def test_blocks_are_held_as_often_as_is_written_elsewhere(name: str) -> None:
    here = furnish(name)
    before, counts = state_of(here.pool), other_counts(here)
    here.pool.close()
    pool = open_pool(name, here.buffer, times_held=lambda: counts)
    pool.check()
    assert pool._arrays.refs.tolist() == counts.tolist()
    assert state_of(pool).content == before.content
    for group, held in here.held.items():
        assert pool.times_held(group, [held[0], held[1], here.cached[group][0], held[-1]]).tolist() == [0, 2, 1, 0]
        pool.allocate(group, pool.available(group))  # what is held no more can be had
    pool.check()


@EVERY
def test_what_was_freed_and_is_held_elsewhere_is_held_again(name: str) -> None:
    here = furnish(name)
    before, counts = state_of(here.pool), here.pool._arrays.refs.copy()
    for group, held in here.held.items():
        here.pool.free(group, held)
    assert state_of(here.pool) != before
    again = open_pool(name, here.buffer, times_held=lambda: counts)
    again.check()
    assert state_of(again) == before


@EVERY
def test_all_that_nobody_holds_any_more_is_free_or_cached(name: str) -> None:
    """What was committed together has one stamp while it is held; cached, each block has one of its own."""
    here = furnish(name)
    content = state_of(here.pool).content
    pool = open_pool(name, here.buffer, times_held=lambda: np.zeros(here.pool.geometry.num_slots, np.int32))
    pool.check()
    assert state_of(pool) == ({}, content)
    assert sum(pool.counts(group).used for group in here.held) == 0
    assert sum(pool.counts(group).cached for group in here.held) == len(content)
    pool.allocate(0, pool.available(0))
    pool.check()


@EVERY
def test_an_operation_under_way_is_undone_before_the_counts_are_taken(name: str) -> None:
    here = furnish(name)
    counts = other_counts(here)
    left = stored_by(here, lambda: OPERATIONS["free everything"](here))
    assert any(open_pool(name, bytearray(found))._arrays.refs.tolist() != counts.tolist() for found in left)
    for found in dict.fromkeys(left):
        pool = open_pool(name, bytearray(found), times_held=lambda: counts)
        pool.check()
        assert pool._arrays.refs.tolist() == counts.tolist()


@EVERY
def test_a_kill_while_the_counts_are_taken_is_made_good_by_the_next_opening(name: str) -> None:
    here = furnish(name)
    counts, buffer = other_counts(here), here.buffer
    ended = (here.pool._arrays.refs > 0) & (counts == 0)
    left = [bytes(buffer)]

    def on_store(store: Callable[[bool], None]) -> None:
        for only_half in (True, False):
            store(only_half)
            left.append(bytes(buffer))

    here.pool.close()
    arrays = Arrays(GEOMETRIES[name], buffer, CLEARING.get(name, NOTHING))
    watch_arrays(arrays, on_store)
    arrays.undo()
    arrays.hold(counts)
    assert len(left) > 2
    for found in left:
        open_pool(name, bytearray(found)).check()  # sound without them too
        pool = open_pool(name, bytearray(found), times_held=lambda: counts)
        pool.check()
        assert pool._arrays.refs.tolist() == counts.tolist()
        assert pool._arrays.stale[ended].all() == (name in CLEARING)


def at(place: int, value: int) -> Callable[[Any], None]:
    return lambda counts: counts.__setitem__(place, value)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a negative count": (at(4, -1), "is held -1 times"),
    "a block of slab 0": (at(1, 1), "slab 0"),
    "a block in a slab of nobody": (at(-1, 1), "a slab of nobody"),
    "a block beyond those of the slab's group": (at(4 * 3 + 1, 1), "beyond its blocks"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_counts_that_cannot_be_are_refused_and_nothing_is_changed(fault: str) -> None:
    geometry = Geometry(6, (4, 1))
    buffer = bytearray(state_bytes(geometry))
    pool = BlockPool(geometry, buffer)
    pool.allocate_all({0: 5, 1: 1})
    assert pool._arrays.owners.tolist() == [0, 1, 1, 2, 0, 0]
    pool._arrays.log_refs(np.array([4]), 0)  # even an operation under way stays so
    counts = pool._arrays.refs.copy()
    change, said = REFUSED[fault]
    change(counts)
    before = bytes(buffer)
    with pytest.raises(Conflict, match=said):
        BlockPool(geometry, buffer, times_held=lambda: counts)
    assert bytes(buffer) == before


@pytest.mark.parametrize("counts", [np.zeros(3, np.int32), np.zeros(36, np.int64), np.zeros((9, 4), np.int32)])
def test_counts_of_another_shape_are_refused(counts: Any) -> None:
    with pytest.raises(SpecInvalid, match="times_held"):
        open_pool("mixed", furnish("mixed").buffer, times_held=lambda: counts)


def test_of_a_new_pool_nothing_can_be_held() -> None:
    geometry = Geometry(5, (1,))
    counts = np.zeros(5, np.int32)
    BlockPool(geometry, times_held=lambda: counts).check()
    counts[1] = 1
    with pytest.raises(Conflict, match="new"):
        BlockPool(geometry, times_held=lambda: counts)


# --- a free that is taken back ----------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("part", ["all", "shared and cached", "bare", "bare and held twice"])
def test_a_free_that_is_taken_back_never_was(name: str, part: str) -> None:
    here = furnish(name)
    held = here.held[0]
    ids = {
        "all": [*held, held[0]],
        "shared and cached": held[:2],
        "bare": held[2:],
        "bare and held twice": held[2:] * 2,
    }[part]
    here.pool.retain(0, ids[len(set(ids)) :] if part == "bare and held twice" else [])
    before, owners = state_of(here.pool), here.pool._arrays.owners.tolist()
    counts = [here.pool.counts(group) for group in here.held]
    free = here.pool._ledger.free.array[: here.pool._ledger.free.count].tolist()
    here.pool.free(0, ids)
    with pytest.raises(OutOfBlocks):
        here.pool.allocate(0, 10**6)
    here.pool.take_back(0, ids[::-1])
    here.pool.check()
    assert (state_of(here.pool), here.pool._arrays.owners.tolist()) == (before, owners)
    assert [here.pool.counts(group) for group in here.held] == counts
    assert here.pool._ledger.free.array[: here.pool._ledger.free.count].tolist() == free


@EVERY
def test_a_kill_at_any_store_of_it_leaves_it_done_or_undone(name: str) -> None:
    here = furnish(name)
    ids = [*here.held[0], here.held[0][0]]
    after = state_of(here.pool)
    here.pool.free(0, ids)
    before = state_of(here.pool)
    for left in stored_by(here, lambda: here.pool.take_back(0, ids)):
        pool = open_pool(name, bytearray(left))
        pool.check()
        assert state_of(pool) in (before, after)
    assert state_of(here.pool) == after


def test_blocks_that_others_got_cannot_be_taken_back() -> None:
    pool = BlockPool(Geometry(3, (4, 1)))
    ids = pool.allocate(0, 1)
    pool.free(0, ids)
    pool.allocate_all({1: 2})
    for wrong in (ids, [0]):
        with pytest.raises((Conflict, SpecInvalid)):
            pool.take_back(0, wrong)
    pool.check()
