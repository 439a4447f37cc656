"""Device workers as processes: starting one by exec, seeing it end, ending it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from kvpage.wire.credentials import peer_of, pidfd_of
from kvpage_server.ordinary_file import open_ordinary
from kvpage_server.settings import Settings
from kvpage_server.worker_log import open_log

LOG_TAIL_BYTES = 2000

# Marks a worker as started by a server, so that the server's successor knows it may end it too.
SERVER_MARK = "KVPAGE_WORKER_OF_SERVER"


class WatchedProcess:
    """A process seen through its pidfd, which names it and nothing else, however process ids are used again."""

    def __init__(self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None = None) -> None:
        """Takes over `pidfd`, and the duty to reap `child`."""
        self.pid = pid
        self.ended = asyncio.Event()
        self._pidfd: int | None = pidfd
        self._child = child
        self._ready_fd: int | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._on_end)

    def __repr__(self) -> str:
        return f"<WatchedProcess {self.pid} {'ended' if self.ended.is_set() else 'running'}>"

    @classmethod
    def start(cls, settings: Settings, device: str) -> Self:
        """Start a worker in a session of its own. It logs to a file: a pipe of ours would end it when we end."""
        ready_fd, worker_fd = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, ready_fd)
            try:
                child = _spawn(settings, device, worker_fd)
            finally:
                os.close(worker_fd)
            process = cls(child.pid, os.pidfd_open(child.pid), child)
            undo.pop_all()
        process._ready_fd = ready_fd
        return process

    @classmethod
    def behind(cls, connection_fd: int) -> Self | None:
        """The process at the other end of a Unix socket; None when the kernel cannot name it (see `pidfd_of`)."""
        with socket.socket(fileno=os.dup(connection_fd)) as sock:
            pid, pidfd = peer_of(sock).pid, pidfd_of(connection_fd)
        return None if pidfd is None else cls(pid, pidfd)

    @property
    def was_started_by_a_server(self) -> bool:
        """Whether this server or one before it started the process."""
        if self._child is not None:
            return True
        try:
            environment = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{SERVER_MARK}=1".encode() in environment.split(b"\0")

    @property
    def exit_status(self) -> int | None:
        """Of a child that has ended; negative for a signal."""
        return None if self._child is None else self._child.poll()

    async def wait_ready(self) -> str | None:
        """After `start`: wait until clients can connect, and return None. When the process has ended instead: why, or
        "" when it could not say.
        """
        assert self._ready_fd is not None  # only for what `start` made, and only once
        fd, self._ready_fd = self._ready_fd, None
        readable = asyncio.Event()
        self._loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
            told = os.read(fd, 4096).decode("utf-8", "replace").strip()
        finally:
            self._loop.remove_reader(fd)
            os.close(fd)
        if told == "ready":
            return None
        await self.ended.wait()
        return told

    async def end(self, *, grace_s: float) -> None:
        """Ask it to end, and kill it when it has not ended after `grace_s`."""
        self._send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended.wait(), grace_s)
        except TimeoutError:
            self._send(signal.SIGKILL)
            await self.ended.wait()

    def close(self) -> None:
        """Stop watching; the process goes on. May be called twice."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None

    def _send(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal_number)

    def _on_end(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        if self._child is not None:
            self._child.wait()  # it has ended, so this reaps and does not wait
        self.ended.set()


def last_logged_line(settings: Settings, device: str) -> str:
    """What a worker wrote last, which after a failed start is the reason."""
    return last_line_of(settings.run_directory.worker_log(device))


def last_line_of(path: Path) -> str:
    try:
        with open_ordinary(path) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "(none)"


def _spawn(settings: Settings, device: str, ready_fd: int) -> subprocess.Popen[bytes]:
    log_fd = open_log(settings.run_directory.worker_log(device))
    try:
        return subprocess.Popen(
            [*_command(settings, device), "--ready-fd", str(ready_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(ready_fd,),
            start_new_session=True,
            env={**os.environ, SERVER_MARK: "1"},
        )
    finally:
        os.close(log_fd)


def _command(settings: Settings, device: str) -> list[str]:
    command = [sys.executable, "-m", "kvpage_server", "worker", "--device", device]
    command += ["--run-dir", str(settings.run_directory.path), "--adopt-within", str(settings.adopt_within_s)]
    if settings.memory is not None:
        command += ["--memory", settings.memory]
    if settings.group is not None:
        command += ["--group", settings.group]
    return command
