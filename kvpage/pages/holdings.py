"""Who holds which block, and how often: arrays that outlive the process, and the truth about holding.

A pool's own counts say how often a block is held, these say by whom. Both are changed one after the other, so a process
killed between them leaves them apart: the next one takes these for true (`times_held`), and gives back what nobody here
holds. Layout, native byte order, each array at a multiple of 64 bytes:

    header      int64[16]           which state this is, and the operation under way (below)
    ops         int64[holders, 4]   of each holder: key, serial and result of its last operation
    holding     int64[slots]        serial << 16 | holder, of a block that one holder holds once; 0: nobody holds it;
                                    `SHARED`: see `shares`
    shares      int64[shares, 2]    slot << 16 | holder, and how often; 0, 0: unused
    log_slots   int32[2 * slots]    blocks that the operation under way changes
    log_holding int64[2 * slots]    and their `holding` before it
    log_shares  int64[2 * shares, 3]  index and row of `shares` before it

An operation notes what it changes before it changes it, until `end`; the next process takes back what is noted. Pages
that nobody touched take no memory.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid
from kvpage.pages.arrays import Ints
from kvpage.pages.geometry import Geometry, Places

MAGIC = int.from_bytes(b"kvphld1\0", "little")
MAX_HOLDERS = 1023
SHARED = 0xFFFF
_HOLDER_BITS = 16
_ALIGNMENT_BYTES = 64
_MAGIC, _ARMED, _HOLDER, _KEY, _SERIAL, _RESULT, _NUM_SLOTS, _NUM_SHARES, _NUM_ROWS = range(9)

_Words = npt.NDArray[np.int64]


class Held(NamedTuple):
    """Blocks of one holder, as slots in ascending order, and how often it holds each."""

    slots: Places
    times: Ints


class LastOperation(NamedTuple):
    """What a holder did last, for one who asks again because no answer came."""

    key: int
    serial: int
    result: int


def num_shares(geometry: Geometry) -> int:
    """How many times, at most, a holder may hold a block that others hold too, or hold it more than once."""
    return geometry.num_slots // 2 + 1024


def _layout(geometry: Geometry) -> dict[str, tuple[Literal["i", "q"], int]]:
    slots, shares = geometry.num_slots, num_shares(geometry)
    return {
        "header": ("q", 16),
        "ops": ("q", 4 * (MAX_HOLDERS + 1)),
        "holding": ("q", slots),
        "shares": ("q", 2 * shares),
        "log_slots": ("i", 2 * slots),
        "log_holding": ("q", 2 * slots),
        "log_shares": ("q", 6 * shares),
    }


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def holdings_bytes(geometry: Geometry) -> int:
    """Size of the buffer that `Holdings` of this geometry need."""
    return sum(_aligned(count * np.dtype(code).itemsize) for code, count in _layout(geometry).values())


class Holdings:
    """Holders are numbers from 1 to `MAX_HOLDERS`. Slots as in `Geometry`; no method is given a slot twice.

    Every operation is `begin`, any of `give`, `share`, `take`, `move`, then `end`, or `undo`.
    """

    def __init__(self, geometry: Geometry, buffer: Any) -> None:
        """`buffer`: writable, `holdings_bytes(geometry)` bytes; zeros at first. An operation that was under way when
        its process ended is taken back. Raises `SpecInvalid` for another size, `Conflict` for another content.
        """
        self.geometry = geometry
        found = _cut(geometry, buffer)
        self._header, self._ops = found["header"], found["ops"]
        self._holding_at, self._log_slots_at = found["holding"], found["log_slots"]
        self._log_holding_at = found["log_holding"]
        self._holding: _Words = np.frombuffer(found["holding"], np.int64)
        self._shares: _Words = np.frombuffer(found["shares"], np.int64).reshape(-1, 2)
        self._log_slots: Ints = np.frombuffer(found["log_slots"], np.int32)
        self._log_holding: _Words = np.frombuffer(found["log_holding"], np.int64)
        self._log_shares: _Words = np.frombuffer(found["log_shares"], np.int64).reshape(-1, 3)
        if self._header[_MAGIC] not in (0, MAGIC):
            raise Conflict(f"the buffer begins with {self._header[_MAGIC]}, so it does not say who holds blocks")
        self._header[_MAGIC] = MAGIC
        self._find_shares()
        self.undo()

    def _find_shares(self) -> None:
        """`_sharers[slot][holder]` is the row of `shares`; rows that are used by nobody are in `_unused`."""
        num_rows = self._header[_NUM_ROWS]  # no further: to look at a page of a memfd is to take memory for it
        used = np.flatnonzero(self._shares[:num_rows, 0])
        self._sharers: dict[int, dict[int, int]] = {}
        for row in used.tolist():
            slot, holder = divmod(int(self._shares[row, 0]), 1 << _HOLDER_BITS)
            self._sharers.setdefault(slot, {})[holder] = row
        self._unused = np.setdiff1d(np.arange(num_rows), used).tolist()

    def close(self) -> None:
        """Let go of the buffer."""
        vars(self).clear()

    # --- looking ------------------------------------------------------------------------------------------------------

    def times_held(self) -> Ints:
        """By slot: how often all holders together hold it."""
        times: Ints = (self._holding > 0).astype(np.int32)
        for slot, rows in self._sharers.items():
            times[slot] = sum(int(self._shares[row, 1]) for row in rows.values())
        return times

    def times(self, holder: int, slots: Places) -> Ints:
        """How often the holder holds each of the slots."""
        holding = self._holding.take(slots)
        holders = holding & SHARED
        times: Ints = (holders == holder).astype(np.int32)
        for place in np.flatnonzero(holders == SHARED).tolist():
            row = self._sharers[int(slots[place])].get(holder)
            times[place] = 0 if row is None else int(self._shares[row, 1])
        return times

    def holds_once(self, holder: int, slot: int) -> bool:
        """Whether the holder alone holds it, and once."""
        return self._holding_at[slot] & SHARED == holder

    def held_by(self, holder: int) -> Held:
        """Everything that the holder holds. Looks at every block."""
        own = np.flatnonzero(self._holding & SHARED == holder)
        shared = [(slot, rows[holder]) for slot, rows in self._sharers.items() if holder in rows]
        slots = np.array([slot for slot, _ in shared], np.intp)
        times = np.array([self._shares[row, 1] for _, row in shared], np.int32)
        slots, times = np.concatenate((own, slots)), np.concatenate((np.ones(len(own), np.int32), times))
        order = np.argsort(slots)
        return Held(slots[order], times[order])

    def holders(self) -> set[int]:
        """Who holds anything. Looks at every block."""
        holders = set(np.unique(self._holding & SHARED).tolist()) - {0, SHARED}
        return holders.union(*self._sharers.values()) if self._sharers else holders

    def count_blocks(self, group_of_slab: Ints, num_groups: int) -> _Words:
        """By holder and group: blocks that it holds, each once. Looks at every block."""
        counts = np.zeros((MAX_HOLDERS + 1, num_groups), np.int64)
        own = np.flatnonzero((self._holding > 0) & (self._holding & SHARED != SHARED))
        np.add.at(counts, (self._holding[own] & SHARED, group_of_slab[own // self.geometry.slots_per_slab]), 1)
        for slot, rows in self._sharers.items():
            for holder in rows:
                counts[holder, group_of_slab[slot // self.geometry.slots_per_slab]] += 1
        return counts

    def drop(self, holder: int) -> None:
        """The holder holds nothing any more."""
        self.begin(holder)
        self.take(holder, *self.held_by(holder))
        self.end()

    def given(self, holder: int, serial: int) -> Places:
        """Slots, ascending, that `give` or `move` gave to the holder with this serial and that it still holds, alone.
        Looks at every block."""
        return np.flatnonzero(self._holding == (serial << _HOLDER_BITS | holder))

    def last(self, holder: int) -> LastOperation:
        """What the holder did last; zeros: nothing yet."""
        start = 4 * holder
        return LastOperation(*self._ops[start : start + 3])

    # --- changing -----------------------------------------------------------------------------------------------------

    def begin(self, holder: int, key: int = 0, result: int = 0) -> int:
        """An operation of this holder, which `last` names from now on. Returns its serial."""
        header, ops, start = self._header, self._ops, 4 * holder
        header[_HOLDER] = holder
        header[_KEY], header[_SERIAL], header[_RESULT] = ops[start], ops[start + 1], ops[start + 2]
        header[_NUM_SLOTS] = header[_NUM_SHARES] = 0
        header[_ARMED] = 1
        serial = ops[start + 1] + 1
        ops[start], ops[start + 1], ops[start + 2] = key, serial, result
        return serial

    def end(self) -> None:
        self._header[_ARMED] = 0

    def undo(self) -> None:
        """Take back the operation under way, if there is one."""
        header = self._header
        if not header[_ARMED]:
            return
        count = header[_NUM_SLOTS]
        # Backwards: of a slot that was changed twice the first note is what it was.
        self._holding[self._log_slots[:count][::-1]] = self._log_holding[:count][::-1]
        for index, *row in self._log_shares[: header[_NUM_SHARES]][::-1].tolist():
            self._shares[index] = row
        start = 4 * header[_HOLDER]
        self._ops[start], self._ops[start + 1] = header[_KEY], header[_SERIAL]
        self._ops[start + 2] = header[_RESULT]
        self.end()
        self._find_shares()

    def give_one(self, holder: int, slot: int, serial: int) -> None:
        """As `give` of one."""
        header = self._header
        count = header[_NUM_SLOTS]
        self._log_slots_at[count], self._log_holding_at[count] = slot, self._holding_at[slot]
        header[_NUM_SLOTS] = count + 1
        self._holding_at[slot] = serial << _HOLDER_BITS | holder

    def take_one(self, slot: int) -> None:
        """The one who alone holds it, once, does not any more."""
        header = self._header
        count = header[_NUM_SLOTS]
        self._log_slots_at[count], self._log_holding_at[count] = slot, self._holding_at[slot]
        header[_NUM_SLOTS] = count + 1
        self._holding_at[slot] = 0

    def give(self, holder: int, slots: Places, serial: int) -> None:
        """The holder holds these slots, which nobody holds, once."""
        self._set(slots, serial << _HOLDER_BITS | holder)

    def move(self, slots: Places, holder: int, serial: int) -> None:
        """Those who hold these slots alone, and once, hold them no more, and the holder does."""
        self._set(slots, serial << _HOLDER_BITS | holder)

    def _set(self, slots: Places, value: int) -> None:
        start = self._header[_NUM_SLOTS]
        end = start + len(slots)
        self._log_slots[start:end] = slots
        self._log_holding[start:end] = self._holding.take(slots)
        self._header[_NUM_SLOTS] = end
        self._holding[slots] = value

    def share(self, holder: int, slots: Places, times: Ints, serial: int) -> int:
        """The holder holds these slots so many times more; returns how many of them it did not hold before.

        Raises `OutOfBlocks`, and then `undo` is to be called, where too many are shared.
        """
        alone = (self._holding.take(slots) == 0) & (times == 1)
        self.give(holder, slots[alone], serial)
        num_new = int(np.count_nonzero(alone))
        shared = np.flatnonzero(~alone)
        for slot, more in zip(slots[shared].tolist(), times[shared].tolist(), strict=True):
            num_new += self._share_one(holder, slot, more)
        return num_new

    def _share_one(self, holder: int, slot: int, more: int) -> bool:
        before = self._holding_at[slot]
        if before & SHARED != SHARED:
            if before:
                self._add_row(slot, before & SHARED, 1)
            self._set(np.array([slot]), SHARED)
        row = self._sharers.get(slot, {}).get(holder)
        if row is None:
            self._add_row(slot, holder, more)
            return True
        self._set_row(row, slot, holder, int(self._shares[row, 1]) + more)
        return False

    def take(self, holder: int, slots: Places, times: Ints) -> int:
        """The holder, who holds them as often, holds these slots so many times less; returns how many it does not hold
        any more."""
        shared = self._holding.take(slots) & SHARED == SHARED
        if not np.count_nonzero(shared):
            self._set(slots, 0)
            return len(slots)
        self._set(slots[~shared], 0)
        ended = len(slots) - int(np.count_nonzero(shared))
        for place in np.flatnonzero(shared).tolist():
            ended += self._take_shared(holder, int(slots[place]), int(times[place]))
        return ended

    def _take_shared(self, holder: int, slot: int, less: int) -> bool:
        rows = self._sharers[slot]
        row = rows[holder]
        left = int(self._shares[row, 1]) - less
        if left:
            self._set_row(row, slot, holder, left)
            return False
        self._set_row(row, 0, 0, 0)
        del rows[holder]
        self._unused.append(row)
        if not rows:
            del self._sharers[slot]
            self._set(np.array([slot]), 0)
        return True

    def _add_row(self, slot: int, holder: int, times: int) -> None:
        if self._unused:
            row = self._unused.pop()
        elif (row := self._header[_NUM_ROWS]) < len(self._shares):
            self._header[_NUM_ROWS] = row + 1
        else:
            raise OutOfBlocks(
                f"{len(self._shares)} times blocks are held by several leases, or more than once, as often as the pool"
                " can note; free some of them",
                details={"limit": len(self._shares)},
            )
        self._set_row(row, slot, holder, times)
        self._sharers.setdefault(slot, {})[holder] = row

    def _set_row(self, row: int, slot: int, holder: int, times: int) -> None:
        count = self._header[_NUM_SHARES]
        self._log_shares[count] = row, *self._shares[row]
        self._header[_NUM_SHARES] = count + 1
        self._shares[row] = (slot << _HOLDER_BITS | holder if slot else 0), times

    def check(self) -> str | None:
        """What cannot be, if anything."""
        holders = self._holding & SHARED
        shared = set(np.flatnonzero(holders == SHARED).tolist())
        if shared != set(self._sharers):
            return "blocks said to be shared are not those that somebody shares"
        if (self._holding[: self.geometry.slots_per_slab] != 0).any():
            return "somebody holds a null block"
        rows = [row for sharers in self._sharers.values() for row in sharers.values()]
        num_rows = self._header[_NUM_ROWS]
        if len(rows) != np.count_nonzero(self._shares[:num_rows, 0]) or any(self._shares[row, 1] < 1 for row in rows):
            return "a block is shared by one who does not hold it"
        return None


def _cut(geometry: Geometry, buffer: Any) -> dict[str, memoryview[int]]:
    view = memoryview(buffer).cast("B")
    needed = holdings_bytes(geometry)
    if view.nbytes != needed or view.readonly:
        kind = "read-only" if view.readonly else "writable"
        raise SpecInvalid(f"holdings need a writable buffer of {needed} bytes; this one is {kind}, {view.nbytes} bytes")
    start = 0
    found: dict[str, memoryview[int]] = {}
    for name, (code, count) in _layout(geometry).items():
        size = count * np.dtype(code).itemsize
        found[name] = view[start : start + size].cast(code)
        start += _aligned(size)
    return found
