"""When the process that a lease is of is known to be gone, so that nobody writes into its blocks any more."""

from __future__ import annotations

import os
import selectors
from collections.abc import Hashable
from pathlib import Path

from kvpage.errors import TooManyClients
from kvpage.pages.machine_time import offset_s
from kvpage.wire.credentials import pidfd_of
from kvpage_server.worker_loop import Callback, Loop, Timer

_START_FIELD = 22 - 3  # of /proc/PID/stat, proc_pid_stat(5), counted after the name in parentheses


def born(pid: int) -> int:
    """When the process began, in clock ticks since boot: a pid is used again, with another number. 0: not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    ticks = int(text[text.rindex(b")") + 2 :].split()[_START_FIELD])
    return ticks - round(offset_s("boottime") * os.sysconf("SC_CLK_TCK"))


def pidfd_by_number(pid: int, began: int) -> int:
    """Of the process that had this number and began then. Raises `ProcessLookupError` where it is gone, another OSError
    where it cannot be seen.
    """
    fd = os.pidfd_open(pid)
    now = born(pid)  # looked at after opening: the number cannot be another's now
    if began and now and abs(now - began) > 1:  # one tick: an offset of a time namespace need not be whole ticks
        os.close(fd)
        raise ProcessLookupError(f"pid {pid} is another process by now")
    return fd


def pidfd_of_peer(connection_fd: int) -> int | None:
    """None where the kernel cannot name the process. Raises `TooManyClients` where this worker may open no more files:
    it could not tell when the process has ended.
    """
    try:
        return pidfd_of(connection_fd)
    except OSError as error:
        raise TooManyClients(
            "the worker has no descriptor left to notice the end of your process by; raise its limit of open files"
            f" (ulimit -Hn): {error.strerror}"
        ) from error


class Departure:
    """Waits until a process has ended whose connection has, and tells those who wait for that.

    It tells one, and lets the loop serve others before the next: giving back all blocks of many leases takes long.
    """

    def __init__(self, loop: Loop, pidfd: int | None, grace_s: float) -> None:
        """`pidfd` is owned by this. Without one the kernel cannot name the process, and `grace_s` must do."""
        self._loop, self._pidfd = loop, pidfd
        self._waiting: dict[Hashable, Callback] = {}
        self._timer: Timer | None = None
        if pidfd is None:
            self._timer = loop.call_after(grace_s, self._tell_next)
        else:
            loop.watch(pidfd, selectors.EVENT_READ, self._notice)

    @property
    def num_fds(self) -> int:
        return 0 if self._pidfd is None else 1

    def add(self, waiting: Hashable, gone: Callback) -> None:
        """Have `gone` called, from the loop, unless `forget` comes first."""
        self._waiting[waiting] = gone

    def forget(self, waiting: Hashable) -> None:
        """It does not wait any more; nor does this, when it was the last."""
        self._waiting.pop(waiting, None)
        if not self._waiting:
            self._close()

    def _close(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._loop.watch(pidfd, 0, self._notice)
            os.close(pidfd)
        if self._timer is not None:
            self._timer.cancel()

    def _notice(self) -> None:
        self._close()
        self._tell_next()

    def _tell_next(self) -> None:
        if self._waiting:
            waiting = next(iter(self._waiting))
            gone = self._waiting.pop(waiting)
            self._loop.post(self._tell_next)
            gone()
