"""The worker's place in the run directory: the lock it holds for life and the socket it listens on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from kvpage.errors import Conflict
from kvpage.run_directory import RunDirectory

_BACKLOG = 1024


class Endpoint:
    """Exclusive for its device. Closing it removes the socket; the lock file stays and means nothing without a lock."""

    def __init__(self, run_directory: RunDirectory, device: str, group: int | None) -> None:
        """Raises `Conflict` when another worker serves the device."""
        self.path = run_directory.worker_socket(device)
        run_directory.create(group)
        with contextlib.ExitStack() as undo:
            lock_fd = _locked(run_directory.worker_lock(device), device)
            undo.callback(os.close, lock_fd)
            self.socket = _listen(self.path, group)
            undo.pop_all()
        self._lock_fd: int | None = lock_fd

    def close(self) -> None:
        """May be called twice."""
        if self._lock_fd is not None:
            self.socket.close()
            self.path.unlink(missing_ok=True)  # nobody else's: we still hold the lock
            os.close(self._lock_fd)
            self._lock_fd = None


def _locked(path: Path, device: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise Conflict(
                f"a worker (pid {pid}) already serves device {device} in {path.parent}; end it, or use another"
                " --run-dir",
                details={"pid": pid, "device": device},
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        undo.pop_all()
        return fd


def _listen(path: Path, group: int | None) -> socket.socket:
    path.unlink(missing_ok=True)  # the lock is ours, so whoever bound it is dead
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        mask = os.umask(0o177)  # the process has one thread yet: nobody else creates files now
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(mask)
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(0o660)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        undo.pop_all()
        return sock
