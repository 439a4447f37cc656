"""The event log: in order, bounded, and honest to readers who fall behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import SpecInvalid
from kvpage.pages.events import Cursor, EventLog


def digests(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + count)]


def test_a_reader_reads_on_from_where_it_was() -> None:
    log = EventLog()
    start = log.cursor
    for number in range(5):
        log.append("stored", 0, b"".join(digests(number, 1)))
    first = log.read(start, at_most=3)
    second = log.read(first.cursor, at_most=3)
    assert [event.number for event in first.events + second.events] == [1, 2, 3, 4, 5]
    assert [event.hashes for event in second.events] == [tuple(digests(number, 1)) for number in (3, 4)]
    assert log.read(second.cursor).events == ()
    assert second.cursor == log.cursor


def test_a_reader_who_falls_behind_is_told() -> None:
    log = EventLog(most_hashes=10)
    start = log.cursor
    log.append("stored", 0, b"".join(digests(0, 6)))
    kept = log.cursor
    log.append("removed", 0, b"".join(digests(0, 6)))
    page = log.read(start)
    assert page.has_missed
    assert page.events == ()
    assert not log.read(kept).has_missed
    assert len(log.read(kept).events) == 1


def test_an_event_larger_than_the_log_is_missed_not_kept() -> None:
    log = EventLog(most_hashes=3)
    start = log.cursor
    log.append("stored", 0, b"".join(digests(0, 4)))
    assert log.read(start).has_missed
    assert not log.read(log.cursor).has_missed


def test_a_cursor_of_another_log_or_of_the_future_is_told() -> None:
    log = EventLog()
    log.append("stored", 0, b"".join(digests(0, 1)))
    assert log.read(EventLog().cursor).has_missed
    assert log.read(Cursor(log.cursor.log_id, 2)).has_missed
    assert log.read(Cursor(log.cursor.log_id, -1)).has_missed


def test_a_page_has_room_for_an_event() -> None:
    with pytest.raises(SpecInvalid):
        EventLog().read(EventLog().cursor, at_most=0)


def test_nothing_is_no_event() -> None:
    log = EventLog()
    log.append("removed", 0, b"")
    assert log.cursor.number == 0


def test_a_log_keeps_something() -> None:
    with pytest.raises(SpecInvalid):
        EventLog(0)


@given(st.lists(st.integers(1, 4), max_size=30), st.integers(1, 12), st.integers(0, 30))
def test_the_last_events_that_fit_are_kept(sizes: list[int], most_hashes: int, after: int) -> None:
    log = EventLog(most_hashes)
    for size in sizes:
        log.append("stored", 1, b"".join(digests(0, size)))
    kept = 0
    while kept < len(sizes) and sum(sizes[len(sizes) - kept - 1 :]) <= most_hashes:
        kept += 1
    page = log.read(Cursor(log.cursor.log_id, after))
    assert page.has_missed == (not len(sizes) - kept <= after <= len(sizes))
    if not page.has_missed:
        assert [len(event.hashes) for event in page.events] == sizes[after:]
