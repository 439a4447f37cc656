"""Which block holds what: hash to block and back, group by group.

Hashes lie in a flat array, 16 bytes a slot, in a buffer that may outlive the process; from it and the blocks that keep
content the rest is found again. A block's hash is written before the block is committed, so a hash beside content is
always right, whenever the process was killed. Content that goes is told first, and its hash made zeros. Where there is
no content, a hash says nothing.

The way from a hash to its block is in `content_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvpage.errors import Conflict, InternalError, SpecInvalid
from kvpage.pages.arrays import Ints
from kvpage.pages.content_table import ContentTable, Hashes, hashes_array
from kvpage.pages.events import Cursor, EventLog
from kvpage.pages.geometry import Geometry, Places
from kvpage.pages.hashing import HASH_BYTES, ROOT, split_hashes

_NOTHING = ROOT  # no content hashes to zeros, as far as anybody can find
_FEW = 8  # so many are looked at sooner by Python than by NumPy


def index_bytes(geometry: Geometry) -> int:
    """Size of the buffer that the hashes of a pool need."""
    return geometry.num_slots * HASH_BYTES


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is cached, and where in the events that was."""

    cursor: Cursor
    hashes: tuple[tuple[bytes, ...], ...]
    """By group, in no order."""


class Added(NamedTuple):
    new: list[int]
    """Blocks that others find from now on."""
    num_duplicates: int
    """Blocks whose content another block holds, which stays the one that is found."""


class PrefixIndex:
    def __init__(self, geometry: Geometry, buffer: Any = None, *, events: EventLog | None = None) -> None:
        """`buffer`: writable, `index_bytes(geometry)` bytes, zeros for a new pool; None: memory of this process.

        Raises `SpecInvalid` for a buffer of another size.
        """
        self.geometry = geometry
        self.events = EventLog() if events is None else events
        self.num_stored = self.num_evicted = 0
        own: Any = np.zeros(index_bytes(geometry), np.uint8) if buffer is None else buffer
        data = memoryview(own).cast("B")
        if data.nbytes != index_bytes(geometry) or data.readonly:
            kind = "read-only" if data.readonly else "writable"
            raise SpecInvalid(
                f"the hashes of a pool need a writable buffer of {index_bytes(geometry)} bytes; this one is {kind}, "
                f"{data.nbytes} bytes"
            )
        self._data = data
        self._rows: Hashes = np.frombuffer(data, np.uint64).reshape(-1, 2)
        self._table = ContentTable(self._rows)
        self._counts = [0] * len(geometry.blocks_per_slab)

    def __len__(self) -> int:
        """Blocks with a hash, over all groups."""
        return sum(self._counts)

    # --- finding ------------------------------------------------------------------------------------------------------

    def blocks_of(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The block with each content; 0, the null block, where there is none."""
        if len(hashes) <= _FEW:
            return [self._block(group, self._table.find_one(group, one)) for one in hashes]
        slots = self._table.find(group, hashes_array(b"".join(hashes)))
        blocks: list[int] = self.geometry.ids_at(group, slots).tolist()
        return blocks

    def _block(self, group: int, slot: int) -> int:
        per_slab = self.geometry.slots_per_slab
        return slot - slot // per_slab * (per_slab - self.geometry.blocks_per_slab[group])

    def _slot(self, group: int, block: int) -> int:
        cut = self.geometry.blocks_per_slab[group]
        return block + block // cut * (self.geometry.slots_per_slab - cut)

    def _row(self, group: int, block: int) -> memoryview:
        start = self._slot(group, block) * HASH_BYTES
        return self._data[start : start + HASH_BYTES]

    def hash_of(self, group: int, block: int) -> bytes | None:
        """What the block holds, if others may find it."""
        slot = self._slot(group, block)
        if not self._table.has(group, slot):
            return None
        return self._data[slot * HASH_BYTES : (slot + 1) * HASH_BYTES].tobytes()

    def blocks(self, group: int) -> list[int]:
        """All blocks of the group that can be found, ascending."""
        blocks: list[int] = self.geometry.ids_at(group, self._slots(group)).tolist()
        return blocks

    def _slots(self, group: int) -> Places:
        return self._table.slots_of(group) if self._counts[group] else np.empty(0, np.intp)

    def snapshot(self) -> Snapshot:
        """The whole state, for a reader who has missed events."""
        rows = (self._rows.take(self._slots(group), 0).tobytes() for group in range(len(self._counts)))
        return Snapshot(self.events.cursor, tuple(split_hashes(some) for some in rows))

    # --- changing -----------------------------------------------------------------------------------------------------

    def add(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> Added:
        """Note what these blocks hold; the caller commits those that are new.

        Where another block holds the same already, that one stays, and this one is nobody's to find. Raises `Conflict`,
        and notes nothing, for a block that is known to hold something else.
        """
        if len(blocks) > _FEW and len(blocks) == len(hashes):
            added = self._add_at_once(group, blocks, hashes)
            if added is not None:
                return added
        for block, content in zip(blocks, hashes, strict=True):
            before = self.hash_of(group, block)
            if before not in (None, content):
                raise Conflict(
                    f"block {block} of group {group} is known to hold {before.hex() if before else ''}, and would hold "
                    f"{content.hex()}; take a block of its own for what is new"
                )
        new, stored, num_duplicates = list[int](), list[bytes](), 0
        for block, content in zip(blocks, hashes, strict=True):
            slot, known = self._slot(group, block), self._table.find_one(group, content)
            if known:
                num_duplicates += known != slot
                continue
            self._row(group, block)[:] = content
            self._table.insert_one(group, slot, content)
            new.append(block)
            stored.append(content)
        self._note_stored(group, len(stored), b"".join(stored))
        return Added(new, num_duplicates)

    def _add_at_once(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> Added | None:
        """Where it is plain: each content once, each block once, and no block holds something else."""
        if len(set(hashes)) < len(blocks) or len(set(blocks)) < len(blocks):
            return None
        slots = self.geometry.slots_of(group, np.asarray(blocks, np.intp))
        data = b"".join(hashes)
        rows = hashes_array(data)
        known = self._table.find(group, rows)
        if (self._table.has_any(slots) & (known != slots)).any():
            return None
        is_new = known == 0
        num_duplicates = int(np.count_nonzero(~is_new & (known != slots)))
        if not is_new.all():
            slots, rows = slots[is_new], rows[is_new]
            data = rows.tobytes()
        self._rows[slots] = rows
        self._table.insert(group, slots, rows)
        self._note_stored(group, len(slots), data)
        new: list[int] = self.geometry.ids_at(group, slots).tolist()
        return Added(new, num_duplicates)

    def _note_stored(self, group: int, count: int, hashes: bytes) -> None:
        self._counts[group] += count
        self.num_stored += count
        self.events.append("stored", group, hashes)

    def evicted(self, group: int, blocks: Ints) -> None:
        """The content of these blocks goes: what a pool calls as `on_evict`."""
        self.num_evicted += self.remove(group, blocks)

    def remove(self, group: int, blocks: Sequence[int] | Ints) -> int:
        """Nobody finds these blocks, no block twice, any more. Returns how many were found before."""
        if len(blocks) <= _FEW:
            return self._remove_few(group, blocks)
        slots = self.geometry.slots_of(group, np.asarray(blocks, np.intp))
        found = self._table.has_any(slots)
        if not found.all():
            slots = slots[found]
        rows = self._rows.take(slots, 0)
        self._table.forget(slots)
        self._rows[slots] = 0
        self._counts[group] -= len(slots)
        self.events.append("removed", group, rows.tobytes())
        return len(slots)

    def _remove_few(self, group: int, blocks: Sequence[int] | Ints) -> int:
        removed = []
        for block in blocks:
            content = self.hash_of(group, int(block))
            if content is not None:
                self._row(group, int(block))[:] = _NOTHING
                self._table.forget_one(self._slot(group, int(block)))
                removed.append(content)
        self._counts[group] -= len(removed)
        self.events.append("removed", group, b"".join(removed))
        return len(removed)

    def restore(self, group: int, with_content: Ints) -> list[int]:
        """Find the blocks of a pool again from the buffer. Returns those that keep content nobody can find: drop it."""
        slots = self.geometry.slots_of(group, with_content.astype(np.intp))
        rows = self._rows.take(slots, 0)
        _, first = np.unique(rows, axis=0, return_index=True)
        is_first = np.zeros(len(slots), np.bool_)
        is_first[first] = True
        kept = rows.any(1) & is_first
        self._rows[slots[~kept]] = 0
        self._table.insert(group, slots[kept], rows[kept])
        self._counts[group] = int(np.count_nonzero(kept))
        lost: list[int] = with_content[~kept].tolist()
        return lost

    def check(self, group: int, with_content: Ints) -> None:
        """Prove that exactly the blocks with content can be found. Raises `InternalError` with what differs."""
        found = {block: self._row(group, block).tobytes() for block in with_content.tolist()}
        known = {block: content for block in self.blocks(group) if (content := self.hash_of(group, block))}
        contents = list(known.values())
        if self.blocks_of(group, contents) != list(known) or found != known or len(known) != self._counts[group]:
            wrong = sorted(block for block, _ in found.items() ^ known.items())
            raise InternalError(
                f"group {group}: what blocks {list(dict.fromkeys(wrong))[:8]} hold and what is found there differ",
                details={"group": group, "blocks": list(dict.fromkeys(wrong))[:8]},
            )
