"""Who is at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13; no constant in Python 3.11
_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5; no constant in Python 3.11
_GROUPS_BYTES = 1024  # the most that Python's getsockopt takes: 256 groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Ids as seen from this process's namespaces, taken when the peer connected or began to listen."""

    pid: int
    """0 across PID namespaces."""
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid, gid=gid)


def supplementary_groups(sock: socket.socket) -> frozenset[int]:
    """The peer's supplementary group ids; empty where the kernel cannot tell, or has more than 256 to tell."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOPROTOOPT, errno.ENODATA, errno.ERANGE):
            return frozenset()
        raise
    return frozenset(gid for (gid,) in struct.iter_unpack("I", data))


def pidfd_of(connection_fd: int) -> int | None:
    """A pidfd, owned by the caller, of the process at the other end: straight from the socket where Linux has that
    (6.5), else by the peer's id, which is 0 across PID namespaces; None when the kernel cannot name it. Raises OSError
    where this process may open no more files.
    """
    with socket.socket(fileno=os.dup(connection_fd)) as sock:
        for ask in (_pidfd_by_socket, _pidfd_by_number):
            try:
                return ask(sock)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
    return None


def _pidfd_by_socket(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)


def _pidfd_by_number(sock: socket.socket) -> int:
    return os.pidfd_open(peer_of(sock).pid)
