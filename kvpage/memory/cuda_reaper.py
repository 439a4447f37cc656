"""The one thread that unmaps device memory.

The last tensor of a mapping may die in any thread and in the middle of garbage collection, while kernels still read the
memory. So the death only puts a note here; this thread binds the context, waits for the device, and unmaps.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from kvpage.memory.cuda_errors import log


class Region(ABC):
    """Device memory in the address space, and those who want to know when it has left. Nothing here keeps it mapped."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._pid = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        # Locked until it is settled. Not an event: interrupted while it is waited for, that can keep its own lock, and
        # the reaper would wait for it for ever.
        self._settling = threading.Lock()
        self._settling.acquire()
        self._unmapped = False

    @property
    def unmapped(self) -> bool:
        return self._unmapped

    @abstractmethod
    def _unmap(self) -> None:
        """Wait for the device, then unmap. Raises `KvpageError`; the region is then mapped until the process ends."""

    def wait_until_settled(self) -> None:
        """Until it is unmapped, or has failed to be. Not for the reaper's own thread."""
        if not REAPER.is_current() and os.getpid() == self._pid:
            with self._settling:
                pass

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self._unmapped:
            self._notify()

    def settle(self) -> None:
        try:
            self._unmap()
        except Exception as error:  # noqa: BLE001 - nobody else unmaps: this thread must outlive any region
            # Never reported as free: whoever counts on it would take memory that something here may still write to.
            log.error("%d bytes of device memory stay in use until this process ends: %s", self.size_bytes, error)
        else:
            self._unmapped = True
            self._notify()
        finally:
            if self._settling.locked():  # else it is tried for the second time
                self._settling.release()

    def _notify(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread is here too, and has taken the last one
                return
            try:
                callback()
            except Exception:  # noqa: BLE001 - one that fails must not keep the others from hearing of it
                log.exception("a callback of unmapped memory failed")


class Reaper:
    """Started before the first region is made; ends with the process, whose end unmaps everything."""

    def __init__(self) -> None:
        self._dead: SimpleQueue[weakref.ref[Any]] = SimpleQueue()
        self._regions: dict[weakref.ref[Any], Region] = {}
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._starting = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_lock)

    def start(self) -> None:
        """Not in a finaliser: it takes locks. Called for every mapping that is made."""
        with self._starting:
            if self._pid == os.getpid():
                return
            # Threads do not survive a fork, nor does a child share the parent's regions.
            self._dead, self._regions = SimpleQueue(), {}
            thread = threading.Thread(target=self._run, name="kvpage-reaper", daemon=True)
            thread.start()
            self._thread, self._pid = thread, os.getpid()

    def _forget_lock(self) -> None:
        self._starting = threading.Lock()  # another thread of the parent may have held it

    def watch(self, claim: Any, region: Region) -> None:
        """Unmap `region` when nothing refers to `claim` any more."""
        # `put` is written in C and may run inside a finaliser: no interruption can come between the death and the note.
        self._regions[weakref.ref(claim, self._dead.put)] = region

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while True:
            self._regions.pop(self._dead.get()).settle()


REAPER = Reaper()
