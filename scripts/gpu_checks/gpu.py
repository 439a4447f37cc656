"""The device of a check, used through the driver alone: for what needs no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack

from kvpage.memory.cuda_device import CONTEXTS, find_device
from kvpage.memory.cuda_driver import CudaDriver

MIB = 1 << 20


class Gpu:
    """Every method binds the device's context for itself."""

    def __init__(self, uuid: str) -> None:
        self.driver = CudaDriver()
        self.device = find_device(self.driver, uuid)

    @property
    def uuid(self) -> str:
        return self.device.uuid

    def current(self) -> AbstractContextManager[None]:
        return CONTEXTS.current(self.driver, self.device)

    def free_bytes(self) -> int:
        with self.current():
            return self.driver.memory_info()[0]

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Done when it returns."""
        with self.current():
            self.driver.fill(address, value, size_bytes)
            self.driver.synchronize()

    def read(self, address: int, size_bytes: int) -> bytes:
        with self.current():
            return self.driver.read(address, size_bytes)

    def synchronize(self) -> None:
        with self.current():
            self.driver.synchronize()

    def rounded(self, size_bytes: int) -> int:
        granularity = self.driver.granularity_bytes(self.device.ordinal)
        return -(-size_bytes // granularity) * granularity

    @contextlib.contextmanager
    def raw_chunk(self, size_bytes: int) -> Iterator[int]:
        """Handle of memory as `cuMemCreate` gives it, not cleared. `size_bytes` must be a multiple of the granule."""
        handle = self.driver.create(self.device.ordinal, size_bytes, self.uuid)
        try:
            yield handle
        finally:
            self.driver.release(handle)

    @contextlib.contextmanager
    def raw_mapping(self, handle: int, size_bytes: int) -> Iterator[int]:
        """Address at which the whole of `handle` can be read and written."""
        with ExitStack() as undo:
            address = self.driver.reserve(size_bytes, self.uuid)
            undo.callback(self.driver.free_range, address, size_bytes)
            self.driver.map(address, size_bytes, handle, self.uuid)
            undo.callback(self.driver.unmap, address, size_bytes)
            ordinal = self.device.ordinal
            self.driver.allow_access(address, size_bytes, ordinal, self.uuid, writable=True)
            yield address

    @contextlib.contextmanager
    def raw_fd(self, handle: int) -> Iterator[int]:
        fd = self.driver.export_fd(handle, self.uuid)
        try:
            yield fd
        finally:
            os.close(fd)
