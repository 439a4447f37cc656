"""Reaching a worker: a connected socket whose other end may be trusted, or why there is none."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import time
from pathlib import Path

from kvpage.errors import InternalError, PermissionDenied, WorkerLost
from kvpage.wire.credentials import peer_of

_PAUSE_S = 0.002  # nobody tells when a place in the listener's queue is free


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Non-blocking. `timeout_s`: how long the listener's queue may be full.

    Raises `WorkerLost` when nobody listens or the queue stays full, `PermissionDenied` when this user may not connect
    or the socket belongs to a stranger, `InternalError` when this process has no descriptor left.
    """
    with contextlib.ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        except OSError as error:
            raise system_error(f"connecting to {path}", error) from error
        sock.setblocking(False)
        _connect(sock, path, timeout_s)
        _check_worker(sock, path)
        undo.pop_all()
        return sock


def _connect(sock: socket.socket, path: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return sock.connect(os.fspath(path))
        except BlockingIOError as error:  # unix(7): the queue of the listener is full
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise WorkerLost(
                    f"the worker at {path} took no connection within {timeout_s:g} s: its queue is full; is it stopped,"
                    " or do very many processes connect at once?"
                ) from error
            time.sleep(min(left_s, _PAUSE_S))
        except PermissionError as error:
            raise PermissionDenied(f"uid {os.geteuid()} may not connect to the worker at {path}") from error
        except OSError as error:
            raise WorkerLost(
                f"no worker listens at {path} ({error.strerror or error}); start one with `kvpage worker` or"
                " `kvpage serve`, or name its folder with --run-dir or KVPAGE_RUN_DIR"
            ) from error


def _check_worker(sock: socket.socket, path: Path) -> None:
    """A worker runs as this user, as root, or as the owner of the folder its socket is in."""
    uid = peer_of(sock).uid
    trusted = {0, os.geteuid(), path.parent.stat().st_uid}
    if uid not in trusted:
        raise PermissionDenied(
            f"the process listening at {path} runs as uid {uid}; a worker there must run as one of {sorted(trusted)}"
        )


def system_error(doing: str, error: OSError) -> InternalError:
    """What the system refuses here, with the limit to raise when this process or machine has no descriptor left."""
    if error.errno == errno.EMFILE:
        limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        return InternalError(
            f"{doing} needs another file descriptor, and this process has all {limit} that it may open; close some, or"
            f" raise its limit (`ulimit -n`, `LimitNOFILE=`), at most to {hard_limit}",
            details={"limit_files": limit, "hard_limit_files": hard_limit},
        )
    if error.errno == errno.ENFILE:
        return InternalError(f"{doing} needs another file, and this machine may open no more; raise fs.file-max")
    return InternalError(f"{doing} failed: {error.strerror or error}", details={"errno": error.errno})
