"""Device memory in the address space of a client.

Mapping takes several driver calls, each of which gives something to be undone. So it is done outside the main thread,
where nothing that a signal handler raises can come between them (`kvpage.owned`): interrupted or not, there is a
mapping in the end, whose death unmaps it, or nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kvpage.errors import InternalError, KvpageError, ProtocolError, StaleHandle
from kvpage.memory.base import Mapping
from kvpage.memory.cuda_device import CONTEXTS, CudaDevice
from kvpage.memory.cuda_driver import CudaDriver
from kvpage.memory.cuda_errors import log, quietly
from kvpage.memory.cuda_ipc_table import IpcTable
from kvpage.memory.cuda_reaper import REAPER, Region
from kvpage.owned import Descriptors, keep, uninterrupted


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
        self._is_reachable = weakref.ref(self._claim)
        REAPER.watch(self._claim, region)

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
        if self._is_reachable() is None:
            self._region.wait_until_settled()

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        self._region.on_unmapped(callback)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the device's context is current in this thread."""
        return CONTEXTS.current(self._driver, self.device)


class _CudaRegion(Region):
    """Unmapped in steps. One that fails, and those after it, are left for whoever tries again."""

    def __init__(
        self, driver: CudaDriver, device: CudaDevice, address: int, size_bytes: int, steps: Iterable[Callable[[], None]]
    ) -> None:
        super().__init__(address, size_bytes)
        self._driver = driver
        self._device = device
        self._steps = deque([driver.synchronize, *steps])  # unmapping does not wait for kernels

    def _unmap(self) -> None:
        with CONTEXTS.current(self._driver, self._device):
            while self._steps:
                self._steps[0]()
                self._steps.popleft()


def copy_of(fd: int, size_bytes: int) -> Descriptors:
    """A copy of the descriptor of a chunk. Raises `InternalError` when there is no room for it."""
    fds = Descriptors()
    try:
        keep(fds, os.dup, fd)
    except OSError as error:
        raise InternalError(
            f"copying a descriptor of {size_bytes} bytes of device memory failed: {error.strerror}",
            details={"errno": error.errno},
        ) from error
    return fds


def map_fd(driver: CudaDriver, device: CudaDevice, fd: int, size_bytes: int, *, writable: bool) -> CudaMapping:
    """Map the memory that `fd`, which stays the caller's, names on `device`.

    Raises `ProtocolError` when it names none, or none of that device or size; undoes itself when a call fails.
    """
    fds = copy_of(fd, size_bytes)
    return uninterrupted(lambda: _map_fd(driver, device, fds, size_bytes, writable=writable))


def _map_fd(
    driver: CudaDriver, device: CudaDevice, fds: Descriptors, size_bytes: int, *, writable: bool
) -> CudaMapping:
    with contextlib.closing(fds), CONTEXTS.current(driver, device), contextlib.ExitStack() as undo:
        REAPER.start()
        granularity = driver.granularity_bytes(device.ordinal)
        mapped_bytes = -(-size_bytes // granularity) * granularity
        handle = driver.import_fd(fds[0], size_bytes, device.uuid)
        undo.callback(quietly, driver.release, handle)
        if (ordinal := driver.location(handle)) != device.ordinal:
            raise ProtocolError(f"the memory lies on cuda:{ordinal} of this process, announced was {device.uuid}")
        address = driver.reserve(mapped_bytes, device.uuid)
        undo.callback(quietly, driver.free_range, address, mapped_bytes)
        driver.map(address, mapped_bytes, handle, device.uuid)
        undo.callback(quietly, driver.unmap, address, mapped_bytes)
        driver.allow_access(address, mapped_bytes, device.ordinal, device.uuid, writable=writable)
        undo.pop_all()
        steps = [partial(driver.unmap, address, mapped_bytes), partial(driver.free_range, address, mapped_bytes)]
        if not _released(driver, handle, mapped_bytes):
            steps.append(partial(driver.release, handle))
        return CudaMapping(_CudaRegion(driver, device, address, size_bytes, steps), driver, device)


def _released(driver: CudaDriver, handle: int, size_bytes: int) -> bool:
    """Give back a handle whose memory the mapping keeps from now on."""
    try:
        driver.release(handle)
    except KvpageError as error:
        log.warning("a handle of %d mapped bytes is given back when they are unmapped: %s", size_bytes, error)
        return False
    return True


IPC_TABLE = IpcTable()


def map_handle(driver: CudaDriver, device: CudaDevice, handle: bytes, fd: int | None, size_bytes: int) -> CudaMapping:
    """Map the allocation that `handle` names. `fd`, which stays the caller's, keeps its holder from freeing it; None
    when something else does so until the mapping is `unmapped`.
    """
    lifeline = Descriptors() if fd is None else copy_of(fd, size_bytes)
    return uninterrupted(lambda: _map_handle(driver, device, handle, lifeline, size_bytes))


def _map_handle(
    driver: CudaDriver, device: CudaDevice, handle: bytes, lifeline: Descriptors, size_bytes: int
) -> CudaMapping:
    with contextlib.ExitStack() as letting_go:
        letting_go.callback(lifeline.close)
        with CONTEXTS.current(driver, device), contextlib.ExitStack() as undo:
            REAPER.start()
            address = IPC_TABLE.open(driver, handle, size_bytes, device.uuid)
            undo.callback(quietly, IPC_TABLE.close, driver, handle)
            if (there_bytes := driver.allocation_bytes(address)) < size_bytes:
                raise ProtocolError(f"the handle names {there_bytes} bytes of memory, announced were {size_bytes}")
            undo.pop_all()
        letting_go.pop_all()
        # The lifeline goes last: only then may the holder free the memory.
        steps = (partial(IPC_TABLE.close, driver, handle), lifeline.close)
        return CudaMapping(_CudaRegion(driver, device, address, size_bytes, steps), driver, device)
