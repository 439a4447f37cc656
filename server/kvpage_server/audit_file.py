"""Lines at the end of a file that others may move away or cut, on a disk that may be full."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvpage.errors import PermissionDenied, SpecInvalid, shorten

# O_NONBLOCK: a pipe of that name must not stop the server until somebody reads.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class AuditFile:
    """Owns its descriptor. Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Raises `SpecInvalid` for a file that can be no log: it is a wrong setting, and no second try helps."""
        self._path = path
        self._is_torn = False
        """Whether the file ends inside a line: the next one must begin with an end of line."""
        try:
            self._fd: int | None = self._opened()
        except OSError as error:
            hint = "; a link is not followed" if error.errno == errno.ELOOP else ""
            raise SpecInvalid(
                f"the audit log {shorten(os.fspath(path))} cannot be opened: {error.strerror}{hint}"
            ) from error
        except PermissionDenied as error:
            raise SpecInvalid(error.message) from error

    def append(self, line: bytes) -> None:
        """Raises OSError or `PermissionDenied` when it is not there whole; what is there of it then stays, as a line
        of its own.
        """
        self._follow()
        assert self._fd is not None, "the file is closed"
        rest = memoryview(b"\n" + line + b"\n" if self._is_torn else line + b"\n")
        while rest:
            written = os.write(self._fd, rest)
            self._is_torn = rest[written - 1] != ord("\n")
            rest = rest[written:]

    def sync(self) -> None:
        """Return when the lines outlast a power failure. Raises OSError."""
        assert self._fd is not None, "the file is closed"
        os.fdatasync(self._fd)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _follow(self) -> None:
        """Open the file anew when it was moved away (logrotate) or removed."""
        assert self._fd is not None, "the file is closed"
        own = os.fstat(self._fd)
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            fd = self._opened()
            os.close(self._fd)
            self._fd = fd

    def _opened(self) -> int:
        fd = os.open(self._path, _FLAGS, 0o600)
        try:
            status = os.fstat(fd)
            _check_ours(self._path, status)
            self._is_torn = status.st_size > 0 and os.pread(fd, 1, status.st_size - 1) != b"\n"
        except BaseException:
            os.close(fd)
            raise
        return fd


def _check_ours(path: Path, status: os.stat_result) -> None:
    named = f"the audit log {shorten(os.fspath(path))}"
    if not stat.S_ISREG(status.st_mode):
        raise PermissionDenied(f"{named} is not an ordinary file; give the name of one, or of none yet")
    if status.st_uid != os.geteuid():
        raise PermissionDenied(
            f"{named} belongs to user {status.st_uid}, who could change it; chown it to {os.geteuid()}, as whom the"
            " server runs"
        )
    if status.st_mode & 0o022:
        raise PermissionDenied(
            f"{named} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it; chmod go-w it"
        )
