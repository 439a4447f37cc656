"""Pools as they come from another process: untrusted, so checked before anything is done with them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvpage.errors import ProtocolError
from kvpage.memory.base import Chunk, MemoryKind
from kvpage.memory.host import HostMemory
from kvpage.wire.channel import close_fds
from kvpage.wire.messages import ChunkInfo
from kvpage_server.control_block import ControlRecord, adopt_control_block
from kvpage_server.worker_pools import PoolMemory


def import_pool(
    chunks: Sequence[ChunkInfo], fds: Sequence[int], *, device: str, memory: MemoryKind, control_memory: HostMemory
) -> tuple[ControlRecord, PoolMemory]:
    """What a peer hands over as a pool of `device`: a descriptor for each of `chunks`, then the control block's.

    Owns `fds`. Raises `ProtocolError` for anything that does not hold up.
    """
    left = list(fds)
    with contextlib.ExitStack() as undo:
        undo.callback(close_fds, left)  # those that nothing below has taken
        imported: list[Chunk] = []
        for info in chunks:
            if info.kind != memory.handle_kind:
                raise ProtocolError(f"a chunk of kind {info.kind}, this worker has {memory.handle_kind}")
            imported.append(undo.enter_context(memory.import_chunk(left.pop(0), info.size_bytes)))
        control, record = adopt_control_block(left.pop(0), control_memory)
        undo.enter_context(control)
        if record.device != device:
            raise ProtocolError(f"the control block is of device {record.device}, this worker serves {device}")
        if record.chunks != list(chunks):
            raise ProtocolError(f"the control block describes chunks {record.chunks}, handed over were {list(chunks)}")
        undo.pop_all()
        return record, PoolMemory(chunks=tuple(imported), control=control)
