"""When the process that a lease is of is known to be gone, so that nobody writes into its blocks any more."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
from collections.abc import Callable
from pathlib import Path

from kvpage.wire.credentials import pidfd_of
from kvpage_server.worker_loop import Loop

_START_FIELD = 22 - 3  # of /proc/PID/stat, proc_pid_stat(5), counted after the name in parentheses


def born(pid: int) -> int:
    """When the process began, in clock ticks since boot: a pid is used again, with another number. 0: not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(text[text.rindex(b")") + 2 :].split()[_START_FIELD])


def pidfd_by_number(pid: int, began: int) -> int | None:
    """Of the process that had this number and began then; None where it is gone or cannot be seen."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if born(pid) == began:  # looked at after opening: the number cannot be another's now
        return fd
    os.close(fd)
    return None


def pidfd_of_peer(connection_fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return pidfd_of(connection_fd)
    return None


class Departure:
    """Waits, after a connection has ended, until its process has: `gone` is called with this once, from the loop.

    `pidfd` is owned by this. Without one the kernel cannot name the process, and `grace_s` must do.
    """

    def __init__(self, loop: Loop, pidfd: int | None, grace_s: float, gone: Callable[[Departure], None]) -> None:
        self._loop, self._pidfd, self._gone = loop, pidfd, gone
        if pidfd is None:
            loop.call_after(grace_s, lambda: gone(self))
        elif _has_ended(pidfd):
            loop.post(self._notice)
        else:
            loop.watch(pidfd, selectors.EVENT_READ, self._notice)

    def _notice(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._loop.watch(pidfd, 0, self._notice)
            os.close(pidfd)
        self._gone(self)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
