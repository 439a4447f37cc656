"""Files that are replaced while the server runs: noticed when changed, and secrets read only when they are private."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvpage.errors import SpecInvalid, shorten
from kvpage_server.ordinary_file import open_ordinary


@dataclass(frozen=True, slots=True)
class FileState:
    """Differs when the file was replaced or written to. Of a file that is not there all fields are 0."""

    device: int = 0
    inode: int = 0
    size_bytes: int = 0
    modified_ns: int = 0
    changed_ns: int = 0

    @classmethod
    def of(cls, path: Path) -> Self:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a name that no file can have
            return cls()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def read_private(path: Path, what: str, max_bytes: int) -> bytes:
    """Raises `SpecInvalid` unless it is a file of at most so many bytes that not everybody may read or change."""
    return _read(path, what, max_bytes, is_private=True)


def read_public(path: Path, what: str, max_bytes: int) -> bytes:
    """Raises `SpecInvalid` unless it is a file of at most so many bytes."""
    return _read(path, what, max_bytes, is_private=False)


def _read(path: Path, what: str, max_bytes: int, *, is_private: bool) -> bytes:
    named = f"{what} {shorten(os.fspath(path))}"
    try:
        with open_ordinary(path) as file:
            mode = os.fstat(file.fileno()).st_mode  # of this very file, whatever has the name by now
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecInvalid(f"{named} cannot be read: {reason}") from error
    if is_private and mode & 0o007:
        raise SpecInvalid(f"{named} can be read or changed by everybody; chmod o-rwx it")
    if len(content) > max_bytes:
        raise SpecInvalid(f"{named} has over {max_bytes} bytes, the limit")
    return content
