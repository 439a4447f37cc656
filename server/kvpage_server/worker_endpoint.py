"""The worker's place in the run directory: the lock it holds for life and the socket it listens on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvpage.errors import Conflict, PermissionDenied
from kvpage.run_directory import RunDirectory
from kvpage_server.worker_log import log

_BACKLOG = 1024
_LOCK_BYTES = 128
_EPOCH = re.compile(r"[0-9a-f]{32}")


class Endpoint:
    """Exclusive for its device. Closing it removes the socket; the lock file stays and means nothing without a lock,
    but for its second line: the epoch of pools that somebody else keeps, so that a successor waits to be handed them.
    """

    def __init__(self, run_directory: RunDirectory, device: str, listener: socket.socket, lock_fd: int | None) -> None:
        """Use `open` or `inherit`. Owns the lock and the socket."""
        self.path = run_directory.worker_socket(device)
        self.socket = listener
        self._device = device
        self._lock_path = run_directory.worker_lock(device)
        self.predecessor_epoch: str | None = None
        """Epoch of the pools that were kept for whoever takes this place."""
        self._lock_fd = lock_fd
        self._is_ours = False

    @classmethod
    def open(cls, run_directory: RunDirectory, device: str, group: int | None) -> Self:
        """Raises `Conflict` when another worker serves the device."""
        path = run_directory.worker_socket(device)
        run_directory.create(group)
        with contextlib.ExitStack() as undo:
            lock_fd = _locked(run_directory.worker_lock(device), device)
            undo.callback(os.close, lock_fd)
            endpoint = cls(run_directory, device, _listen(path, group), lock_fd)
            undo.pop_all()
        lines = os.pread(lock_fd, _LOCK_BYTES, 0).decode("ascii", "replace").splitlines()
        endpoint.predecessor_epoch = lines[1] if len(lines) > 1 and _EPOCH.fullmatch(lines[1]) else None
        endpoint.own(endpoint.predecessor_epoch)
        return endpoint

    @classmethod
    def inherit(cls, run_directory: RunDirectory, device: str, listening_fd: int) -> Self:
        """Of a worker that still runs, and has the lock until `take_lock`. Not ours to remove before `own`."""
        return cls(run_directory, device, socket.socket(fileno=listening_fd), None)

    def take_lock(self, lock_fd: int | None) -> None:
        """The predecessor's, which this owns from now on; None when it is dead, and whoever comes first has the lock.
        Raises `Conflict` when that was another worker.
        """
        self._lock_fd = _locked(self._lock_path, self._device) if lock_fd is None else lock_fd

    def listen_again(self) -> None:
        """Who connects from now on is told, as the peer, this process instead of the last one that listened."""
        self.socket.listen(_BACKLOG)

    def own(self, kept_epoch: str | None) -> None:
        """From now on this process is the worker of the device."""
        self._is_ours = True
        self._write_lock(kept_epoch)

    def disown(self) -> None:
        """A successor has the socket and the lock: leave both as they are."""
        self._is_ours = False

    def export_socket(self) -> int:
        """Another descriptor, owned by the caller."""
        return os.dup(self.socket.fileno())

    def export_lock(self) -> int:
        """Another descriptor, owned by the caller: the lock stays taken until that is closed as well."""
        assert self._lock_fd is not None
        return os.dup(self._lock_fd)

    def keep_epoch(self, epoch: str) -> None:
        """Somebody else keeps pools of this epoch."""
        self._write_lock(epoch)

    def forget_kept_epoch(self) -> None:
        self._write_lock(None)

    def close(self, close_socket: Callable[[socket.socket], None] = socket.socket.close) -> None:
        """May be called twice. Closing the socket can take long: it ends those who wait to be accepted, and drops what
        they have sent.
        """
        is_ours, self._is_ours = self._is_ours, False
        if is_ours:
            self.path.unlink(missing_ok=True)  # nobody else's: we still hold the lock
            close_socket(self.socket)
        else:
            self.socket.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _write_lock(self, kept_epoch: str | None) -> None:
        if self._lock_fd is not None:
            # One write of one length, so that whoever reads after our death finds a whole line.
            line = f"{os.getpid():<20}\n{kept_epoch or '-':<32}\n"
            try:
                os.pwrite(self._lock_fd, line.encode(), 0)
            except OSError as error:  # a full disk, say: the lock counts, not what is in the file
                log("lock_file_not_written", level="warning", path=self._lock_path, reason=str(error))


def _locked(path: Path, device: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PermissionDenied(f"the lock {path} is not a regular file; remove it, or choose another --run-dir")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            written = os.pread(fd, _LOCK_BYTES, 0).decode("ascii", "replace").partition("\n")[0].strip()
            pid = ", ".join(map(str, _holders(fd))) or written or "unknown"
            raise Conflict(
                f"a worker (pid {pid}) already serves device {device} in {path.parent}; end it, or use another"
                " --run-dir",
                details={"pid": pid, "device": device},
            ) from error
        undo.pop_all()
        return fd


def _holders(fd: int) -> list[int]:
    """Ids of the processes that have a lock on the file, as far as this user may see them. The file itself names who
    locked it first: that may have ended and left a copy of its descriptor with another.
    """
    wanted = os.fstat(fd)
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(_is_lock(pid, number, wanted) for number in os.listdir(f"/proc/{pid}/fd")):
                found.append(int(pid))
    return sorted(found)


def _is_lock(pid: str, number: str, wanted: os.stat_result) -> bool:
    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
        if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), wanted):
            return "FLOCK" in Path(f"/proc/{pid}/fdinfo/{number}").read_text()  # proc(5): locks of this descriptor
    return False


def _listen(path: Path, group: int | None) -> socket.socket:
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)  # the lock is ours, so whoever bound it is dead
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        mask = os.umask(0o177)  # the process has one thread yet: nobody else creates files now
        try:
            sock.bind(os.fspath(new))
        finally:
            os.umask(mask)
        if group is not None:
            os.chown(new, -1, group)
            new.chmod(0o660)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        new.replace(path)  # so that whoever sees it can connect, and no moment is without a socket
        undo.pop_all()
        return sock
