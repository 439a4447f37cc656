"""The sockets the server listens on: its Unix socket in the run directory, and a TCP port when asked for."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from kvpage.errors import Conflict, PermissionDenied
from kvpage_server.settings import Settings

_BACKLOG = 2048
_PROBE_S = 2.0
# A peer that vanished, with its machine or its network, is noticed within two minutes, whether or not something is on
# its way to it. Connections have what their listener has.
_VANISHED_AFTER_S, _PROBES = 120, 4
_TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, (_VANISHED_AFTER_S - 60) // _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_AFTER_S * 1000),
)
_SO_PASSRIGHTS = 83  # asm-generic/socket.h, Linux 6.16; no constant in Python


class Listeners:
    """Exclusive for the run directory. `close()` removes the socket; the lock file stays and means nothing unlocked."""

    def __init__(self, settings: Settings) -> None:
        """Call before any thread is started: the umask is the process's. Raises `Conflict`, `PermissionDenied`."""
        settings.run_directory.create(settings.group_gid)
        self._path = settings.run_directory.api_socket
        with contextlib.ExitStack() as undo:
            self._lock_fd: int | None = _lock(self._path.with_suffix(".lock"))
            undo.callback(os.close, self._lock_fd)
            _remove_stale(self._path)
            unix = undo.enter_context(_unix_socket(self._path, settings.group_gid))
            undo.callback(self._path.unlink, missing_ok=True)
            self.sockets = [unix]
            self.addresses = [f"unix:{self._path}"]
            if settings.port is not None:
                tcp = undo.enter_context(_tcp_socket(settings.host, settings.port))
                self.sockets.append(tcp)
                scheme = "http" if settings.tls_files is None else "https"
                self.addresses.append(f"{scheme}://{_host_and_port(tcp)}")
            undo.pop_all()

    def close(self) -> None:
        """May be called twice."""
        if self._lock_fd is None:
            return
        for sock in self.sockets:
            sock.close()
        self._path.unlink(missing_ok=True)  # nobody else's: we still hold the lock
        os.close(self._lock_fd)
        self._lock_fd = None


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise _in_use(path.parent) from error
    return fd


def _remove_stale(path: Path) -> None:
    """Unlink a socket nobody answers at. Raises `Conflict` when something does, lock or no lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:  # a full backlog, no permission: somebody is there
            raise _in_use(path.parent) from error
    raise _in_use(path.parent)


def _in_use(folder: Path) -> Conflict:
    return Conflict(f"a kvpage server runs in {folder} already; end it, or use another --run-dir")


def _unix_socket(path: Path, group_gid: int | None) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        mask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(mask)
        if group_gid is not None:
            os.chown(path, -1, group_gid)
            path.chmod(0o660)
        # Descriptors have no business in HTTP. Without this the kernel closes them in the event loop's thread, which a
        # TCP socket that lingers stops for as long as its sender likes; older kernels know no way to refuse them.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        sock.listen(_BACKLOG)
        undo.pop_all()
        return sock


def _tcp_socket(host: str, port: int) -> socket.socket:
    try:
        sock = socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    except OSError as error:
        kind = PermissionDenied if error.errno in (errno.EACCES, errno.EPERM) else Conflict
        raise kind(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port or --host"
        ) from error
    for level, option, value in _TCP_OPTIONS:
        sock.setsockopt(level, option, value)
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _host_and_port(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
