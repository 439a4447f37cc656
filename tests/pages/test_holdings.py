"""Who holds which block: beside dictionaries that say the same, and after kills."""

from __future__ import annotations

import mmap
import os
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid
from kvpage.pages.geometry import Geometry
from kvpage.pages.holding_arrays import MAX_HOLDERS, HoldingArrays, holdings_bytes, num_shares
from kvpage.pages.holdings import Holdings

GEOMETRY = Geometry(6, (4, 1))
GROUP_OF_SLAB = (0, 0, 1, 0, 1, 0)
SLOTS = [slot for slot in range(4, 24) if GROUP_OF_SLAB[slot // 4] == 0 or slot % 4 == 0]
HOLDERS = (1, 2, 3, MAX_HOLDERS)

Model = dict[int, Counter[int]]
"""By holder: slots, and how often it holds them."""


def make(geometry: Geometry = GEOMETRY) -> tuple[Holdings, bytearray]:
    buffer = bytearray(holdings_bytes(geometry))
    return Holdings(geometry, buffer), buffer


def group_of(slot: int) -> int:
    return GROUP_OF_SLAB[slot // 4]


def slots_of(*slots: int) -> Any:
    return np.array(slots, np.intp)


def times_of(*times: int) -> Any:
    return np.array(times, np.int32)


def agree(holdings: Holdings, model: Model) -> None:
    assert holdings.check() is None
    times = np.zeros(GEOMETRY.num_slots, int)
    counts = np.zeros((MAX_HOLDERS + 1, 2), int)
    owners = np.zeros(6, int)
    for holder in HOLDERS:
        held, mine = holdings.held_by(holder), +model[holder]
        assert held.slots.tolist() == sorted(mine)
        assert held.times.tolist() == [mine[slot] for slot in sorted(mine)]
        assert held.groups.tolist() == [group_of(slot) for slot in sorted(mine)]
        assert holdings.times(holder, slots_of(*SLOTS)).tolist() == [mine[slot] for slot in SLOTS]
        for slot, count in mine.items():
            times[slot] += count
            counts[holder, group_of(slot)] += 1
            owners[slot // 4] = 1 + group_of(slot)
    assert holdings.times_held().tolist() == times.tolist()
    assert holdings.count_blocks(2).tolist() == counts.tolist()
    assert holdings.owners().tolist() == owners.tolist()
    assert holdings.holders() == {holder for holder in HOLDERS if +model[holder]}


def change(data: st.DataObject, holdings: Holdings, model: Model, holder: int, serial: int) -> set[int]:
    """One of each kind. Returns the slots that were given."""
    given: set[int] = set()
    for kind in data.draw(st.lists(st.sampled_from(["give", "share", "take", "move"]), max_size=4), "kinds"):
        group = data.draw(st.integers(0, 1), "group")
        nobodys = [slot for slot in SLOTS if group_of(slot) == group and not any(model[one][slot] for one in HOLDERS)]
        mine = sorted(slot for slot in +model[holder] if group_of(slot) == group)
        if kind == "give" and nobodys:
            chosen = data.draw(st.lists(st.sampled_from(nobodys), unique=True), "slots")
            holdings.give(holder, group, slots_of(*chosen), serial)
            model[holder].update(chosen)
            given |= set(chosen)
        elif kind == "share":
            every = [slot for slot in SLOTS if group_of(slot) == group]
            chosen = data.draw(st.lists(st.sampled_from(every), unique=True), "slots")
            times = [data.draw(st.integers(1, 3), "times") for _ in chosen]
            num_new = holdings.share(holder, group, slots_of(*chosen), times_of(*times))
            assert num_new == sum(not model[holder][slot] for slot in chosen)
            model[holder].update(dict(zip(chosen, times, strict=True)))
        elif kind == "take" and mine:
            chosen = data.draw(st.lists(st.sampled_from(mine), unique=True), "slots")
            times = [data.draw(st.integers(1, model[holder][slot]), "times") for slot in chosen]
            num_ended = holdings.take(holder, slots_of(*chosen), times_of(*times))
            model[holder].subtract(dict(zip(chosen, times, strict=True)))
            assert num_ended == sum(not model[holder][slot] for slot in chosen)
        elif kind == "move":
            before = data.draw(st.sampled_from([one for one in HOLDERS if one != holder]), "from")
            theirs = sorted(slot for slot in +model[before] if group_of(slot) == group)
            chosen = data.draw(st.lists(st.sampled_from(theirs), unique=True), "slots") if theirs else []
            num_new = holdings.move(before, holder, group, slots_of(*chosen), serial)
            assert num_new == sum(not model[holder][slot] for slot in chosen)
            model[before].subtract(chosen)
            model[holder].update(chosen)
    return given


@given(st.data())
@settings(max_examples=100)
def test_holdings_are_what_dictionaries_say(data: st.DataObject) -> None:
    holdings, buffer = make()
    model: Model = defaultdict(Counter)
    for number in range(data.draw(st.integers(1, 12), "operations")):
        before = {holder: counts.copy() for holder, counts in model.items()}
        holder = data.draw(st.sampled_from(HOLDERS), "holder")
        last = holdings.last(holder)
        serial = holdings.begin(holder, number + 1, 7)
        assert serial == last.serial + 1
        given = change(data, holdings, model, holder, serial)
        how = data.draw(st.sampled_from(["end", "undo", "killed", "recover"]), "how")
        if how == "end":
            holdings.end()
            assert holdings.last(holder) == (number + 1, serial, 7)
            still = {slot for slot in holdings.given(holder, serial).slots.tolist() if slot in given}
            alone = {slot for slot in given if holdings.holds_once(holder, slot)}
            assert still <= alone <= given
        else:
            model = defaultdict(Counter, before)
            if how == "undo":
                holdings.undo()
            elif how == "recover":
                holdings.recover()
            else:
                holdings = Holdings(GEOMETRY, buffer)
            assert holdings.last(holder) == last
        agree(holdings, model)
    agree(Holdings(GEOMETRY, buffer), model)


def test_what_a_step_gave_is_known_until_it_is_given_away() -> None:
    holdings, _ = make()
    serial = holdings.begin(1, 5, 2)
    holdings.give(1, 0, slots_of(4, 5), serial)
    holdings.share(1, 0, slots_of(6), times_of(1))  # not given: it was there
    holdings.end()
    assert holdings.given(1, serial).slots.tolist() == [4, 5]
    holdings.begin(2)
    holdings.share(2, 0, slots_of(5), times_of(1))
    holdings.end()
    assert holdings.given(1, serial).slots.tolist() == [4]


def test_a_slot_may_change_three_times_in_one_operation_of_every_slot() -> None:
    geometry = Geometry(400, (1,))
    holdings, buffer = make(geometry)
    slots, once = np.arange(1, 400), np.ones(399, np.int32)
    holdings.give(1, 0, slots, holdings.begin(1))
    holdings.end()
    serial = holdings.begin(1)
    holdings.share(1, 0, slots, once)
    holdings.take(1, slots, 2 * once)
    holdings.give(1, 0, slots, serial)
    for again in (Holdings(geometry, bytearray(buffer)), holdings):
        again.undo()
        assert again.check() is None
        assert again.held_by(1).times.tolist() == [1] * 399
        assert again.given(1, 1).slots.tolist() == slots.tolist()


def test_a_full_table_of_shares_refuses_and_nothing_has_changed() -> None:
    geometry = Geometry(9, (1,))
    holdings, _ = make(geometry)
    slots = np.arange(1, 9)
    num_holders = num_shares(geometry) // 8  # each takes a row for each slot
    for holder in range(1, num_holders + 1):
        holdings.begin(holder)
        holdings.share(holder, 0, slots, np.ones(8, np.int32))
        holdings.end()
    times = holdings.times_held().tolist()
    left = num_shares(geometry) - 8 * num_holders
    assert 0 <= left < 8
    holdings.begin(num_holders + 1, 3)
    with pytest.raises(OutOfBlocks):
        holdings.share(num_holders + 1, 0, slots, np.ones(8, np.int32))
    holdings.undo()
    assert holdings.check() is None
    assert holdings.times_held().tolist() == times
    assert holdings.last(num_holders + 1).key == 0
    holdings.drop(1)  # and rows are used again
    holdings.begin(num_holders + 1)
    holdings.share(num_holders + 1, 0, slots, np.ones(8, np.int32))
    holdings.end()
    assert holdings.check() is None


def test_serials_begin_anew_before_they_are_too_large() -> None:
    holdings, buffer = make()
    ops = HoldingArrays(GEOMETRY, buffer).ops
    ops[4 * 1 + 1] = 2**37 - 2
    serial = holdings.begin(1)
    holdings.give(1, 0, slots_of(4), serial)
    holdings.end()
    assert serial == 2**37 - 1
    assert holdings.given(1, serial).slots.tolist() == [4]
    assert holdings.begin(1) == 1
    holdings.end()
    assert holdings.check() is None


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_a_buffer_of_another_size_or_that_cannot_be_written_is_refused() -> None:
    size = holdings_bytes(GEOMETRY)
    for buffer in (bytearray(size - 8), bytearray(size + 8), bytes(size)):
        with pytest.raises(SpecInvalid):
            Holdings(GEOMETRY, buffer)


@pytest.mark.parametrize(
    "words",
    [
        {0: 5}, {8: -1}, {8: 10**6}, {1: 1, 6: -1}, {1: 1, 2: 1, 6: 10**6}, {1: 1, 2: 1, 7: 10**6}, {1: 1, 2: 0},
        {1: 1, 2: 9999},
    ],
)  # fmt: skip
def test_a_buffer_that_says_what_cannot_be_is_refused(words: dict[int, int]) -> None:
    _, buffer = make()
    header = memoryview(buffer).cast("q")
    for word, value in words.items():
        header[word] = value
    with pytest.raises(Conflict):
        Holdings(GEOMETRY, buffer)


@pytest.mark.parametrize(
    ("name", "value"), [("log_slots", -1), ("log_slots", 24), ("log_shares", -1), ("log_shares", 10**6)]
)
def test_notes_of_what_does_not_exist_are_refused(name: str, value: int) -> None:
    holdings, buffer = make()
    holdings.begin(1)
    holdings.share(1, 0, slots_of(4), times_of(2))
    getattr(holdings._arrays, name).flat[0] = value
    with pytest.raises(Conflict):
        Holdings(GEOMETRY, buffer)


def test_memory_that_nobody_used_is_not_touched() -> None:
    geometry = Geometry(1_000_001, (1,))
    size = holdings_bytes(geometry)
    descriptor = os.memfd_create("holdings")
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as mapped:
        holdings = Holdings(geometry, mapped)
        assert holdings.is_new
        assert os.fstat(descriptor).st_blocks * 512 <= 64 << 10
        serial = holdings.begin(1)
        holdings.give(1, 0, np.arange(1, 1001), serial)
        holdings.end()
        assert os.fstat(descriptor).st_blocks * 512 <= 128 << 10
        holdings.close()
        holdings.close()
    os.close(descriptor)
