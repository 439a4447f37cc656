"""Host memory in the address space, unmapped when the last object that can reach it dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

from kvpage.errors import StaleHandle
from kvpage.memory.base import Mapping
from kvpage.memory.host_calls import HostCalls


class _Region:
    """A range of addresses and those who want to know when it is unmapped. Holds nothing that keeps it mapped."""

    def __init__(self, calls: HostCalls, address: int, size_bytes: int) -> None:
        self._calls = calls
        self.address = address
        self.size_bytes = size_bytes
        self._pid = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        self.unmapped = False

    def unmap(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child never had this memory; something else may be at the address
        self._calls.unmap(self.address, self.size_bytes)
        self.unmapped = True
        self._notify()

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self.unmapped:
            self._notify()

    def _notify(self) -> None:
        # Two threads may be here at once; each callback is popped by one of them.
        with contextlib.suppress(IndexError):
            while True:
                callback = self._callbacks.pop()
                callback()


class HostMapping(Mapping):
    """The buffer is a ctypes array at the mapped address: whoever makes a view of it keeps the array alive, and a
    finaliser of the array unmaps. Not a `mmap.mmap`: torch keeps that object alive as well, but its `close` would
    unmap under the tensor.
    """

    def __init__(self, calls: HostCalls, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Raises `OSError`."""
        address = calls.map(fd, size_bytes, writable)
        with contextlib.ExitStack() as undo:
            undo.callback(calls.unmap, address, size_bytes)
            calls.keep_from_children(address, size_bytes)
            undo.pop_all()
        self._region = _Region(calls, address, size_bytes)
        array = (ctypes.c_ubyte * size_bytes).from_address(address)
        # Views may be in use until the very end of the process, so nothing is unmapped at exit.
        weakref.finalize(array, self._region.unmap).atexit = False
        self._buffer: Any = array if writable else memoryview(array).toreadonly()

    def __repr__(self) -> str:
        state = "unmapped" if self.unmapped else "closed, still viewed" if self.closed else "open"
        return f"<HostMapping {self.size_bytes} bytes at {self.address:#x}, {state}>"

    @property
    def address(self) -> int:
        return self._region.address

    @property
    def size_bytes(self) -> int:
        return self._region.size_bytes

    @property
    def buffer(self) -> Any:
        if self._buffer is None:
            raise StaleHandle("the mapping is closed; attach again")
        return self._buffer

    @property
    def closed(self) -> bool:
        return self._buffer is None

    @property
    def unmapped(self) -> bool:
        return self._region.unmapped

    def close(self) -> None:
        self._buffer = None

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        self._region.on_unmapped(callback)
