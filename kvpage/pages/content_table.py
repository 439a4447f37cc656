"""From a hash to the slot that holds its content: buckets of places in a flat array, for a thousand hashes at once.

A hash belongs to one bucket of eight places, a line of the processor's cache. A place holds a slot and a part of its
hash; the rest is proven by the hash that is written beside the slot. What finds its bucket full is in a dictionary. A
dictionary of everything would take some 200 bytes for each hash, and several times the time.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.pages.geometry import Places
from kvpage.pages.hashing import HASH_BYTES

Hashes = npt.NDArray[np.uint64]
"""(n, 2): each as two integers."""
_WIDTH = 8  # places of a bucket
_MOST_LOAD = 3  # hashes to a bucket, when every slot has one: one bucket in 250 is too full then
_FACTOR = 0x9E3779B97F4A7C15  # odd: a product with it depends on every bit of the other factor
_64_BITS = 2**64 - 1
_SLOT_BITS = 32
_HALVES = struct.Struct("=QQ")
_IS_OVERFLOWN = -1  # as the place of a slot


def hashes_array(hashes: bytes) -> Hashes:
    """Of hashes that lie one after the other."""
    return np.frombuffer(hashes, np.uint64).reshape(-1, 2)


class _Keys(NamedTuple):
    """What a hash is looked for by."""

    buckets: Places
    marks: npt.NDArray[np.int64]
    """31 bits of what it is mixed to, above the bits of a slot."""


class ContentTable:
    """Slots are found by group and hash. The owner writes the rows, before a slot is inserted and after it is
    forgotten."""

    def __init__(self, rows: Hashes) -> None:
        """`rows`: of each slot the hash, zeros where there is none; of slot 0 too."""
        num_slots = len(rows)
        buckets = 1 << (num_slots // _MOST_LOAD).bit_length()
        self._mask = buckets - 1
        self._halves: npt.NDArray[np.uint64] = rows.reshape(-1)
        self._table: npt.NDArray[np.int64] = np.zeros(buckets * _WIDTH, np.int64)
        self._places: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Of a slot, 1 + its place in the table; 0: it has none; -1: it is in `_overflow`."""
        self._groups: npt.NDArray[np.int16] = np.zeros(num_slots, np.int16)
        self._bytes = memoryview(rows).cast("B")  # type: ignore[arg-type] # no buffer protocol in NumPy's stubs
        self._table_at = memoryview(self._table)  # type: ignore[arg-type]
        self._places_at = memoryview(self._places)  # type: ignore[arg-type]
        self._groups_at = memoryview(self._groups)  # type: ignore[arg-type]
        self._was_full: npt.NDArray[np.bool_] = np.zeros(buckets, np.bool_)
        """Of a bucket: something that belongs there was ever put into `_overflow`."""
        self._overflow: dict[tuple[int, bytes], int] = {}
        self._overflown: dict[int, tuple[int, bytes]] = {}
        """The same the other way round."""

    def _keys(self, group: int, hashes: Hashes) -> _Keys:
        # Mixed, because nobody promises that hashes are random, and with the group: two may use the same hash.
        mixed = hashes[:, 0] + hashes[:, 1] * np.uint64(_FACTOR) + np.uint64(group * _FACTOR & _64_BITS)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_FACTOR)
        buckets: Places = (mixed >> np.uint64(1) & np.uint64(self._mask)).astype(np.intp)
        marks = (mixed >> np.uint64(33) << np.uint64(_SLOT_BITS)).view(np.int64)
        return _Keys(buckets, marks)

    def _key(self, group: int, content: bytes) -> tuple[int, int]:
        """As `_keys`, of one: its bucket and mark."""
        first, second = _HALVES.unpack(content)
        mixed = (first + second * _FACTOR + group * _FACTOR) & _64_BITS
        mixed = (mixed ^ mixed >> 32) * _FACTOR & _64_BITS
        return mixed >> 1 & self._mask, mixed >> 33 << _SLOT_BITS

    # --- finding ------------------------------------------------------------------------------------------------------

    def find_one(self, group: int, content: bytes) -> int:
        """The slot; 0 where there is none."""
        bucket, mark = self._key(group, content)
        table, start = self._table_at, bucket * _WIDTH
        for entry in table[start : start + _WIDTH].tolist():
            if entry & ~0xFFFFFFFF == mark and self._is(group, entry & 0xFFFFFFFF, content):
                return entry & 0xFFFFFFFF
        return self._overflow.get((group, content), 0) if self._overflow else 0

    def _is(self, group: int, slot: int, content: bytes) -> bool:
        start = slot * HASH_BYTES
        return self._bytes[start : start + HASH_BYTES] == content and self._groups_at[slot] == group

    def find(self, group: int, hashes: Hashes) -> Places:
        """The slot of each; 0 where there is none."""
        keys = self._keys(group, hashes)
        entries = self._table.reshape(-1, _WIDTH)[keys.buckets]
        same = (entries & ~0xFFFFFFFF) == keys.marks[:, None]
        found = entries[np.arange(len(hashes)), same.argmax(1)] & 0xFFFFFFFF
        right = (self._halves.take(2 * found) == hashes[:, 0]) & (self._halves.take(2 * found + 1) == hashes[:, 1])
        right &= (self._groups.take(found) == group) & (found > 0)
        found[~right] = 0
        if self._overflow or np.count_nonzero(same) > np.count_nonzero(right):  # of two with one mark, the other
            elsewhere = same.any(1) | self._was_full.take(keys.buckets)
            for place in np.flatnonzero(~right & elsewhere).tolist():
                found[place] = self.find_one(group, hashes[place].tobytes())
        found_slots: Places = found
        return found_slots

    def has(self, group: int, slot: int) -> bool:
        """Whether the slot is the group's, and holds something."""
        return self._places_at[slot] != 0 and self._groups_at[slot] == group

    def has_any(self, slots: Places) -> npt.NDArray[np.bool_]:
        """Of each slot: whether it holds something, whoever's it is."""
        has_any: npt.NDArray[np.bool_] = self._places.take(slots) != 0
        return has_any

    def slots_of(self, group: int) -> Places:
        """Those of the group, ascending. Looks at every slot."""
        slots: Places = np.flatnonzero((self._places != 0) & (self._groups == group))
        return slots

    # --- changing -----------------------------------------------------------------------------------------------------

    def insert_one(self, group: int, slot: int, content: bytes) -> None:
        """The slot, which is nowhere yet, holds this, which no other holds."""
        self._groups_at[slot] = group
        bucket, mark = self._key(group, content)
        table = self._table_at
        for place in range(bucket * _WIDTH, (bucket + 1) * _WIDTH):
            if not table[place]:
                table[place] = mark | slot
                self._places_at[slot] = place + 1
                return
        self._keep_apart(group, slot, content)

    def _keep_apart(self, group: int, slot: int, content: bytes) -> None:
        self._was_full[self._key(group, content)[0]] = True
        self._places_at[slot] = _IS_OVERFLOWN
        self._overflow[group, content] = slot
        self._overflown[slot] = (group, content)

    def insert(self, group: int, slots: Places, hashes: Hashes) -> None:
        """As `insert_one` of each, no slot and no hash twice."""
        self._groups[slots] = group
        keys = self._keys(group, hashes)
        buckets, entries = keys.buckets, keys.marks | slots
        while len(slots):
            is_free = self._table.reshape(-1, _WIDTH)[buckets] == 0
            column = is_free.argmax(1)
            has_room = is_free[np.arange(len(slots)), column]
            if not has_room.all():
                for slot, row in zip(slots[~has_room].tolist(), hashes[~has_room], strict=True):
                    self._keep_apart(group, slot, row.tobytes())
                slots, hashes, entries = slots[has_room], hashes[has_room], entries[has_room]
                buckets, column = buckets[has_room], column[has_room]
            places = buckets * _WIDTH + column
            self._table[places] = entries
            won = self._table.take(places) == entries  # of several for one place, one
            self._places[slots[won]] = places[won] + 1
            slots, hashes, entries, buckets = slots[~won], hashes[~won], entries[~won], buckets[~won]

    def forget(self, slots: Places) -> None:
        """They hold nothing any more."""
        places = self._places.take(slots)
        if self._overflow:
            for slot in slots[places == _IS_OVERFLOWN].tolist():
                del self._overflow[self._overflown.pop(slot)]
        self._table[places[places > 0] - 1] = 0
        self._places[slots] = 0

    def forget_one(self, slot: int) -> None:
        """As `forget` of one."""
        place = self._places_at[slot]
        if place == _IS_OVERFLOWN:
            del self._overflow[self._overflown.pop(slot)]
        elif place:
            self._table_at[place - 1] = 0
        self._places_at[slot] = 0
