"""Shared host memory: a sealed, fully committed memfd for each chunk."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from typing import ClassVar

from kvpage.errors import InternalError, NotEnoughMemory, ProtocolError
from kvpage.memory.base import DescriptorChunk, MemoryKind, Progress, checked_size, no_progress
from kvpage.memory.host_available import available_host_bytes
from kvpage.memory.host_calls import SIZE_SEALS, WRITE_SEALS, HostCalls
from kvpage.memory.host_mapping import HostMapping

COMMIT_STEP_BYTES = 64 << 20  # about 20 ms each: how often progress is told and a shortage noticed
_STAT_BLOCK_BYTES = 512  # unit of st_blocks, stat(2)


class HostChunk(DescriptorChunk):
    def __init__(self, calls: HostCalls, fd: int, size_bytes: int) -> None:
        super().__init__(fd, size_bytes, calls.close)
        self._calls = calls

    def __repr__(self) -> str:
        return f"<HostChunk {self.size_bytes} bytes, {'closed' if self.closed else f'fd {self._fd}'}>"

    def export(self) -> int:
        with _errors_named("copying a descriptor", self.size_bytes):
            return self._calls.duplicate(self.fd)

    def map(self, *, writable: bool = True) -> HostMapping:
        with _errors_named("mapping", self.size_bytes):
            return HostMapping(self._calls, self.fd, self.size_bytes, writable=writable)


class HostMemory(MemoryKind):
    """`calls` and `available` are arguments so that a test can let them fail."""

    handle_kind: ClassVar[str] = "memfd"
    unit_bytes = mmap.PAGESIZE

    def __init__(self, calls: HostCalls | None = None, available: Callable[[], int] = available_host_bytes) -> None:
        self._calls = calls or HostCalls()
        self._available = available

    def available_bytes(self) -> int:
        return self._available()

    def create(
        self, size_bytes: int, on_progress: Progress = no_progress, *, committed_bytes: int | None = None
    ) -> HostChunk:
        """`committed_bytes`: from the start so many are committed; what is after them takes memory when it is touched,
        and whoever touches it where there is none is ended by the kernel. None: all.
        """
        committed = checked_size(size_bytes) if committed_bytes is None else committed_bytes
        self._check_available(committed)
        with contextlib.ExitStack() as undo, _errors_named("committing", size_bytes):
            fd = self._calls.create_memfd("kvpage")
            undo.callback(self._calls.close, fd)
            self._calls.resize(fd, size_bytes)
            self._commit(fd, committed, on_progress)
            self._calls.seal(fd)
            undo.pop_all()
            return HostChunk(self._calls, fd, size_bytes)

    def _commit(self, fd: int, size_bytes: int, on_progress: Progress) -> None:
        # Without this step a page would be found missing at its first use, as a SIGBUS in whoever touched it; and a
        # fallocate beyond what is free is no error either: the kernel ends a process to make room.
        for offset in range(0, size_bytes, COMMIT_STEP_BYTES):
            step_bytes = min(COMMIT_STEP_BYTES, size_bytes - offset)
            self._check_available(step_bytes)
            self._calls.commit(fd, offset, step_bytes)
            on_progress(offset + step_bytes)

    def _check_available(self, needed_bytes: int) -> None:
        available_bytes = self._available()
        if needed_bytes > available_bytes:
            raise NotEnoughMemory(
                f"{needed_bytes} bytes of host memory are needed, {available_bytes} are available; make the pool"
                " smaller or free memory",
                details={"needed_bytes": needed_bytes, "available_bytes": available_bytes},
            )

    def import_chunk(
        self, fd: int, size_bytes: int, handle: bytes = b"", *, committed_bytes: int | None = None
    ) -> HostChunk:
        """`committed_bytes`: as in `create`."""
        with contextlib.ExitStack() as undo, _errors_named("importing", size_bytes):
            undo.callback(self._calls.close, fd)
            self._check_import(fd, checked_size(size_bytes), handle, committed_bytes)
            undo.pop_all()
            return HostChunk(self._calls, fd, size_bytes)

    def map_chunk(self, fd: int, size_bytes: int, handle: bytes = b"") -> HostMapping:
        with _errors_named("mapping", size_bytes):
            self._check_import(fd, checked_size(size_bytes), handle)
            return HostMapping(self._calls, fd, size_bytes, writable=True)

    def _check_import(self, fd: int, size_bytes: int, handle: bytes, committed_bytes: int | None = None) -> None:
        if handle:
            raise ProtocolError(f"a memfd came with a handle of {len(handle)} bytes; it has none")
        try:
            seals = self._calls.seals(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):  # the latter of a descriptor opened with O_PATH
                raise
            raise ProtocolError(f"descriptor {fd} names no memfd: it cannot have seals") from error
        if seals & SIZE_SEALS != SIZE_SEALS or seals & WRITE_SEALS:
            raise ProtocolError(
                f"a memfd with seals {seals:#x}: it needs {SIZE_SEALS:#x} (shrink, grow, seal) and none of"
                f" {WRITE_SEALS:#x} (write, future write), or its owner could take memory away from its readers"
            )
        if self._calls.access_mode(fd) != os.O_RDWR:
            raise ProtocolError("a memfd that is not open for reading and writing")
        status = self._calls.status(fd)
        if status.st_size != size_bytes:
            raise ProtocolError(f"a memfd of {status.st_size} bytes where {size_bytes} were announced")
        needed_bytes = size_bytes if committed_bytes is None else committed_bytes
        if not stat.S_ISREG(status.st_mode) or status.st_blocks * _STAT_BLOCK_BYTES < needed_bytes:
            raise ProtocolError(
                f"a memfd with {status.st_blocks * _STAT_BLOCK_BYTES} of {needed_bytes} bytes committed; use"
                " posix_fallocate before sealing"
            )


@contextlib.contextmanager
def _errors_named(operation: str, size_bytes: int) -> Iterator[None]:
    """What the system refuses, as an error that names the operation and the size."""
    try:
        yield
    except OSError as error:
        message = f"{operation} {size_bytes} bytes of host memory failed: {error.strerror or error}"
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise NotEnoughMemory(message, details={"needed_bytes": size_bytes}) from error
        raise InternalError(message, details={"errno": error.errno}) from error
