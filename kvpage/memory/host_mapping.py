"""Host memory in the address space, unmapped when the last object that can reach it dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from kvpage.errors import StaleHandle
from kvpage.memory.base import Mapping
from kvpage.memory.host_calls import HostCalls


class _Region:
    """A range of addresses and those who want to know when it is unmapped. Holds nothing that keeps it mapped."""

    def __init__(self, calls: HostCalls, size_bytes: int) -> None:
        """Nothing is mapped yet."""
        self._calls = calls
        self.size_bytes = size_bytes
        self.address = 0
        self._pid = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        self._kept: deque[int] = deque()  # the address while it is mapped

    @property
    def unmapped(self) -> bool:
        return not self._kept

    def map(self, fd: int, *, writable: bool) -> None:
        """Raises `OSError`."""
        self._calls.map(self._kept, fd, self.size_bytes, writable)
        self.address = self._kept[0]
        self._calls.keep_from_children(self.address, self.size_bytes)

    def unmap(self) -> None:
        if self._kept and os.getpid() == self._pid:  # else a forked child, where something else may be at the address
            self._calls.unmap(self._kept, self.size_bytes)
            self._notify()

    def __del__(self, _at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_kept") and not _at_exit():  # an interruption can come before it is made, and after
            self.unmap()

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
        self._region = _Region(calls, size_bytes)
        try:
            self._region.map(fd, writable=writable)
        except BaseException:
            self._region.unmap()
            raise
        array = (ctypes.c_ubyte * size_bytes).from_address(self._region.address)
        self._finaliser = weakref.finalize(array, self._region.unmap)
        # Views may be in use until the very end of the process, so nothing is unmapped at exit.
        self._finaliser.atexit = False
        self._is_reachable = weakref.ref(array)
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
        """The bytes, as an object with the buffer protocol. Raises `StaleHandle` after `close`."""
        if self._buffer is None:
            raise StaleHandle("the mapping is closed; attach again")
        return self._buffer

    @property
    def claim(self) -> Any:
        return self.buffer

    @property
    def closed(self) -> bool:
        return self._buffer is None

    @property
    def unmapped(self) -> bool:
        return self._region.unmapped

    def close(self) -> None:
        self._buffer = None
        if self._is_reachable() is None:
            self._finaliser()  # runs unless it has: an interruption at its first instruction keeps it from running

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        self._region.on_unmapped(callback)
