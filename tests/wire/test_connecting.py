"""Reaching a worker whose queue is full, and with no descriptor left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpage.errors import InternalError, WorkerLost
from kvpage.wire.connecting import connect, system_error

pytestmark = pytest.mark.usefixtures("no_leaks")


@contextmanager
def full_queue(path: Path) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """A listener that has accepted none of those who connected, and has no place for another."""
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(str(path))
                waiting.append(sock)
        yield listener, waiting


def test_a_queue_that_stays_full_is_told_apart_from_nobody_listening(run_dir: Path) -> None:
    with full_queue(run_dir / "sock"), pytest.raises(WorkerLost, match="queue is full"):
        connect(run_dir / "sock", 0)


def test_a_place_that_becomes_free_is_taken(run_dir: Path) -> None:
    path = run_dir / "sock"
    with full_queue(path) as (listener, waiting), ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(connect, path, 600)
        for _ in waiting:
            listener.accept()[0].close()
        connecting.result(60).close()
        listener.accept()[0].close()


@contextmanager
def no_descriptor_left() -> Iterator[int]:
    """The limit of this process, which has reached it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield limit
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_a_descriptor_the_error_names_the_limit_and_what_to_change(run_dir: Path) -> None:
    with no_descriptor_left() as limit, pytest.raises(InternalError, match=rf"all {limit} .*ulimit -n") as raised:
        connect(run_dir / "sock", 0)
    assert raised.value.details["limit_files"] == limit


def test_a_machine_without_descriptors_is_told_apart() -> None:
    assert "fs.file-max" in system_error("x", OSError(errno.ENFILE, "")).message
    assert system_error("x", OSError(errno.EIO, "no luck")).message == "x failed: no luck"
