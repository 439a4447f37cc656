"""The worker's log: one JSON object on a line of standard error for each thing worth knowing later, its fields named as
in the log of the API process (`logs`); and what it tells whoever started it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from kvpage.errors import PermissionDenied
from kvpage_server.standard_error import write_line

Level = Literal["info", "warning", "error"]

MAX_LOG_BYTES = 8 << 20
_STDOUT, _STDERR = 1, 2
_MAX_LINE_BYTES = 4096  # PIPE_BUF, pipe(7): so much arrives in one piece
_NOT_REGULAR = (errno.ENXIO, errno.ELOOP, errno.EISDIR)  # a FIFO that nobody reads, a symbolic link, a folder


def log(event: str, *, level: Level = "info", **fields: object) -> None:
    """Write `event` with its `fields`; those that JSON does not know are written as text. Never raises for the log's
    own sake: a full disk or a reader that went away must not end the process that holds the memory.
    """
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    known = {"time": time, "level": level, "event": event, "logger": "kvpage.worker", "pid": os.getpid()}
    write_line(json.dumps(known | fields, default=str))


def open_log(path: Path) -> int:
    """A descriptor to append to the log, owned by the caller. Never waits. A log that has become too long is kept as
    `.log.1`, and a new one is begun.

    Raises `PermissionDenied` for what is no regular file, `OSError`.
    """
    fd = _open_regular(path)
    if os.fstat(fd).st_size <= MAX_LOG_BYTES:
        return fd
    os.close(fd)
    path.replace(path.with_name(path.name + ".1"))
    return _open_regular(path)


def _open_regular(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_regular(path)
    return fd


def _not_regular(path: Path) -> PermissionDenied:
    return PermissionDenied(f"the log {path} is not a regular file; remove it, or choose another --run-dir")


def shorten_own_log(path: Path) -> None:
    """Begin a new log when standard error is the one at `path` and has become too long. Never raises `OSError`: then
    the old one goes on.
    """
    with contextlib.suppress(OSError, PermissionDenied):
        status = os.fstat(_STDERR)
        if status.st_size > MAX_LOG_BYTES and os.path.samestat(status, path.lstat()):
            fd = open_log(path)
            os.dup2(fd, _STDERR)
            os.dup2(fd, _STDOUT)
            os.close(fd)


class StartReport:
    """Tells whoever started this process how that went: one line, once, without a file, as a disk may be full."""

    def __init__(self, fd: int | None) -> None:
        """Owns `fd`; None when nobody asked."""
        self._fd = fd

    def tell(self, text: str) -> None:
        """`ready`, or why not. Later calls do nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            line = " ".join(text.split()).encode("utf-8", "backslashreplace")[: _MAX_LINE_BYTES - 1] + b"\n"
            with contextlib.suppress(OSError):  # who asked may be gone; that is no reason to end
                os.write(fd, line)
            os.close(fd)
