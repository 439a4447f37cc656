"""The system calls that host memory is made of: one method each, so that a test can count them and let one fail.

All raise `OSError`.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque

from kvpage.owned import give_back, keep

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, Linux 5.1; no constant in Python 3.11
WRITE_SEALS = fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE

_MFD_NOEXEC_SEAL = 0x8  # linux/memfd.h, Linux 6.3; without it newer kernels log a warning
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class HostCalls:
    """The real calls."""

    def create_memfd(self, name: str) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
        except OSError:  # an older kernel does not know the flag; if something else is wrong this fails again
            return os.memfd_create(name, flags)

    def resize(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def commit(self, fd: int, offset: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, offset, size_bytes)

    def seal(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)

    def seals(self, fd: int) -> int:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)

    def access_mode(self, fd: int) -> int:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE

    def status(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def duplicate(self, fd: int) -> int:
        return os.dup(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def map(self, kept: deque[int], fd: int, size_bytes: int, writable: bool) -> None:
        """Puts the address of the mapping into `kept`.

        Not `mmap.mmap`, which keeps a descriptor and unmaps under the feet of its users.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        keep(kept, _libc.mmap, None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if kept[-1] == _MAP_FAILED:
            kept.pop()
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def keep_from_children(self, address: int, size_bytes: int) -> None:
        """A forked child does not get the mapping."""
        _checked(_libc.madvise(address, size_bytes, mmap.MADV_DONTFORK))

    def unmap(self, kept: deque[int], size_bytes: int) -> None:
        """Takes the address out of `kept`. It fails for no mapping that exists, so nobody is told."""
        give_back(kept, _libc.munmap, size_bytes)
