"""Which block holds what: hash to block and back, group by group.

Hashes lie in a flat array, 16 bytes a slot, in a buffer that may outlive the process; from it and the blocks that keep
content the rest is found again. A block's hash is written before the block is committed, so a hash beside content is
always right, whenever the process was killed. Where there is no content, the hash is of what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.errors import Conflict, InternalError, SpecInvalid
from kvpage.pages.arrays import Ints
from kvpage.pages.events import Cursor, EventLog
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import HASH_BYTES, ROOT

_NOTHING = ROOT  # no content hashes to zeros, as far as anybody can find


def index_bytes(geometry: Geometry) -> int:
    """Size of the buffer that the hashes of a pool need."""
    return geometry.num_slots * HASH_BYTES


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is cached, and where in the events that was."""

    cursor: Cursor
    hashes: tuple[tuple[bytes, ...], ...]
    """By group, in no order."""


class PrefixIndex:
    def __init__(self, geometry: Geometry, buffer: Any = None, *, events: EventLog | None = None) -> None:
        """`buffer`: writable, `index_bytes(geometry)` bytes, zeros for a new pool; None: memory of this process.

        Raises `SpecInvalid` for a buffer of another size.
        """
        self.geometry = geometry
        self.events = EventLog() if events is None else events
        self.num_stored = self.num_evicted = 0
        rows = memoryview(bytearray(index_bytes(geometry)) if buffer is None else buffer).cast("B")
        if rows.nbytes != index_bytes(geometry) or rows.readonly:
            kind = "read-only" if rows.readonly else "writable"
            raise SpecInvalid(
                f"the hashes of a pool need a writable buffer of {index_bytes(geometry)} bytes; this one is {kind}, "
                f"{rows.nbytes} bytes"
            )
        self._rows = rows
        self._blocks: list[dict[bytes, int]] = [{} for _ in geometry.blocks_per_slab]

    def __len__(self) -> int:
        """Blocks with a hash, over all groups."""
        return sum(map(len, self._blocks))

    def blocks_of(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The block with each content; 0, the null block, where there is none."""
        get = self._blocks[group].get
        return [get(one, 0) for one in hashes]

    def hash_of(self, group: int, block: int) -> bytes | None:
        """What the block holds, if others may find it."""
        found = self._row(group, block).tobytes()
        return found if self._blocks[group].get(found) == block else None

    def _row(self, group: int, block: int) -> memoryview:
        cut, per_slab = self.geometry.blocks_per_slab[group], self.geometry.slots_per_slab
        start = (block + block // cut * (per_slab - cut)) * HASH_BYTES
        return self._rows[start : start + HASH_BYTES]

    def add(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """Note what these blocks hold, and return those that are new: the caller commits them.

        Where another block holds the same already, that one stays, and this one is nobody's to find. Raises `Conflict`,
        and notes nothing, for a block that is known to hold something else.
        """
        known = self._blocks[group]
        for block, content in zip(blocks, hashes, strict=True):
            before = self.hash_of(group, block)
            if before not in (None, content):
                raise Conflict(
                    f"block {block} of group {group} is known to hold {before.hex() if before else ''}, and would hold "
                    f"{content.hex()}; take a block of its own for what is new"
                )
        new: list[int] = []
        stored: list[bytes] = []
        for block, content in zip(blocks, hashes, strict=True):
            if content not in known:
                self._row(group, block)[:] = content
                known[content] = block
                new.append(block)
                stored.append(content)
        self.num_stored += len(stored)
        self.events.append("stored", group, stored)
        return new

    def evicted(self, group: int, blocks: Ints) -> None:
        """The content of these blocks goes: what a pool calls as `on_evict`."""
        self.num_evicted += self.remove(group, blocks.tolist())

    def remove(self, group: int, blocks: Sequence[int]) -> int:
        """Nobody finds these blocks any more. Returns how many were found before."""
        removed: list[bytes] = []
        for block in blocks:
            content = self.hash_of(group, block)
            if content is not None:
                del self._blocks[group][content]
                removed.append(content)
        self.events.append("removed", group, removed)
        return len(removed)

    def blocks(self, group: int) -> list[int]:
        """All blocks of the group that can be found, in no order."""
        return list(self._blocks[group].values())

    def restore(self, group: int, with_content: Ints) -> list[int]:
        """Find the blocks of a pool again from the buffer. Returns those that keep content nobody can find: drop it."""
        lost: list[int] = []
        known = self._blocks[group]
        for block in with_content.tolist():
            content = self._row(group, block).tobytes()
            if content == _NOTHING or content in known:
                lost.append(block)
            else:
                known[content] = block
        return lost

    def snapshot(self) -> Snapshot:
        """The whole state, for a reader who has missed events."""
        return Snapshot(self.events.cursor, tuple(tuple(known) for known in self._blocks))

    def check(self, group: int, with_content: Ints) -> None:
        """Prove that exactly the blocks with content can be found. Raises `InternalError` with what differs."""
        found = {block: self._row(group, block).tobytes() for block in with_content.tolist()}
        known = {block: content for content, block in self._blocks[group].items()}
        if found != known:
            wrong = sorted(block for block, _ in found.items() ^ known.items())
            raise InternalError(
                f"group {group}: what blocks {list(dict.fromkeys(wrong))[:8]} hold and what is found there differ",
                details={"group": group, "blocks": list(dict.fromkeys(wrong))[:8]},
            )
