"""Pools as they come from another process: untrusted, so checked before anything is done with them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvpage.errors import ProtocolError
from kvpage.memory.base import Chunk
from kvpage.memory.host import HostMemory
from kvpage.wire.channel import close_fds
from kvpage.wire.messages import ChunkInfo
from kvpage_server.control_block import ControlRecord, adopt_control_block
from kvpage_server.worker_device import DeviceMemory
from kvpage_server.worker_pools import PoolMemory


def import_pool(
    chunks: Sequence[ChunkInfo], fds: Sequence[int], *, device: str, memory: DeviceMemory, control_memory: HostMemory
) -> tuple[ControlRecord, PoolMemory]:
    """What a peer hands over as a pool of `device`: a descriptor for each of `chunks`, then the control block's.

    Owns `fds`. Raises `ProtocolError` for anything that does not hold up.
    """
    left = list(fds)
    with contextlib.ExitStack() as undo:
        undo.callback(close_fds, left)  # those that nothing below has taken
        imported: list[Chunk] = []
        for info in chunks:
            kind = memory.imported_kind(info)
            imported.append(undo.enter_context(kind.import_chunk(left.pop(0), info.size_bytes, info.handle)))
        control, record = adopt_control_block(left.pop(0), control_memory)
        undo.enter_context(control)
        if record.device != device:
            raise ProtocolError(f"the control block is of device {record.device}, this worker serves {device}")
        if record.chunks != list(chunks):
            raise ProtocolError(
                f"the control block describes chunks {_without_handles(record.chunks)}, handed over were"
                f" {_without_handles(chunks)}"
            )
        undo.pop_all()
        return record, PoolMemory(chunks=tuple(imported), control=control)


def _without_handles(chunks: Sequence[ChunkInfo]) -> list[tuple[str, int, str]]:
    return [(chunk.kind, chunk.size_bytes, chunk.device_uuid) for chunk in chunks]
