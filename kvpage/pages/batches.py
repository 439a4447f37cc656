"""Ids and counts as callers give them, made sure of before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.errors import SpecInvalid, shorten
from kvpage.pages.arrays import Ints
from kvpage.pages.geometry import Places

Marks = npt.NDArray[np.int16]
_MOST_MARKED = 2**15
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


def whole_number(count: Any, what: str) -> int:
    """Raises `SpecInvalid` for anything but an integer that is not negative."""
    try:
        number = -1 if isinstance(count, bool) else operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise SpecInvalid(f"{what} is {shorten(repr(count))}; it must be a whole number, 0 or more")
    return number


def block_ids(ids: Ids, num_blocks: int = 2**31) -> Places:
    """Raises `SpecInvalid` unless `ids` is a sequence of integers from 0 to below `num_blocks`; without it, of what can
    be the id of a block in any pool.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise SpecInvalid(f"block ids must be a flat sequence of integers, not {shorten(repr(ids))}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SpecInvalid(f"block ids must be a flat sequence of integers, not {shorten(repr(ids))}")
    places = array.astype(np.intp)
    if np.count_nonzero(places.view(np.uintp) >= num_blocks):  # negative ones are large when read so
        wrong = array[places.view(np.uintp) >= num_blocks][0]
        raise SpecInvalid(f"block {wrong} is none of the group's, which are 1 to {num_blocks - 1}")
    return places


class Repeated(NamedTuple):
    """A batch that names something twice: each once, in the order of its first place, and how often."""

    slots: Places
    times: Ints


def repeated(slots: Places, marks: Marks) -> Repeated | None:
    """None when no slot stands twice in the batch. `marks`: scratch, an entry a slot."""
    if len(slots) <= _MOST_MARKED:  # quicker than to sort: the second of two overwrites the mark of the first
        order = np.arange(len(slots), dtype=np.int16)
        marks[slots] = order
        if not np.count_nonzero(marks.take(slots) != order):
            return None
    found, first, times = np.unique(slots, return_index=True, return_counts=True)
    if len(found) == len(slots):
        return None
    by_place = np.argsort(first)
    return Repeated(found[by_place], times[by_place].astype(np.int32))


def distinct(slots: Places, marks: Marks) -> Places:
    """Each once."""
    twice = repeated(slots, marks)
    return twice.slots if twice else slots
