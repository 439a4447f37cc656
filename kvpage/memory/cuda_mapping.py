"""Device memory in the address space of a client."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

from kvpage.errors import ProtocolError, StaleHandle
from kvpage.memory.base import Mapping
from kvpage.memory.cuda_device import CONTEXTS, CudaDevice
from kvpage.memory.cuda_driver import CudaDriver
from kvpage.memory.cuda_errors import quietly
from kvpage.memory.cuda_ipc_table import IpcTable
from kvpage.memory.cuda_reaper import Region, start_reaper


class _Claim:
    """What keeps a mapping alive: the owner of every tensor over it. Its death is what gives the region up."""

    __slots__ = ("__weakref__",)


class CudaMapping(Mapping):
    """A region and this process's claim to it."""

    def __init__(self, region: Region, driver: CudaDriver, device: CudaDevice) -> None:
        self.device = device
        self._driver = driver
        self._region = region
        self._claim: _Claim | None = _Claim()
        # Views may be in use until the very end of the process, so nothing is unmapped at exit.
        weakref.finalize(self._claim, region.give_up).atexit = False

    def __repr__(self) -> str:
        state = "unmapped" if self.unmapped else "closed, still viewed" if self.closed else "open"
        return f"<CudaMapping {self.size_bytes} bytes at {self.address:#x} on {self.device.uuid}, {state}>"

    @property
    def address(self) -> int:
        return self._region.address

    @property
    def size_bytes(self) -> int:
        return self._region.size_bytes

    @property
    def claim(self) -> Any:
        if self._claim is None:
            raise StaleHandle("the mapping is closed; attach again")
        return self._claim

    @property
    def closed(self) -> bool:
        return self._claim is None

    @property
    def unmapped(self) -> bool:
        return self._region.unmapped

    def close(self) -> None:
        """When nothing else views the memory, this waits for the device and returns when it is unmapped."""
        self._claim = None
        if self._region.given_up:
            self._region.wait_until_settled()

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        self._region.on_unmapped(callback)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the device's context is current in this thread."""
        return CONTEXTS.current(self._driver, self.device)


class _VmmRegion(Region):
    def __init__(
        self, driver: CudaDriver, device: CudaDevice, address: int, size_bytes: int, mapped_bytes: int
    ) -> None:
        super().__init__(address, size_bytes)
        self._driver = driver
        self._device = device
        self._mapped_bytes = mapped_bytes

    def _unmap(self) -> None:
        with CONTEXTS.current(self._driver, self._device):
            self._driver.synchronize()  # unmapping does not wait for kernels
            self._driver.unmap(self.address, self._mapped_bytes)
            self._driver.free_range(self.address, self._mapped_bytes)


def map_fd(driver: CudaDriver, device: CudaDevice, fd: int, size_bytes: int, *, writable: bool) -> CudaMapping:
    """Map the memory that `fd`, which stays the caller's, names on `device`.

    Raises `ProtocolError` when it names none, or none of that device or size; undoes itself when a call fails.
    """
    start_reaper()
    granularity = driver.granularity_bytes(device.ordinal)
    mapped_bytes = -(-size_bytes // granularity) * granularity
    with CONTEXTS.current(driver, device), contextlib.ExitStack() as undo:
        handle = driver.import_fd(fd, size_bytes, device.uuid)
        undo.callback(quietly, driver.release, handle)  # mapped or not: the mapping keeps the memory
        if (ordinal := driver.location(handle)) != device.ordinal:
            raise ProtocolError(f"the memory lies on cuda:{ordinal} of this process, announced was {device.uuid}")
        with contextlib.ExitStack() as undo_mapping:
            address = driver.reserve(mapped_bytes, device.uuid)
            undo_mapping.callback(quietly, driver.free_range, address, mapped_bytes)
            driver.map(address, mapped_bytes, handle, device.uuid)
            undo_mapping.callback(quietly, driver.unmap, address, mapped_bytes)
            driver.allow_access(address, mapped_bytes, device.ordinal, device.uuid, writable=writable)
            region = _VmmRegion(driver, device, address, size_bytes, mapped_bytes)
            # First this, then the mapping, which arms a finaliser: an interruption between the two keeps the memory
            # mapped, one in the other order would unmap twice, and the second time somebody else's memory.
            undo_mapping.pop_all()
        return CudaMapping(region, driver, device)


class _IpcRegion(Region):
    def __init__(
        self, driver: CudaDriver, device: CudaDevice, handle: bytes, lifeline: int | None, address: int, size_bytes: int
    ) -> None:
        super().__init__(address, size_bytes)
        self._driver = driver
        self._device = device
        self._handle = handle
        self._lifeline = lifeline

    def _unmap(self) -> None:
        with CONTEXTS.current(self._driver, self._device):
            self._driver.synchronize()
            IPC_TABLE.close(self._driver, self._handle)
        if self._lifeline is not None:
            os.close(self._lifeline)  # only now may the holder free the memory


IPC_TABLE = IpcTable()


def map_handle(driver: CudaDriver, device: CudaDevice, handle: bytes, fd: int | None, size_bytes: int) -> CudaMapping:
    """Map the allocation that `handle` names. `fd`, which stays the caller's, keeps its holder from freeing it; None
    when something else does so until the mapping is `unmapped`.
    """
    start_reaper()
    with CONTEXTS.current(driver, device), contextlib.ExitStack() as undo:
        lifeline = None if fd is None else os.dup(fd)
        if lifeline is not None:
            undo.callback(os.close, lifeline)
        address = IPC_TABLE.open(driver, handle, size_bytes, device.uuid)
        undo.callback(quietly, IPC_TABLE.close, driver, handle)
        if (there_bytes := driver.allocation_bytes(address)) < size_bytes:
            raise ProtocolError(f"the handle names {there_bytes} bytes of memory, announced were {size_bytes}")
        region = _IpcRegion(driver, device, handle, lifeline, address, size_bytes)
        undo.pop_all()  # before the mapping is made, as above
    return CudaMapping(region, driver, device)
