"""Sequences: how many blocks they hold and when, what they share, how they go back and end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import Conflict, NotSupported, OutOfBlocks, SpecInvalid
from kvpage.pages.allocator import BlockPool
from kvpage.pages.lifetimes import Lifetime, lifetimes_of
from kvpage.pages.prefix import PrefixCache
from kvpage.pages.sequences import Sequences
from kvpage.plans import Plan
from kvpage.simulation.layout import Growth
from support.prefix_parts import CHUNK, FULL, STATE, WINDOW, lifetimes, make_cache

ENCODER = Lifetime(kind="encoder", block_size=2)


def make(*groups: Lifetime, **options: Any) -> Sequences:
    return Sequences.cached(make_cache(groups, **options))


def pool_of(sequences: Sequences) -> BlockPool:
    assert isinstance(sequences.pool, BlockPool)
    return sequences.pool


def used(sequences: Sequences) -> list[int]:
    return [pool_of(sequences).counts(group).used for group in range(len(pool_of(sequences).geometry.blocks_per_slab))]


def run(sequences: Sequences, tokens: Any, **identity: Any) -> None:
    """A request from its start to its end, all of it kept."""
    with sequences.new(tokens, **identity) as sequence:
        sequence.advance()
        sequence.commit()
        sequence.checkpoint() if len(tokens) % 4 == 0 else ()
        sequence.commit()
    sequences.copies_done()


# --- how many blocks ----------------------------------------------------------------------------------------------


def mixed_plan(**options: Any) -> Plan:
    def attention(kind: str, name: str, **more: Any) -> dict[str, Any]:
        layer = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16", "backend": "flash_attn"}
        return {"kind": kind, "name": name, **layer, **more}

    state = {"kind": "mamba", "name": "m", "block_size": 16, "shapes": [[512, 4]], "dtypes": ["bfloat16"]}
    layers = [
        attention("full_attention", "f"),
        attention("sliding_window", "w", sliding_window=100),
        attention("chunked_local_attention", "c", attention_chunk_size=64),
        attention("cross_attention", "x"),
        state | {"num_speculative_blocks": 2},
    ]
    request = {
        "layers": layers,
        "strategy": "nested",
        "allocator": "slabs",
        "memory_bytes": 2**24,
        "max_num_encoder_input_tokens": 50,
        "max_num_batched_tokens": 40,
    }
    return kvpage.plan(request | {"max_model_len": 1000} | options)


def test_a_request_holds_at_most_what_the_plan_charges_and_at_some_moment_that() -> None:
    plan = mixed_plan()
    sequences = Sequences(PrefixCache.of(plan).pool, lifetimes_of(plan))
    assert plan.capacity.blocks_per_request is not None
    assert sequences.most_blocks(1000, 40, encoder_tokens=50) == plan.capacity.blocks_per_request
    most = np.zeros(len(plan.groups), int)
    for first in range(1, 41):
        with sequences.new(range(1000), encoder_tokens=50) as sequence:
            sequence.advance(first)
            while sequence.num_tokens < 1000:
                most = np.maximum(most, sequence.num_held())
                sequence.advance(min(40, 1000 - sequence.num_tokens))
            most = np.maximum(most, sequence.num_held())
        assert used(sequences) == [0] * len(plan.groups)
    assert tuple(most) == plan.capacity.blocks_per_request


@given(lifetimes(), st.integers(1, 40), st.integers(1, 7), st.integers(0, 9))
def test_no_step_needs_more_than_was_said(lifetime: Lifetime, num_tokens: int, step: int, first: int) -> None:
    cache = make_cache([lifetime])
    sequences = Sequences(cache.pool, cache.lifetimes)
    (most,) = sequences.most_blocks(num_tokens, step)
    with sequences.new(range(num_tokens)) as sequence:
        sequence.advance(min(first, step, num_tokens))
        while sequence.num_tokens < num_tokens:
            sequence.advance(min(step, num_tokens - sequence.num_tokens))
            assert sequence.num_held()[0] <= most


@given(lifetimes(), st.integers(1, 40))
def test_token_by_token_a_sequence_holds_what_simulations_count(lifetime: Lifetime, num_tokens: int) -> None:
    kind: Any = lifetime.kind
    growth = Growth(kind=kind, block_size=lifetime.block_size, reach=lifetime.reach)
    sequences = make(lifetime)
    with sequences.new([0]) as sequence:
        sequence.advance()
        for tokens in range(1, num_tokens + 1):
            assert sequence.num_held()[0] == growth.blocks(tokens) + lifetime.num_speculative_blocks
            sequence.append([tokens])


@given(lifetimes(), st.integers(0, 40))
def test_a_lifetime_says_how_long_the_first_block_stays(lifetime: Lifetime, num_tokens: int) -> None:
    until = lifetime.unchanged_until(num_tokens)
    assert until >= num_tokens
    same = {lifetime.first_block(tokens) for tokens in range(num_tokens, min(until, 60) + 1)}
    assert same == {lifetime.first_block(num_tokens)}
    if lifetime.kind == "window":
        assert lifetime.first_block(until + 1) == lifetime.first_block(num_tokens) + 1


def test_needs_say_what_admission_takes_of_each_group() -> None:
    sequences = make(FULL, WINDOW, CHUNK, STATE)
    run(sequences, list(range(12)))
    before = [pool_of(sequences).available(group) for group in range(4)]
    sequence = sequences.new([*range(8), 50, 51, 52])
    needs = sequence.needs()
    assert [pool_of(sequences).available(group) for group in range(4)] == before
    assert needs.prefix_tokens == 0  # the state after 12 tokens is of no use to a prompt that differs before
    assert needs.new_blocks == (6, 6, 6, 1)
    sequence.advance()
    assert used(sequences) == [6, 6, 6, 1]
    with sequences.new([*range(12), 50]) as other:
        needs = other.needs()
        assert needs.prefix_tokens == 12
        assert needs.new_blocks == (1, 1, 1, 1)
        assert needs.revived_blocks == (6, 2, 0, 1)
        other.advance()
        assert used(sequences) == [13, 9, 7, 3]


def test_a_state_found_again_needs_a_block_for_it_and_one_to_go_on_in() -> None:
    """Case R20: the estimate was one block short, and the allocation failed after it."""
    sequences = make(STATE, num_slabs=8)
    run(sequences, list(range(4)))
    sequence = sequences.new([*range(4), 9])
    needs = sequence.needs(1)
    assert needs.new_blocks[0] + needs.revived_blocks[0] == 2
    (copy,) = sequence.advance(1)
    assert used(sequences) == [2]
    assert copy.target == sequence.table(0)[0] != copy.source
    sequences.copies_done()
    assert used(sequences) == [1]
    assert pool_of(sequences).counts(0).cached == 1


def test_where_only_the_found_state_fits_nothing_is_taken() -> None:
    sequences = make(STATE, num_slabs=3)
    run(sequences, list(range(4)))
    blocker = sequences.new([7])
    blocker.advance()
    sequence = sequences.new([*range(4), 9])
    with pytest.raises(OutOfBlocks):
        sequence.advance()
    assert used(sequences) == [1]
    assert pool_of(sequences).counts(0).cached == 1
    pool_of(sequences).check()


def test_all_groups_get_their_blocks_or_none_does() -> None:
    sequences = make(FULL, WINDOW, num_slabs=10)
    first = sequences.new(range(6))
    first.advance()
    second = sequences.new(range(10, 16))
    with pytest.raises(OutOfBlocks):
        second.advance()
    assert used(sequences) == [3, 3]
    assert second.num_held() == (0, 0)
    with pytest.raises(OutOfBlocks):
        first.append(range(100))
    assert (first.num_tokens, first.num_known_tokens) == (6, 6)
    first.append([1])
    first.close()
    second.advance()
    assert used(sequences) == [3, 3]


def test_what_fell_out_of_the_window_is_given_back_and_stands_as_the_null_block() -> None:
    sequences = make(FULL, WINDOW)
    sequence = sequences.new(range(8))
    sequence.advance()
    sequence.commit()
    before = sequence.table(1).tolist()
    sequence.append([8])
    assert sequence.table(1).tolist()[:4] == [0, 0, *before[2:]]  # token 8 looks back to 4
    assert 0 not in sequence.table(0)
    assert pool_of(sequences).counts(1)[:2] == (3, 2)  # what was given back is still cached


def test_tables_grow_in_place_and_are_not_to_be_written() -> None:
    sequences = make(FULL, num_slabs=3000)
    sequence = sequences.new([])
    sequence.advance()
    moves, before = 0, sequence.table(0)
    for token in range(4000):
        sequence.append([token])
        moves += not np.shares_memory(before, sequence.table(0)) and len(before) > 0
        before = sequence.table(0)
    assert before.dtype == np.int32
    assert len(before) == 2000
    assert moves <= 8
    with pytest.raises(ValueError):
        before[0] = 1


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_sequence_ends_once_and_takes_nothing_after() -> None:
    """Case R07: what is freed twice is owned twice later. Case R10: what is cached and released is not used."""
    sequences = make(FULL, STATE)
    sequence = sequences.new(range(4))
    sequence.advance()
    sequence.commit()
    sequence.checkpoint()
    assert used(sequences) == [2, 2]
    sequence.close()
    sequence.close()
    assert sequence.closed
    assert used(sequences) == [0, 0]
    assert [pool_of(sequences).counts(group).cached for group in (0, 1)] == [2, 0]  # the checkpoint was not committed
    for act in (sequence.needs, sequence.advance, sequence.fork, sequence.checkpoint, lambda: sequence.append([1])):
        with pytest.raises(Conflict):
            act()
    with pytest.raises(Conflict):
        sequence.truncate(0)
    assert used(sequences) == [0, 0]


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    sequences = make(FULL, num_slabs=7)
    run(sequences, list(range(12)))
    pool_of(sequences).allocate(0, 2)
    assert sequences.new(range(12)).needs().prefix_tokens == 8


@pytest.mark.parametrize("step", [-1, 1.5, True, 7])
def test_steps_that_are_none_are_refused(step: Any) -> None:
    """Case R08: a negative request raised the number of free blocks."""
    sequences = make(FULL)
    sequence = sequences.new(range(6))
    for act in (sequence.advance, sequence.needs):
        with pytest.raises(SpecInvalid):
            act(step)
    assert used(sequences) == [0]
    sequence.advance(4)
    with pytest.raises(SpecInvalid):
        sequence.advance(step)
    assert used(sequences) == [2]


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_last_token_is_computed_again_unless_it_need_not_be(recomputes: bool) -> None:
    sequences = make(FULL)
    run(sequences, list(range(8)))
    sequence = sequences.new(range(8), recomputes_last_token=recomputes)
    assert sequence.needs().prefix_tokens == (6 if recomputes else 8)
    assert sequences.new([], recomputes_last_token=recomputes).needs().prefix_tokens == 0


def test_salts_keep_requests_apart() -> None:
    sequences = make(FULL)
    run(sequences, list(range(8)), salt=b"a")
    found = [sequences.new(range(8), salt=salt).needs().prefix_tokens for salt in (b"a", b"b", b"")]
    assert found == [6, 0, 0]


def test_cross_attention_holds_the_encoders_blocks_from_start_to_end_and_nothing_is_found_again() -> None:
    sequences = make(FULL, ENCODER)
    sequence = sequences.new(range(4), encoder_tokens=5)
    sequence.advance()
    before = sequence.table(1).tolist()
    sequence.append(range(20))
    assert sequence.table(1).tolist() == before
    assert len(before) == 3
    sequence.commit()
    sequence.close()
    assert [pool_of(sequences).counts(group).cached for group in (0, 1)] == [0, 0]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    cache = make_cache([FULL, STATE])
    sequences = Sequences(cache.pool, cache.lifetimes)
    with sequences.new(range(8)) as sequence:
        sequence.advance()
        sequence.commit()
        assert sequence.checkpoint() == ()
        sequence.commit()
    assert [cache.pool.counts(group)[:2] for group in (0, 1)] == [(0, 0), (0, 0)]


def test_the_parts_must_be_of_one_pool() -> None:
    cache = make_cache([FULL])
    with pytest.raises(SpecInvalid):
        Sequences(cache.pool, [FULL, FULL])
    with pytest.raises(SpecInvalid):
        Sequences(make_cache([FULL]).pool, [FULL], cache)


# --- sharing ------------------------------------------------------------------------------------------------------


def test_after_a_fork_the_first_to_write_gets_a_copy_and_the_other_the_block() -> None:
    sequences = make(FULL, WINDOW)
    parent = sequences.new(range(5))
    parent.advance()
    child, copies = parent.fork()
    assert copies == ()
    assert used(sequences) == [3, 3]
    shared = [int(parent.table(group)[-1]) for group in (0, 1)]
    made = child.append([7])
    assert [(copy.group, copy.source) for copy in made] == [(0, shared[0]), (1, shared[1])]
    assert [int(child.table(group)[-1]) for group in (0, 1)] == [copy.target for copy in made]
    assert parent.append([8]) == ()
    assert [int(parent.table(group)[-1]) for group in (0, 1)] == shared
    assert parent.table(0)[:2].tolist() == child.table(0)[:2].tolist()
    assert used(sequences) == [4, 4]
    parent.close()
    child.close()
    assert used(sequences) == [1, 1]  # what the copies read, nobody else may have yet
    sequences.copies_done()
    assert used(sequences) == [0, 0]


def test_a_step_of_no_tokens_copies_nothing() -> None:
    sequences = make(FULL)
    parent = sequences.new(range(3))
    parent.advance()
    child, _ = parent.fork()
    assert child.needs(0).new_blocks == (0,)
    assert child.advance(0) == ()


def test_states_are_copied_when_a_sequence_forks_or_none_is() -> None:
    sequences = make(FULL, Lifetime(kind="state", block_size=4, num_speculative_blocks=1), num_slabs=9)
    parent = sequences.new(range(5))
    parent.advance()
    child, (copy,) = parent.fork()
    assert copy == (1, parent.table(1)[0], child.table(1)[0])
    assert len(child.table(1)) == 2
    assert used(sequences) == [3, 4]
    with pytest.raises(OutOfBlocks):
        child.fork()
    assert used(sequences) == [3, 4]
    assert pool_of(sequences).times_held(0, child.table(0)).tolist() == [2, 2, 2]


def test_a_block_that_others_can_find_is_never_written_again() -> None:
    """Tokens that were committed are rejected, and others take their place in the same block."""
    sequences = make(FULL)
    sequence = sequences.new(range(4))
    sequence.advance()
    sequence.commit()
    sequence.truncate(3)
    (copy,) = sequence.append([77])
    assert copy.source != copy.target == sequence.table(0)[1]
    sequences.copies_done()
    assert sequences.new([*range(4), 5]).needs().prefix_tokens == 4
    sequence.commit()
    assert sequences.new([0, 1, 2, 77, 5]).needs().prefix_tokens == 4


def test_rejected_tokens_give_back_whole_blocks_only() -> None:
    """Case R12: a range that ends inside a block does not free it."""
    sequences = make(Lifetime(kind="full", block_size=512))
    sequence = sequences.new(range(1024))
    sequence.advance()
    first, second = sequence.table(0).tolist()
    sequence.truncate(576)
    assert sequence.table(0).tolist() == [first, second]
    sequence.truncate(300)
    assert sequence.table(0).tolist() == [first]
    assert used(sequences) == [1]
    assert (sequence.num_tokens, sequence.num_known_tokens) == (300, 300)


def test_a_sequence_goes_back_as_far_as_its_groups_allow() -> None:
    sequences = make(WINDOW)
    sequence = sequences.new(range(8))
    sequence.advance()
    sequence.append([8, 9, 10])
    sequence.truncate(8)
    sequence.append([11])
    with pytest.raises(Conflict):
        sequence.truncate(5)  # token 5 looks back to 1, whose block is gone
    assert sequence.num_tokens == 9
    with pytest.raises(SpecInvalid):
        sequence.truncate(10)
    with pytest.raises(SpecInvalid):
        sequence.truncate(-1)


def test_states_go_back_as_many_tokens_as_there_are_speculative_blocks() -> None:
    sequences = make(Lifetime(kind="state", block_size=4, num_speculative_blocks=2))
    sequence = sequences.new(range(5))
    sequence.advance()
    sequence.append([1, 2, 3])
    with pytest.raises(Conflict):
        sequence.truncate(5)
    sequence.truncate(6)
    sequence.append([4])
    with pytest.raises(Conflict):
        sequence.truncate(5)  # before the last step
    sequence.truncate(6)


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_when_it_is_committed_and_holds_nothing_then() -> None:
    sequences = make(FULL, STATE)
    sequence = sequences.new(range(8))
    sequence.advance()
    (copy,) = sequence.checkpoint()
    assert copy.source == sequence.table(1)[0]
    assert sequence.held(1) == [copy.source, copy.target]
    with pytest.raises(Conflict):
        sequence.checkpoint()
    sequence.commit(7)  # does not reach it
    assert sequences.new(range(9)).needs().prefix_tokens == 0
    sequence.commit()
    assert sequence.num_held() == (4, 1)
    assert sequences.new(range(9)).needs().prefix_tokens == 8
    assert sequence.checkpoint() == ()  # it is kept


def test_a_checkpoint_is_made_where_a_prefix_may_end() -> None:
    sequences = make(STATE, Lifetime(kind="full", block_size=3))
    sequence = sequences.new(range(30))
    for step in (0, 4, 4):
        sequence.advance(step)
        with pytest.raises(SpecInvalid):
            sequence.checkpoint()
    sequence.advance(4)
    assert len(sequence.checkpoint()) == 1


def test_a_checkpoint_of_rejected_tokens_is_never_found() -> None:
    sequences = make(Lifetime(kind="state", block_size=4, num_speculative_blocks=2))
    sequence = sequences.new(range(8))
    sequence.advance()
    sequence.checkpoint()
    sequence.truncate(7)
    sequence.append([7])
    sequence.commit()
    assert sequences.new(range(9)).needs().prefix_tokens == 0
    assert sequence.num_held() == (3,)


def test_a_checkpoint_for_which_there_is_no_room_changes_nothing() -> None:
    sequences = make(STATE, num_slabs=2)
    sequence = sequences.new(range(4))
    sequence.advance()
    with pytest.raises(OutOfBlocks):
        sequence.checkpoint()
    sequence.append([1])
    assert used(sequences) == [1]


def test_what_began_before_the_cache_was_cleared_is_never_found() -> None:
    """It was computed with other weights."""
    sequences = make(FULL, STATE)
    waiting = sequences.new(range(8))
    waiting.advance()
    waiting.checkpoint()
    sequence = sequences.new(range(10, 18))
    sequence.advance()
    child, _ = sequence.fork()
    assert isinstance(sequences.prefix, PrefixCache)
    sequences.prefix.clear()
    for old in (waiting, sequence, child):
        old.commit()
        assert old.checkpoint() == ()
        old.close()
    sequences.copies_done()
    assert [pool_of(sequences).counts(group)[:2] for group in (0, 1)] == [(0, 0), (0, 0)]
    run(sequences, list(range(8)))
    assert sequences.new(range(9)).needs().prefix_tokens == 8


def test_only_tokens_with_blocks_can_be_computed() -> None:
    sequence = make(FULL).new(range(8))
    sequence.advance(4)
    with pytest.raises(SpecInvalid):
        sequence.commit(5)
    with pytest.raises(SpecInvalid):
        sequence.commit(-1)


# --- lifetimes of a plan ------------------------------------------------------------------------------------------


def test_lifetimes_are_those_of_the_plans_groups() -> None:
    assert lifetimes_of(mixed_plan(), state_step_tokens=256) == (
        Lifetime(kind="full", block_size=16),
        Lifetime(kind="window", block_size=16, reach=100),
        Lifetime(kind="chunk", block_size=16, reach=64),
        Lifetime(kind="encoder", block_size=16),
        Lifetime(kind="state", block_size=256, num_speculative_blocks=2),
    )


def test_a_plan_of_no_length_does_not_say_how_many_states_there_are() -> None:
    plan = mixed_plan(max_model_len=None)
    with pytest.raises(SpecInvalid):
        lifetimes_of(plan)
    assert lifetimes_of(plan, num_speculative_blocks=3)[4].num_speculative_blocks == 3


def test_a_kind_without_a_rule_is_refused() -> None:
    plan = mixed_plan()
    strange = msgspec.structs.replace(plan.groups[0], kind="encoder_only_attention")
    with pytest.raises(NotSupported):
        lifetimes_of(msgspec.structs.replace(plan, groups=(strange,)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "full", "block_size": 0},
        {"kind": "full", "block_size": 1, "reach": 2},
        {"kind": "window", "block_size": 1},
        {"kind": "state", "block_size": 1, "num_speculative_blocks": -1},
    ],
)
def test_lifetimes_without_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalid):
        Lifetime(**wrong)
