"""Opening files that somebody else names or replaces, so that none of them can stop a server."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_NULL_DEVICE = os.makedev(1, 3)  # Linux, Documentation/admin-guide/devices.txt: /dev/null
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


def open_ordinary(path: Path) -> BinaryIO:
    """Open `path` to read it. Never waits: without O_NONBLOCK opening a pipe would, until somebody writes to it.

    /dev/null counts, as an empty file. Raises OSError, for what is no ordinary file too; ValueError for a name that no
    file can have.
    """
    fd = os.open(path, _FLAGS)
    status = os.fstat(fd)
    is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL_DEVICE
    if not stat.S_ISREG(status.st_mode) and not is_null:
        os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "it is not an ordinary file")
    return os.fdopen(fd, "rb")
