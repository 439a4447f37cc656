"""Finding a kind of memory by the name it has on the wire."""

from __future__ import annotations

from kvpage.errors import NotSupported, shorten
from kvpage.memory.base import MemoryKind
from kvpage.memory.host import HostMemory


def memory_kind(handle_kind: str, device_uuid: str) -> MemoryKind:
    """For mapping what a peer has named so. Raises `NotSupported` for a kind this version does not have."""
    if handle_kind == HostMemory.handle_kind:
        return HostMemory()
    # Here, so that who maps host memory loads nothing of it.
    from kvpage.memory.cuda import CudaIpcMemory, CudaVmmMemory

    for kind in (CudaVmmMemory, CudaIpcMemory):
        if handle_kind == kind.handle_kind:
            return kind(device_uuid)
    raise NotSupported(f"memory of kind {shorten(repr(handle_kind))} cannot be mapped by this version of kvpage")
