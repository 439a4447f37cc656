"""Pools as they come from another process: untrusted, so checked before anything is done with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from kvpage.errors import ProtocolError, shorten
from kvpage.memory.host import HostMemory
from kvpage.wire.channel import close_fds
from kvpage.wire.messages import ChunkInfo
from kvpage_server.control_block import ControlRecord, adopt_control_block
from kvpage_server.worker_device import DeviceMemory
from kvpage_server.worker_pool_entry import PoolMemory


def import_pool(
    chunks: Sequence[ChunkInfo], fds: Sequence[int], *, device: str, memory: DeviceMemory, control_memory: HostMemory
) -> tuple[ControlRecord, PoolMemory]:
    """What a peer hands over as a pool of `device`: a descriptor for each of `chunks`, then the control block's.

    Owns `fds`. Raises `ProtocolError` for anything that does not hold up.
    """
    left = list(fds)
    with contextlib.ExitStack() as undo:
        undo.callback(close_fds, left)  # those that nothing below has taken
        if len(chunks) != 1:
            raise ProtocolError(f"a pool of {len(chunks)} chunks; workers make pools of one, and clients map no other")
        [info] = chunks
        kind = memory.imported_kind(info)
        chunk = undo.enter_context(kind.import_chunk(left.pop(0), info.size_bytes, info.handle))
        control, record = adopt_control_block(left.pop(0), control_memory)
        undo.enter_context(control)
        if record.device != device:
            raise ProtocolError(f"the control block is of device {shorten(record.device)}, this worker serves {device}")
        if record.chunks != list(chunks):
            raise ProtocolError(
                f"the control block describes chunks {_without_handles(record.chunks)}, handed over were"
                f" {_without_handles(chunks)}"
            )
        pool_memory = PoolMemory(chunks=(chunk,), control=control)
        if device == "host" and len(files_of(pool_memory)) < len(fds):
            raise ProtocolError(
                f"{len(fds)} descriptors name {len(files_of(pool_memory))} files; the chunk and the control block are"
                " files of their own"
            )
        undo.pop_all()
        return record, pool_memory


def files_of(memory: PoolMemory) -> set[tuple[int, int]]:
    """What host memory is, whatever descriptors name it."""
    return {(status.st_dev, status.st_ino) for status in (os.fstat(chunk.fd) for chunk in memory.all)}


def _without_handles(chunks: Sequence[ChunkInfo]) -> list[tuple[str, int, str]]:
    return [(chunk.kind, chunk.size_bytes, chunk.device_uuid) for chunk in chunks]
