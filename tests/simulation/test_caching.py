"""Conversations with a prefix cache, against the same with block objects."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import SpecInvalid
from kvpage.simulation.cached_slabs import CachedSlabs
from kvpage.simulation.caching import POLICIES, CachingReplay, CachingResult, Policy
from kvpage.simulation.conversations import Conversations
from kvpage.simulation.layout import Growth, SimulatedGroups, SimulatedLayout, SimulatedPool
from kvpage.simulation.streams import LogNormal, Uniform
from simulation.layouts import layouts
from simulation.naive_caching import NaiveCaching


def talks(people: int, **more: object) -> Conversations:
    """Short ones, so that tests are."""
    short = Conversations(
        people=people,
        first_prompt=LogNormal(6, 0.5),
        later_prompt=LogNormal(3, 0.5),
        answer=LogNormal(4, 0.5),
        turns=Uniform(1, 4),
        mean_pause_steps=6,
    )
    return replace(short, **more)  # type: ignore[arg-type]


@given(
    layout=layouts(),
    people=st.integers(1, 5),
    seed=st.integers(0, 1000),
    policy=st.sampled_from(POLICIES),
    warm_up=st.integers(0, 20),
)
def test_every_number_equals_that_of_the_replay_with_block_objects(
    layout: SimulatedLayout, people: int, seed: int, policy: Policy, warm_up: int
) -> None:
    layout = replace(layout, groups=tuple(replace(group, count=1) for group in layout.groups))
    expected = NaiveCaching(layout, talks(people), seed, policy).run(60, warm_up_steps=warm_up)
    assert CachingReplay(layout, talks(people), seed, policy).run(60, warm_up_steps=warm_up) == expected


def two_groups(slabs: int) -> SimulatedLayout:
    """Full attention, four blocks to a slab, beside a window with one."""
    full = Growth(kind="full", block_size=2)
    window = Growth(kind="window", block_size=2, reach=6)
    groups = tuple(
        SimulatedGroups(count=1, growth=growth, blocks_per_slab=blocks, bytes_per_token=Fraction(1))
        for growth, blocks in ((full, 4), (window, 1))
    )
    pool = SimulatedPool(slabs=slabs, slab_bytes=8)
    return SimulatedLayout(name="two", memory_bytes=slabs * 8, pools=(pool,), groups=groups)


def replayed(slabs: int, policy: Policy = "older_of_block_and_slab", **more: object) -> CachingResult:
    return CachingReplay(two_groups(slabs), talks(6, **more), 1, policy).run(2000, warm_up_steps=100)


def test_with_room_for_everything_every_prefix_is_found() -> None:
    result = replayed(100_000)
    assert (result.found_share, result.evicted_blocks, result.preemptions) == (1, 0, 0)
    assert result.pinned_share > 0
    assert 0 < result.cached_share < 1


def test_with_room_for_little_more_than_what_runs_hardly_any_is() -> None:
    tight, roomy = replayed(24), replayed(60)
    assert tight.found_share < 0.2 < roomy.found_share < 1
    assert tight.evicted_blocks > roomy.evicted_blocks > 0


def test_a_conversation_of_one_turn_asks_for_no_prefix() -> None:
    assert replayed(100, turns=Uniform(1, 1)).found_share == 0


def test_turns_that_do_not_fit_alone_are_refused_and_the_talk_goes_on() -> None:
    result = replayed(9)
    assert result.refused > 0
    assert result.turns > 0


def test_a_group_that_only_evicts_its_own_keeps_slabs_that_others_lack() -> None:
    """Window slabs made while talks were short are never given to the full layers of longer ones."""
    own = [replayed(slabs, "own_oldest").found_share for slabs in (40, 50, 60)]
    older = [replayed(slabs).found_share for slabs in (40, 50, 60)]
    assert sum(older) > sum(own)


def test_the_same_seed_talks_the_same() -> None:
    assert replayed(40) == replayed(40)


@pytest.mark.parametrize("people", [0, -1, 1_000_000])
def test_an_odd_number_of_conversations_is_refused(people: int) -> None:
    with pytest.raises(SpecInvalid, match="conversations is"):
        Conversations(people=people)


def test_the_comparison_sees_another_policy() -> None:
    expected = NaiveCaching(two_groups(40), talks(6), 1, "own_oldest").run(300, warm_up_steps=0)
    assert CachingReplay(two_groups(40), talks(6), 1, "own_oldest").run(300, warm_up_steps=0) == expected
    assert CachingReplay(two_groups(40), talks(6), 1, "older_of_block_and_slab").run(300, warm_up_steps=0) != expected
    assert 0 < expected.found_share < 1


def test_the_books_balance() -> None:
    slabs = CachedSlabs(4)
    slabs.add_slab()
    assert (slabs.free_blocks, slabs.drop_empty(), slabs.owned_slabs) == (4, 1, 0)
