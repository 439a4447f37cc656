"""Trying again while a worker is being replaced, without asking all the time."""

from __future__ import annotations

import ctypes
import os
import select
import time
from pathlib import Path
from typing import Self

from kvpage.errors import DeviceUnavailable, KvpageError, WorkerLost

_TOLD_BY_A_SOCKET = (WorkerLost, DeviceUnavailable)
_PAUSE_S = 0.05  # for what tells nobody that it has changed, such as a worker with too many clients
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80  # <sys/inotify.h>
_EVENT_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class Patience:
    """Bounded by `timeout_s`. Waits for a new socket in `folder`, which is how the next worker shows itself."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder = folder
        self._deadline_s = time.monotonic() + timeout_s
        self._inotify: int | None = None
        self._is_watching = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._inotify is not None:
            os.close(self._inotify)
            self._inotify = None

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def wait(self, error: KvpageError) -> None:
        """Return when it may be worth trying again after `error`. Raises it when it is not, or when time is over."""
        if not error.retryable or self.left_s <= 0:
            raise error
        if not self._is_watching:
            self._watch()  # what happened before this is seen by trying once more
            return
        if self._inotify is None or not isinstance(error, _TOLD_BY_A_SOCKET):
            time.sleep(min(self.left_s, _PAUSE_S))
            return
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        if poll.poll(self.left_s * 1000):
            os.read(self._inotify, _EVENT_BYTES)

    def _watch(self) -> None:
        self._is_watching = True
        fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if fd < 0:
            return
        if _libc.inotify_add_watch(fd, os.fsencode(self._folder), _IN_CREATE | _IN_MOVED_TO) < 0:
            os.close(fd)  # no such folder yet, or too many watches on this machine
            return
        self._inotify = fd
