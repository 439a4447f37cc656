"""Arrays in which is written who holds what, and how a change of them that was interrupted is taken back.

Layout, native byte order, each array at a multiple of 64 bytes:

    header      int64[16]           which state this is, and the operation under way (below)
    ops         int64[holders, 4]   of each holder: key, serial and result of its last operation
    holding     int64[slots]        serial << 26 | group << 11 | holder, of a block that one holder holds once; 0:
                                    nobody holds it; holder `SHARED`: see `shares`
    shares      int64[shares, 2]    slot << 11 | holder, and how often; 0, 0: unused
    log_slots   int32[3 * slots]    blocks that the operation under way changes
    log_holding int64[3 * slots]    and their `holding` before it
    log_shares  int64[2 * shares, 3]  index and row of `shares` before it

An operation changes a block at most three times: it is retained, freed and allocated. What it changes it notes before,
until `end`; the next process takes back what is noted. Pages that nobody touched take no memory.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages.arrays import Ints
from kvpage.pages.geometry import Geometry, Places

MAGIC = int.from_bytes(b"kvphld2\0", "little")
HOLDER_BITS, GROUP_BITS = 11, 15
SERIAL_AT = HOLDER_BITS + GROUP_BITS
SHARED = 2**HOLDER_BITS - 1  # also the mask of a holder
MAX_HOLDERS = 1023
_MOST_SERIALS = 2 ** (63 - SERIAL_AT)  # then they begin anew: nobody asks again about a step of so long ago
_ALIGNMENT_BYTES = 64
_MAGIC, _ARMED, _HOLDER, _KEY, _SERIAL, _RESULT, _NUM_SLOTS, _NUM_SHARES, _NUM_ROWS = range(9)

Words = npt.NDArray[np.int64]


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
        "log_slots": ("i", 3 * slots),
        "log_holding": ("q", 3 * slots),
        "log_shares": ("q", 6 * shares),
    }


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def holdings_bytes(geometry: Geometry) -> int:
    """Size of the buffer that `Holdings` of this geometry need."""
    return sum(_aligned(count * np.dtype(code).itemsize) for code, count in _layout(geometry).values())


class HoldingArrays:
    def __init__(self, geometry: Geometry, buffer: Any) -> None:
        """`buffer`: writable, `holdings_bytes(geometry)` bytes; zeros at first. An operation that was under way when
        its process ended is taken back. Raises `SpecInvalid` for another size, `Conflict` for another content.
        """
        self.geometry = geometry
        found = _cut(geometry, buffer)
        self.header, self.ops = found["header"], found["ops"]
        self.holding_at, self.log_slots_at, self.log_holding_at = (
            found["holding"], found["log_slots"], found["log_holding"]
        )  # fmt: skip
        self.holding: Words = np.frombuffer(found["holding"], np.int64)
        self.shares: Words = np.frombuffer(found["shares"], np.int64).reshape(-1, 2)
        self.log_slots: Ints = np.frombuffer(found["log_slots"], np.int32)
        self.log_holding: Words = np.frombuffer(found["log_holding"], np.int64)
        self.log_shares: Words = np.frombuffer(found["log_shares"], np.int64).reshape(-1, 3)
        self.is_new = self.header[_MAGIC] == 0
        """Nobody held anything by these before."""
        if self.header[_MAGIC] not in (0, MAGIC):
            raise Conflict(f"the buffer begins with {self.header[_MAGIC]}, so it does not say who holds blocks")
        fault = self._log_fault()
        if fault:
            raise Conflict(f"the buffer does not say who holds blocks: {fault}")
        self.header[_MAGIC] = MAGIC
        self.undo()

    def _log_fault(self) -> str | None:
        """What makes the log unfit to be undone."""
        header = self.header
        num_slots, num_rows = header[_NUM_SLOTS], header[_NUM_SHARES]
        if not 0 <= header[_NUM_ROWS] <= len(self.shares):
            return f"{header[_NUM_ROWS]} rows of {len(self.shares)} are said to be used"
        if not header[_ARMED]:
            return None
        if not 0 <= num_slots <= len(self.log_slots) or not 0 <= num_rows <= len(self.log_shares):
            return f"an operation has noted {num_slots} blocks and {num_rows} shares, more than there is room for"
        slots, rows = self.log_slots[:num_slots], self.log_shares[:num_rows, 0]
        is_outside = (slots < 0) | (slots >= len(self.holding))
        if is_outside.any() or (rows < 0).any() or (rows >= len(self.shares)).any():
            return "an operation has noted blocks or shares that do not exist"
        return None if 1 <= header[_HOLDER] <= MAX_HOLDERS else f"holder {header[_HOLDER]} has an operation under way"

    @property
    def num_rows(self) -> int:
        """Of `shares`, ever used. To look at a page of a memfd is to take memory for it, so nobody looks further."""
        return self.header[_NUM_ROWS]

    @num_rows.setter
    def num_rows(self, count: int) -> None:
        self.header[_NUM_ROWS] = count

    @property
    def is_amid(self) -> bool:
        """Whether an operation is under way."""
        return bool(self.header[_ARMED])

    def begin(self, holder: int, key: int, result: int) -> int:
        """From here to `end`, `undo` takes back what was noted. Returns the operation's serial, 1 or more."""
        header, ops, start = self.header, self.ops, 4 * holder
        header[_HOLDER] = holder
        header[_KEY], header[_SERIAL], header[_RESULT] = ops[start], ops[start + 1], ops[start + 2]
        header[_NUM_SLOTS] = header[_NUM_SHARES] = 0
        header[_ARMED] = 1
        serial = ops[start + 1] + 1
        if serial >= _MOST_SERIALS:
            serial = 1
        ops[start], ops[start + 1], ops[start + 2] = key, serial, result
        return serial

    def begin_one(self, holder: int, key: int, result: int, slot: int, low: int) -> int:
        """As `begin` and then `set_one`: `low`, under the serial, is who holds the slot; 0: nobody."""
        header, ops, holding, start = self.header, self.ops, self.holding_at, 4 * holder
        before = ops[start + 1]
        header[_HOLDER], header[_KEY], header[_SERIAL], header[_RESULT] = holder, ops[start], before, ops[start + 2]
        self.log_slots_at[0], self.log_holding_at[0] = slot, holding[slot]
        header[_NUM_SHARES], header[_NUM_SLOTS] = 0, 1
        header[_ARMED] = 1
        serial = before + 1 if before + 1 < _MOST_SERIALS else 1
        ops[start], ops[start + 1], ops[start + 2] = key, serial, result
        holding[slot] = serial << SERIAL_AT | low if low else 0
        return serial

    def end(self) -> None:
        self.header[_ARMED] = 0

    def undo(self) -> bool:
        """Take back the operation under way, if there is one. Whether `shares` changed."""
        header = self.header
        if not header[_ARMED]:
            return False
        # Of a slot that was changed twice the first note is what it was.
        slots, first = np.unique(self.log_slots[: header[_NUM_SLOTS]], return_index=True)
        self.holding[slots] = self.log_holding[first]
        num_rows = header[_NUM_SHARES]
        for index, *row in self.log_shares[:num_rows][::-1].tolist():
            self.shares[index] = row
        start = 4 * header[_HOLDER]
        self.ops[start], self.ops[start + 1], self.ops[start + 2] = header[_KEY], header[_SERIAL], header[_RESULT]
        self.end()
        return num_rows > 0

    def set_one(self, slot: int, word: int) -> None:
        header = self.header
        count = header[_NUM_SLOTS]
        self.log_slots_at[count], self.log_holding_at[count] = slot, self.holding_at[slot]
        header[_NUM_SLOTS] = count + 1
        self.holding_at[slot] = word

    def set(self, slots: Places, word: int) -> None:
        """No slot twice."""
        start = self.header[_NUM_SLOTS]
        end = start + len(slots)
        self.log_slots[start:end] = slots
        self.log_holding[start:end] = self.holding.take(slots)
        self.header[_NUM_SLOTS] = end
        self.holding[slots] = word

    def set_row(self, row: int, slot: int, holder: int, times: int) -> None:
        """0 times: it is unused."""
        count = self.header[_NUM_SHARES]
        self.log_shares[count] = row, *self.shares[row]
        self.header[_NUM_SHARES] = count + 1
        self.shares[row] = (slot << HOLDER_BITS | holder, times) if times else (0, 0)


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
