"""The replay against the same done with block objects, and what holds whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.simulation.layout import Growth, SimulatedGroups, SimulatedLayout, SimulatedPool
from kvpage.simulation.replay import Replay
from kvpage.simulation.streams import RequestLengths
from simulation.layouts import layouts, request_lengths
from simulation.naive import NaiveReplay


@given(layout=layouts(), lengths=request_lengths, warm_up=st.integers(0, 20), steps=st.integers(1, 60))
def test_every_number_equals_that_of_the_replay_with_block_objects(
    layout: SimulatedLayout, lengths: list[RequestLengths], warm_up: int, steps: int
) -> None:
    expected = NaiveReplay(layout, cycle(lengths)).run(steps, warm_up_steps=warm_up)
    assert Replay(layout, cycle(lengths)).run(steps, warm_up_steps=warm_up) == expected


@given(layout=layouts(), lengths=request_lengths)
def test_what_is_live_is_held_and_what_is_held_is_there(layout: SimulatedLayout, lengths: list[RequestLengths]) -> None:
    result = Replay(layout, cycle(lengths)).run(50, warm_up_steps=0)
    assert 0 <= result.live_share <= result.held_share <= 1


def one_group(growth: Growth, slabs: int, blocks_per_slab: int = 1) -> SimulatedLayout:
    group = SimulatedGroups(count=1, growth=growth, blocks_per_slab=blocks_per_slab, bytes_per_token=Fraction(1))
    pool = SimulatedPool(slabs=slabs, slab_bytes=growth.block_size * blocks_per_slab)
    return SimulatedLayout(name="one", memory_bytes=slabs * pool.slab_bytes, pools=(pool,), groups=(group,))


FULL = Growth(kind="full", block_size=1)


def test_by_hand() -> None:
    """Six blocks of a token; every request has 1 + 3 tokens, so it holds 2, 3 and 4 blocks in its three steps.

    Steps: A2 B2 C2; A3 B3 (C is preempted for A, having 2); A4 (B for A); B4 (A is done; C, back with 3, has no room).
    """
    result = Replay(one_group(FULL, slabs=6), cycle([RequestLengths(1, 3)])).run(4, warm_up_steps=0)
    assert result.mean_running == (3 + 2 + 1 + 1) / 4
    assert result.live_share == result.held_share == (6 + 6 + 4 + 4) / (4 * 6)
    assert (result.preemptions, result.finished, result.refused) == (2, 1, 0)


def test_a_request_that_does_not_fit_alone_is_refused_and_the_others_go_on() -> None:
    requests = cycle([RequestLengths(1, 1), RequestLengths(1, 9), RequestLengths(50, 1)])
    result = Replay(one_group(FULL, slabs=5), requests).run(300, warm_up_steps=0)
    assert result.refused > 10
    assert result.finished > 10
    assert result.refused >= result.finished  # two of three can never finish


def test_a_pool_in_which_nothing_fits_runs_nothing_and_ends() -> None:
    result = Replay(one_group(FULL, slabs=1), cycle([RequestLengths(1, 1)])).run(10, warm_up_steps=0)
    assert (result.mean_running, result.live_share, result.refused) == (0, 0, 10)


@pytest.mark.parametrize(("blocks", "can_run"), [(3, True), (2, False)])
def test_a_window_of_two_blocks_needs_three_of_them_however_long_the_request(blocks: int, can_run: bool) -> None:
    layout = one_group(Growth(kind="window", block_size=4, reach=8), slabs=blocks)
    result = Replay(layout, cycle([RequestLengths(1001, 1000)])).run(3000, warm_up_steps=0)
    assert (result.finished > 0, result.refused == 0) == (can_run, can_run)


def test_no_more_run_than_may() -> None:
    replay = Replay(one_group(FULL, slabs=1000), cycle([RequestLengths(1, 5)]), max_running=7)
    assert replay.run(50, warm_up_steps=0).mean_running == 7


def test_one_slab_more_may_run_fewer_so_nobody_may_rely_on_the_opposite() -> None:
    """The larger pool lets one more in, whose growth preempts."""
    running = [
        Replay(one_group(FULL, slabs=slabs), cycle([RequestLengths(2, 4)])).run(60, warm_up_steps=0).mean_running
        for slabs in (15, 16, 32)
    ]
    assert running[1] < running[0] < running[2]


def test_the_comparison_sees_a_wrong_layout() -> None:
    right = one_group(FULL, slabs=30, blocks_per_slab=3)
    wrong = replace(right, groups=(replace(right.groups[0], blocks_per_slab=2),))
    lengths = [RequestLengths(3, 5), RequestLengths(7, 2)]
    expected = NaiveReplay(wrong, cycle(lengths)).run(50, warm_up_steps=0)
    assert Replay(right, cycle(lengths)).run(50, warm_up_steps=0) != expected
