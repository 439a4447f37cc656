"""How the block state in a pool's control block is divided, and how large it is."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

from kvpage.errors import SpecInvalid
from kvpage.pages.arrays import state_bytes
from kvpage.pages.geometry import Geometry
from kvpage.pages.holding_arrays import holdings_bytes
from kvpage.pages.lease_records import RECORDS_BYTES
from kvpage.pages.prefix_index import index_bytes

_ALIGNMENT_BYTES = 4096


class PoolBuffer(NamedTuple):
    """The parts of one buffer, in this order, each at a multiple of 4096 bytes."""

    blocks: Any
    index: Any
    holdings: Any
    records: Any

    @classmethod
    def of(cls, geometry: Geometry, buffer: Any = None) -> PoolBuffer:
        """`buffer`: writable, `pool_buffer_bytes(geometry)` bytes; None: memory of this process, untouched pages of
        which take none. Raises `SpecInvalid` for another size.
        """
        needed = pool_buffer_bytes(geometry)
        if buffer is None:
            buffer = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(buffer).cast("B")
        if view.nbytes != needed:
            raise SpecInvalid(f"the block state of this pool has {needed} bytes, the buffer {view.nbytes}")
        parts, start = [], 0
        for size in _sizes(geometry):
            parts.append(view[start : start + size])
            start += _aligned(size)
        return cls(*parts)


def pool_buffer_bytes(geometry: Geometry) -> int:
    """Size of the block state of a pool. Pages that nobody touched take no memory."""
    return sum(map(_aligned, _sizes(geometry)))


def _sizes(geometry: Geometry) -> tuple[int, int, int, int]:
    return state_bytes(geometry), index_bytes(geometry), holdings_bytes(geometry), RECORDS_BYTES


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
