"""Device memory that other processes can map: by descriptor (`cuda_vmm`) or by a 64-byte handle (`cuda_ipc`).

Both kinds are made by a process of their own and named here by a descriptor alone, so that whoever holds a chunk needs
no driver and no context: a worker and an API process count as holders just as a client does, and the memory is freed
when the last copy of the descriptor and the last mapping are gone, by whatever death. Only mapping uses the driver.

    cuda_vmm   the descriptor is the memory itself, as the driver exports it
    cuda_ipc   the descriptor is the lifeline of the process that holds the memory; the handle says where it is
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import cached_property
from typing import ClassVar

from kvpage.errors import KvpageError, NotSupported, ProtocolError, error_from_code, shorten
from kvpage.memory.base import DescriptorChunk, MemoryKind, Progress, checked_size, no_progress
from kvpage.memory.cuda_child import IPC_UNIT_BYTES, DeviceFacts
from kvpage.memory.cuda_descriptor import check_exported_memory, check_lifeline, holder_ended, holder_has_ended
from kvpage.memory.cuda_device import CudaDevice, find_device
from kvpage.memory.cuda_driver import IPC_HANDLE_BYTES, CudaDriver
from kvpage.memory.cuda_maker import run_task
from kvpage.memory.cuda_mapping import CudaMapping, copy_of, map_fd, map_handle
from kvpage.memory.device_names import check_device_name


def probe(device: str) -> DeviceFacts:
    """What `device` (`cuda:N` or a UUID) is and can do, found out by a process that does it once.

    Raises `NotSupported` when there is no driver, `NotFound` when there is no such device, `SpecInvalid` for another
    name.
    """
    check_device_name(device)
    try:
        return DeviceFacts(**run_task("probe", device).message["facts"])
    except KvpageError as error:
        text = f"device {shorten(device)} cannot be used: {error.message}"
        raise error_from_code(error.code, text, details=error.details) from error


class _Mapper:
    """The driver and the device, once this process maps something."""

    def __init__(self, device_uuid: str) -> None:
        self.device_uuid = device_uuid

    @cached_property
    def driver(self) -> CudaDriver:
        return CudaDriver()

    @cached_property
    def device(self) -> CudaDevice:
        return find_device(self.driver, self.device_uuid)

    def map(self, fd: int, size_bytes: int, handle: bytes, *, writable: bool = True) -> CudaMapping:
        """`fd` stays the caller's."""
        if not handle:
            return map_fd(self.driver, self.device, fd, size_bytes, writable=writable)
        if not writable:
            raise NotSupported("memory of kind cuda_ipc cannot be mapped read-only; use cuda_vmm")
        try:
            return map_handle(self.driver, self.device, handle, fd, size_bytes)
        except KvpageError as error:
            if holder_has_ended(fd):
                raise holder_ended() from error
            raise


class CudaChunk(DescriptorChunk):
    """Memory of one device."""

    def __init__(self, mapper: _Mapper, fd: int, size_bytes: int, handle: bytes = b"") -> None:
        super().__init__(fd, size_bytes)
        self._mapper = mapper
        self._handle = handle

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self._fd}"
        return f"<CudaChunk {self.size_bytes} bytes on {self._mapper.device_uuid}, {state}>"  # never the handle

    @property
    def handle(self) -> bytes:
        return self._handle

    @property
    def loss_fd(self) -> int | None:
        return self._fd if self._handle else None

    def require_there(self) -> None:
        if self._handle and holder_has_ended(self.fd):
            raise holder_ended()

    def export(self) -> int:
        (fd,) = copy_of(self.fd, self.size_bytes).release()
        return fd

    def map(self, *, writable: bool = True) -> CudaMapping:
        """Raises `NotFound` when this process does not see the device, `ProtocolError` when the descriptor or handle
        names no memory of it, `NotSupported` for a read-only mapping by handle and where there is no driver.
        """
        return self._mapper.map(self.fd, self.size_bytes, self._handle, writable=writable)


class FreeBytes:
    """What was free on a device when a process of ours last used it: asking takes a context."""

    def __init__(self, free_bytes: int) -> None:
        self.see(free_bytes)

    def see(self, free_bytes: int) -> None:
        self.last_seen = free_bytes, time.monotonic()

    @property
    def bytes(self) -> int:
        return self.last_seen[0]

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.last_seen[1]


class _CudaMemory(MemoryKind):
    """What both kinds have in common."""

    _task: ClassVar[str]
    """Of `cuda_child`."""
    _handle_bytes: ClassVar[int]

    def __init__(self, device_uuid: str, unit_bytes: int, free: FreeBytes | None) -> None:
        self.unit_bytes = unit_bytes
        self._mapper = _Mapper(device_uuid)
        self._free = free

    def available_bytes(self) -> int:
        """Takes as long as starting a process that uses the driver."""
        return probe(self._mapper.device_uuid).free_bytes

    def create(self, size_bytes: int, on_progress: Progress = no_progress) -> CudaChunk:
        def told(cleared_bytes: int) -> None:  # more is cleared than was asked for, to the next unit of the device
            on_progress(min(cleared_bytes, size_bytes))

        made = run_task(self._task, self._mapper.device_uuid, checked_size(size_bytes), told)
        assert made.fd is not None
        if self._free is not None:
            self._free.see(made.message["free_bytes"])
        return CudaChunk(self._mapper, made.fd, size_bytes, made.handle)

    def import_chunk(self, fd: int, size_bytes: int, handle: bytes = b"") -> CudaChunk:
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            self._check_import(fd, size_bytes, handle)
            undo.pop_all()
            return CudaChunk(self._mapper, fd, size_bytes, handle)

    def map_chunk(self, fd: int, size_bytes: int, handle: bytes = b"") -> CudaMapping:
        self._check_import(fd, size_bytes, handle)
        return self._mapper.map(fd, size_bytes, handle)

    def _check_import(self, fd: int, size_bytes: int, handle: bytes) -> None:
        """What only the driver can tell is found when the chunk is mapped: holding it needs no driver."""
        checked_size(size_bytes)
        if len(handle) != self._handle_bytes:
            raise ProtocolError(
                f"a chunk came with a handle of {len(handle)} bytes; kind {self.handle_kind} has {self._handle_bytes}"
            )
        if handle:
            check_lifeline(fd)
        else:
            check_exported_memory(fd, size_bytes)


class CudaVmmMemory(_CudaMemory):
    """Memory of `cuMemCreate`, shared as the descriptor that the driver exports."""

    handle_kind: ClassVar[str] = "cuda_vmm"
    _task: ClassVar[str] = "vmm"
    _handle_bytes: ClassVar[int] = 0

    def __init__(self, device_uuid: str, granularity_bytes: int = 2 << 20, free: FreeBytes | None = None) -> None:
        """`granularity_bytes` matters only to who counts what is taken. `free` is told what is free after a chunk."""
        super().__init__(device_uuid, granularity_bytes, free)


class CudaIpcMemory(_CudaMemory):
    """Memory of `cuMemAlloc`, shared by its IPC handle: for those who cannot take `cuda_vmm`, on request only."""

    handle_kind: ClassVar[str] = "cuda_ipc"
    _task: ClassVar[str] = "ipc"
    _handle_bytes: ClassVar[int] = IPC_HANDLE_BYTES

    def __init__(self, device_uuid: str, free: FreeBytes | None = None) -> None:
        """`free` is told what is free after a chunk."""
        super().__init__(device_uuid, IPC_UNIT_BYTES, free)
