"""What outlives the process that hands blocks out: flat integer arrays in a buffer, such as a pool's control block.

Everything else (free lists, counts, the order of eviction) is found again from these. Layout, native byte order, each
array at a multiple of 64 bytes:

    header     int64[8]      which state this is, and the log's length and kind (below)
    owners     int16[slabs]  1 + the group that has the slab or had it last (a pool's only group: all); 0: nobody yet
    stale      int8[slots]   1: the block's bytes may be another's, and must be cleared before it is used
    refs       int32[slots]  how often the block is held
    stamps     int64[slots]  0: no content; else when a block with content was last used, counted in uses
    log_slots  int32[slots]  blocks that the operation under way changes
    log_refs   int32[slots]  and their `refs` before it

A slab is owned while something of it is held or keeps content. Pages that nobody touched take no memory, so a pool
without content pays nothing for stamps, one that clears nothing pays nothing for `stale`, and the log costs what the
largest batch needed.
"""

from __future__ import annotations

from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvpage.errors import Conflict, SpecInvalid
from kvpage.pages.clearing import NOTHING, Clearing
from kvpage.pages.geometry import Geometry, Places

MAGIC = int.from_bytes(b"kvpblk2\0", "little")
_ALIGNMENT_BYTES = 64
_MAGIC, _SLABS, _SLOTS_PER_SLAB, _GROUPS, _CUT, _LOGGED, _KIND, _HAS_CONTENT = range(8)
_REFS, _CONTENT = 1, 2  # kinds of log

Ints = npt.NDArray[np.int32]
Stamps = npt.NDArray[np.int64]


def _layout(geometry: Geometry) -> dict[str, tuple[Literal["b", "h", "i", "q"], int]]:
    slabs, slots = geometry.num_slabs, geometry.num_slots
    return {
        "header": ("q", 8),
        "owners": ("h", slabs),
        "stale": ("b", slots),
        "refs": ("i", slots),
        "stamps": ("q", slots),
        "log_slots": ("i", slots),
        "log_refs": ("i", slots),
    }


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def state_bytes(geometry: Geometry) -> int:
    """Size of the buffer that a pool of this geometry needs."""
    return sum(_aligned(count * np.dtype(code).itemsize) for code, count in _layout(geometry).values())


class Arrays:
    """The arrays in `buffer`, which must be writable and of `state_bytes(geometry)` bytes; zeros are a new pool.

    Each array is there twice: as a NumPy array, for batches, and as a memoryview (`…_at`), which is quicker for one
    block. A batch logs what it changes (`log_refs`, `log_content`) until `end`: if its process is killed before,
    `undo` takes it back. One block changes by one store, which either happened or did not.

    Raises `SpecInvalid` for a buffer of another size, and `Conflict` for the state of another pool, or of one that
    cleared other blocks.
    """

    def __init__(self, geometry: Geometry, buffer: Any, clearing: Clearing = NOTHING) -> None:
        self.geometry, self.clearing = geometry, clearing
        if clearing.on_reuse and len(clearing.on_reuse) != len(geometry.blocks_per_slab):
            raise SpecInvalid(
                f"what to clear is said for {len(clearing.on_reuse)} groups; there are {len(geometry.blocks_per_slab)}"
            )
        found = _cut(geometry, buffer)
        self.header = found["header"]
        self.owners_at, self.stale_at = found["owners"], found["stale"]
        self.refs_at, self.stamps_at = found["refs"], found["stamps"]
        self.owners: npt.NDArray[np.int16] = np.frombuffer(found["owners"], np.int16)
        self.stale: npt.NDArray[np.int8] = np.frombuffer(found["stale"], np.int8)
        self.refs: Ints = np.frombuffer(found["refs"], np.int32)
        self.stamps: Stamps = np.frombuffer(found["stamps"], np.int64)
        self.log_slots: Ints = np.frombuffer(found["log_slots"], np.int32)
        self.refs_before: Ints = np.frombuffer(found["log_refs"], np.int32)
        self.is_new = self.header[_MAGIC] == 0
        """Nobody held a block of it before."""
        self._recognise()
        self.has_content = bool(self.header[_HAS_CONTENT])
        """Whether any block ever kept content: while none did, nobody reads `stamps`."""

    def _recognise(self) -> None:
        cut = self.geometry.blocks_per_slab
        cleared = [group for group in range(len(cut)) if self.clearing.is_on_reuse(group)]
        rules = repr((cut, self.clearing.on_group_change, cleared))
        mine = [self.geometry.num_slabs, self.geometry.slots_per_slab, len(cut), crc32(rules.encode())]
        if self.is_new:
            if self.owners.any() or self.refs.any():
                raise Conflict("the buffer of a new pool's blocks must be zeros; use the pool's own, or a new one")
            for word, value in enumerate(mine, start=_SLABS):
                self.header[word] = value
            self.header[_MAGIC] = MAGIC  # last: a state that was only begun is begun again
        elif [*self.header[: _CUT + 1]] != [MAGIC, *mine]:
            raise Conflict(
                f"the buffer holds something else than the blocks of {mine[0]} slabs in {mine[2]} groups, or these "
                f"were cleared by other rules: it begins with {[*self.header[: _CUT + 1]]}, not {[MAGIC, *mine]}; "
                f"use the pool's own, or zeros for a new one"
            )

    @property
    def num_logged(self) -> int:
        return self.header[_LOGGED]

    def keep_content(self) -> None:
        """Called before the first block gets content."""
        self.header[_HAS_CONTENT] = 1
        self.has_content = True

    def soil_slabs(self, slabs: Places) -> None:
        """Whatever is handed out of these slabs must be cleared."""
        self.stale.reshape(self.geometry.num_slabs, -1)[slabs] = 1

    def soil_slab(self, slab: int) -> None:
        """As `soil_slabs` of one."""
        per_slab = self.geometry.slots_per_slab
        self.stale[slab * per_slab : (slab + 1) * per_slab] = 1

    def hold(self, refs: Ints) -> None:
        """Each block is held so often from now on. Killed amid it, it must be done again.

        What nobody holds then is cached where it keeps content, and stale: its holder may not have cleared it.
        """
        ended = np.flatnonzero((self.refs > 0) & (refs == 0))
        if self.clearing:
            self.stale[ended] = 1
        if self.has_content:
            kept = ended[self.stamps[ended] > 0][::-1]  # as freed together: each with a use of its own
            last = int(self.stamps.max())
            self.stamps[kept] = np.arange(last + 1, last + 1 + len(kept))
        self.refs[:] = refs

    def log_refs(self, slots: Places, before: Ints | int) -> None:
        """From here to `end`, `undo` gives these slots the `refs` they had before."""
        self._log(slots, before, _REFS)

    def log_content(self, slots: Places) -> None:
        """From here to `end`, `undo` takes their content: content that came goes again, content that goes is gone."""
        self._log(slots, 0, _CONTENT)

    def _log(self, slots: Places, before: Ints | int, kind: int) -> None:
        start = self.header[_LOGGED]
        end = start + len(slots)
        self.log_slots[start:end] = slots
        self.refs_before[start:end] = before
        self.header[_KIND] = kind  # one kind in one operation
        self.header[_LOGGED] = end

    def end(self) -> None:
        self.header[_LOGGED] = 0

    def undo(self) -> None:
        """Take back an operation that was under way when its process died, or when it failed."""
        count = self.header[_LOGGED]
        if count:
            slots = self.log_slots[:count]
            if self.header[_KIND] == _REFS:
                self.refs[slots] = self.refs_before[:count]
            else:
                self.stamps[slots] = 0
            self.end()

    def log_fault(self) -> str | None:
        """What makes the log unfit to be undone."""
        count, kind = self.header[_LOGGED], self.header[_KIND]
        if not count:
            return None
        if not 0 < count <= len(self.refs) or kind not in (_REFS, _CONTENT):
            return f"the log holds {count} blocks of kind {kind}; there are {len(self.refs)} blocks and kinds 1 and 2"
        slots, before = self.log_slots[:count], self.refs_before[:count]
        if slots.min() < 0 or slots.max() >= len(self.refs) or before.min() < 0 or len(np.unique(slots)) < count:
            return "the log names blocks that do not exist, or twice, or with negative counts"
        return None


def _cut(geometry: Geometry, buffer: Any) -> dict[str, memoryview[int]]:
    view = memoryview(buffer).cast("B")
    needed = state_bytes(geometry)
    if view.nbytes != needed or view.readonly:
        kind = "read-only" if view.readonly else "writable"
        raise SpecInvalid(
            f"block state needs a writable buffer of {needed} bytes; this one is {kind}, {view.nbytes} bytes"
        )
    start = 0
    found: dict[str, memoryview[int]] = {}
    for name, (code, count) in _layout(geometry).items():
        size = count * np.dtype(code).itemsize
        found[name] = view[start : start + size].cast(code)
        start += _aligned(size)
    return found
