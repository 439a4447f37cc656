"""The IPC handles this process has open: the driver gives every open of a handle the same address."""

from __future__ import annotations

import threading

from kvpage.memory.cuda_driver import CudaDriver


class IpcTable:
    """Opens each handle once and closes it after as many closes as there were opens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[int, int]] = {}  # handle -> address, count

    def open(self, driver: CudaDriver, handle: bytes, size_bytes: int, uuid: str) -> int:
        """Address of the allocation. Needs its device's context to be current."""
        with self._lock:
            address, count = self._open.get(handle, (0, 0))
            if not count:
                address = driver.open_ipc(handle, size_bytes, uuid)
            self._open[handle] = address, count + 1
            return address

    def close(self, driver: CudaDriver, handle: bytes) -> None:
        with self._lock:
            address, count = self._open[handle]
            if count == 1:
                driver.close_ipc(address)
                del self._open[handle]
            else:
                self._open[handle] = address, count - 1
