"""Who holds which block, and how often: arrays that outlive the process, and the truth about holding.

A pool's own counts say how often a block is held, these say by whom, and of which group it is. Both are changed one
after the other, so a process killed between them leaves them apart: the next one takes these for true (`times_held`,
`owners`), and gives back what nobody here holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.errors import OutOfBlocks
from kvpage.pages.arrays import Ints
from kvpage.pages.geometry import Geometry, Places
from kvpage.pages.holding_arrays import GROUP_BITS, HOLDER_BITS, MAX_HOLDERS, SERIAL_AT, SHARED, HoldingArrays, Words

_GROUPS = 2**GROUP_BITS - 1


class Held(NamedTuple):
    """Blocks of one holder, as slots in ascending order, how often it holds each, and of which group they are."""

    slots: Places
    times: Ints
    groups: Ints


class LastOperation(NamedTuple):
    """What a holder did last, for one who asks again because no answer came."""

    key: int
    serial: int
    result: int


class SharesUsedUp(OutOfBlocks):
    """There may be blocks, but no more can be noted as shared."""


class Holdings:
    """Holders are numbers from 1 to `MAX_HOLDERS`. Slots as in `Geometry`; no method is given a slot twice.

    Every operation is `begin`, any of `give`, `share`, `take`, `move`, then `end`, or `undo`.
    """

    def __init__(self, geometry: Geometry, buffer: Any) -> None:
        """As `HoldingArrays`, and raises as that does."""
        self.geometry = geometry
        self._arrays = HoldingArrays(geometry, buffer)
        self._holding_at, self._ops = self._arrays.holding_at, self._arrays.ops
        self._holding, self._shares = self._arrays.holding, self._arrays.shares
        self.is_new = self._arrays.is_new
        """Nobody held anything by these when they were opened."""
        self._find_shares()

    def _find_shares(self) -> None:
        """`_sharers[slot][holder]` is the row of `shares`; rows that are used by nobody are in `_unused`."""
        num_rows = self._arrays.num_rows
        used = np.flatnonzero(self._shares[:num_rows, 0])
        self._sharers: dict[int, dict[int, int]] = {}
        for row, key in zip(used.tolist(), self._shares[used, 0].tolist(), strict=True):
            slot, holder = divmod(key, 1 << HOLDER_BITS)
            self._sharers.setdefault(slot, {})[holder] = row
        self._unused: list[int] = np.setdiff1d(np.arange(num_rows), used).tolist()

    def close(self) -> None:
        """Let go of the buffer."""
        if vars(self):
            vars(self._arrays).clear()
            vars(self).clear()

    # --- looking ------------------------------------------------------------------------------------------------------

    def times_held(self) -> Ints:
        """By slot: how often all holders together hold it."""
        times: Ints = (self._holding > 0).astype(np.int32)
        for slot, rows in self._sharers.items():
            times[slot] = sum(int(self._shares[row, 1]) for row in rows.values())
        return times

    def owners(self) -> Ints:
        """By slab: 1 + the group of the blocks of it that somebody holds; 0: nobody holds any."""
        owners = np.zeros(self.geometry.num_slabs, np.int32)
        slots = np.flatnonzero(self._holding)
        owners[slots // self.geometry.slots_per_slab] = 1 + self._groups(slots)
        return owners

    def times(self, holder: int, slots: Places) -> Ints:
        """How often the holder holds each of the slots."""
        holders = self._holding.take(slots) & SHARED
        times: Ints = (holders == holder).astype(np.int32)
        for place in np.flatnonzero(holders == SHARED).tolist():
            row = self._sharers[int(slots[place])].get(holder)
            times[place] = 0 if row is None else int(self._shares[row, 1])
        return times

    def holds_once(self, holder: int, slot: int) -> bool:
        """Whether the holder alone holds it, and once."""
        return bool(self._holding_at[slot] & SHARED == holder)

    def group_of(self, slot: int) -> int:
        """Of a block that somebody holds."""
        return int(self._holding_at[slot] >> HOLDER_BITS & _GROUPS)

    def _groups(self, slots: Places) -> Ints:
        groups: Ints = (self._holding.take(slots) >> HOLDER_BITS & _GROUPS).astype(np.int32)
        return groups

    def held_by(self, holder: int) -> Held:
        """Everything that the holder holds. Looks at every block."""
        own = np.flatnonzero(self._holding & SHARED == holder)
        shared = [(slot, rows[holder]) for slot, rows in self._sharers.items() if holder in rows]
        slots = np.array([slot for slot, _ in shared], np.intp)
        times = np.array([self._shares[row, 1] for _, row in shared], np.int32)
        slots, times = np.concatenate((own, slots)), np.concatenate((np.ones(len(own), np.int32), times))
        order = np.argsort(slots)
        return Held(slots[order], times[order], self._groups(slots[order]))

    def holders(self) -> set[int]:
        """Who holds anything. Looks at every block."""
        holders = np.bincount(self._holding & SHARED, minlength=SHARED + 1)
        return set(np.flatnonzero(holders[:SHARED]).tolist()[1:]).union(*self._sharers.values())

    def count_blocks(self, num_groups: int) -> Words:
        """By holder and group: blocks that it holds, each once. Looks at every block."""
        own = self._holding[(self._holding > 0) & (self._holding & SHARED != SHARED)]
        keys = (own & SHARED) * num_groups + (own >> HOLDER_BITS & _GROUPS)
        counts: Words = np.bincount(keys, minlength=(MAX_HOLDERS + 1) * num_groups).reshape(-1, num_groups)
        for slot, rows in self._sharers.items():
            for holder in rows:
                counts[holder, self.group_of(slot)] += 1
        return counts

    def given(self, holder: int, serial: int) -> Held:
        """What `give` or `move` gave to the holder with this serial and it still holds, alone. Looks at every block."""
        theirs: npt.NDArray[np.bool_] = (self._holding >> SERIAL_AT == serial) & (self._holding & SHARED == holder)
        slots = np.flatnonzero(theirs)
        return Held(slots, np.ones(len(slots), np.int32), self._groups(slots))

    def last(self, holder: int) -> LastOperation:
        """What the holder did last; zeros: nothing yet."""
        start = 4 * holder
        return LastOperation(*self._ops[start : start + 3])

    # --- changing -----------------------------------------------------------------------------------------------------

    @property
    def is_amid(self) -> bool:
        """Whether an operation is under way."""
        return self._arrays.is_amid

    def begin(self, holder: int, key: int = 0, result: int = 0) -> int:
        """An operation of this holder, which `last` names from now on. Returns its serial, 1 or more."""
        return self._arrays.begin(holder, key, result)

    def end(self) -> None:
        self._arrays.end()

    def undo(self) -> None:
        """Take back the operation under way, if there is one."""
        if self._arrays.undo():
            self._find_shares()

    def recover(self) -> None:
        """As `undo`, after something went wrong at any moment: everything is found again from the buffer."""
        self._arrays.undo()
        self._find_shares()

    def drop(self, holder: int) -> None:
        """The holder holds nothing any more, and has done nothing yet."""
        self.begin(holder)
        self.take(holder, *self.held_by(holder)[:2])
        self.end()

    def begin_giving(self, holder: int, key: int, group: int, slot: int) -> int:
        """As `begin`, with a result of 1, and `give` of one."""
        return self._arrays.begin_one(holder, key, 1, slot, group << HOLDER_BITS | holder)

    def begin_taking(self, holder: int, key: int, slot: int) -> int:
        """As `begin`, and the holder, who alone holds the slot, once, does not any more."""
        return self._arrays.begin_one(holder, key, 0, slot, 0)

    def last_key(self, holder: int) -> int:
        return self._ops[4 * holder]

    def give(self, holder: int, group: int, slots: Places, serial: int = 0) -> None:
        """The holder holds these slots, which nobody holds, once. `serial`: see `given`."""
        self._arrays.set(slots, serial << SERIAL_AT | group << HOLDER_BITS | holder)

    def move(self, before: int, holder: int, group: int, slots: Places, serial: int) -> int:
        """One holding of each of these slots, which `before` has, is the holder's; returns how many of them it did not
        hold before."""
        is_shared = self._holding.take(slots) & SHARED == SHARED
        self.give(holder, group, slots[~is_shared], serial)
        num_new = len(slots) - int(np.count_nonzero(is_shared))
        for slot in slots[is_shared].tolist():
            num_new += self._share_one(holder, group, slot, 1)
            self._take_shared(before, slot, 1)
        return num_new

    def share(self, holder: int, group: int, slots: Places, times: Ints) -> int:
        """The holder holds these slots so many times more; returns how many of them it did not hold before.

        Raises `SharesUsedUp`, and then `undo` is to be called, where too many are shared.
        """
        alone = (self._holding.take(slots) == 0) & (times == 1)
        self.give(holder, group, slots[alone])
        num_new = int(np.count_nonzero(alone))
        shared = np.flatnonzero(~alone)
        for slot, more in zip(slots[shared].tolist(), times[shared].tolist(), strict=True):
            num_new += self._share_one(holder, group, slot, more)
        return num_new

    def _share_one(self, holder: int, group: int, slot: int, more: int) -> bool:
        before = self._holding_at[slot]
        if before & SHARED != SHARED:
            if before:
                self._add_row(slot, before & SHARED, 1)
            self._arrays.set_one(slot, group << HOLDER_BITS | SHARED)
        row = self._sharers.get(slot, {}).get(holder)
        if row is None:
            self._add_row(slot, holder, more)
            return True
        self._arrays.set_row(row, slot, holder, int(self._shares[row, 1]) + more)
        return False

    def take(self, holder: int, slots: Places, times: Ints) -> int:
        """The holder, who holds them as often, holds these slots so many times less; returns how many it does not hold
        any more."""
        shared = self._holding.take(slots) & SHARED == SHARED
        if not np.count_nonzero(shared):
            self._arrays.set(slots, 0)
            return len(slots)
        self._arrays.set(slots[~shared], 0)
        ended = len(slots) - int(np.count_nonzero(shared))
        for slot, less in zip(slots[shared].tolist(), times[shared].tolist(), strict=True):
            ended += self._take_shared(holder, slot, less)
        return ended

    def _take_shared(self, holder: int, slot: int, less: int) -> bool:
        rows = self._sharers[slot]
        row = rows[holder]
        left = int(self._shares[row, 1]) - less
        self._arrays.set_row(row, slot, holder, left)
        if left:
            return False
        del rows[holder]
        self._unused.append(row)
        if not rows:
            del self._sharers[slot]
            self._arrays.set_one(slot, 0)
        return True

    def _add_row(self, slot: int, holder: int, times: int) -> None:
        if self._unused:
            row = self._unused.pop()
        elif (row := self._arrays.num_rows) < len(self._shares):
            self._arrays.num_rows = row + 1
        else:
            raise SharesUsedUp(
                f"{len(self._shares)} times blocks are held by several leases, or more than once, as often as the pool"
                " can note; free some of them",
                details={"limit": len(self._shares)},
            )
        self._arrays.set_row(row, slot, holder, times)
        self._sharers.setdefault(slot, {})[holder] = row

    def check(self) -> str | None:
        """What cannot be, if anything."""
        slots = np.flatnonzero(self._holding)
        words, per_slab = self._holding[slots], self.geometry.slots_per_slab
        if self.is_amid:
            return "an operation is under way"
        if (slots < per_slab).any():
            return "somebody holds a null block"
        if set(slots[words & SHARED == SHARED].tolist()) != set(self._sharers):
            return "blocks said to be shared are not those that somebody shares"
        is_possible = (
            (words > 0) & (words & SHARED > 0) & ((words & SHARED <= MAX_HOLDERS) | (words & SHARED == SHARED))
        )
        if not is_possible.all():
            return f"block slot {slots[~is_possible][0]} is held by one who cannot be"
        if (self.owners()[slots // per_slab] != 1 + self._groups(slots)).any():
            return "blocks of two groups are held in one slab"
        rows = [row for sharers in self._sharers.values() for row in sharers.values()]
        used = np.flatnonzero(self._shares[: self._arrays.num_rows, 0]).tolist()
        if sorted(rows) != used or (self._shares[used, 1] < 1).any():
            return "a block is shared by one who does not hold it"
        if sorted(rows + self._unused) != list(range(self._arrays.num_rows)):
            return "rows for shared blocks are lost"
        return None
