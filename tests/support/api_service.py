"""A real `kvpage serve` in a process of its own, with the workers it starts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvpage.client.http import Client
from kvpage.run_directory import RunDirectory
from support.worker_process import IS_MEASURED, readable

COMMAND = [sys.executable, "-m", "kvpage_server", "serve"]


class ApiService:
    """Every worker answers once it is made. `with` ends it and whatever worker is left in its run directory."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        wait_ready: bool = True,
        command: Sequence[str] = COMMAND,
        log: Path | None = None,
    ) -> None:
        """`log`: beside the run directory if not said. Raises AssertionError with it when it ends unready."""
        self.run_directory = RunDirectory(run_dir)
        self._command = command
        self._log = log or run_dir.with_name(run_dir.name + ".log")
        ready_out, ready_in = os.pipe()
        try:
            self._child = self._start(arguments, ready_in)
        finally:
            os.close(ready_in)
        with open(ready_out, "rb") as ready:
            if wait_ready:
                assert readable(ready.fileno()), "the server neither became ready nor ended"
                line = ready.readline()
        if wait_ready and line != b"ready\n":
            raise AssertionError(f"the server ended with {self.wait()}: {self.log()}")

    def _start(self, arguments: tuple[str, ...], ready_in: int) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._command, "--run-dir", str(self.run_directory.path), "--ready-fd", str(ready_in), *arguments],
                pass_fds=[ready_in],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def url(self) -> str:
        """Of the TCP port."""
        found = re.findall(r'"address": "(https?://[^"]+)"', self.log())
        assert found, "the server was not started with --port"
        return str(found[-1])

    def client(self, url: str | None = None, **options: Any) -> Client:
        return Client(url, run_dir=str(self.run_directory.path), timeout_s=60, **options)

    def worker_pid(self) -> int:
        with self.client() as client:
            [device] = client.devices()
        assert device.worker_pid is not None, device
        return device.worker_pid

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self._child.kill()
        self.wait()

    def ask_to_end(self, signal_: signal.Signals = signal.SIGTERM) -> None:
        self._child.send_signal(signal_)

    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def terminate(self) -> int:
        """Ask it to end; its exit status."""
        self.ask_to_end()
        return self.wait()

    def wait(self) -> int:
        return self._child.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            if IS_MEASURED:
                self.ask_to_end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(5)
            self.kill()
        for pid in worker_pids(self.run_directory):
            kill_process(pid)
        self._log.unlink(missing_ok=True)


def worker_pids(run_directory: RunDirectory) -> list[int]:
    """Worker processes of a run directory, those too that have only been started and do not listen yet."""
    wanted = {b"worker", os.fsencode(run_directory.path)}
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if wanted <= set(arguments):
                pids.append(int(process.name))
    return pids


def children_of(pid: int) -> list[int]:
    """Those too that have ended and wait to be reaped."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def kill_process(pid: int) -> None:
    """Kill a process that need not be a child of ours, and wait until it is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert readable(pidfd), f"process {pid} does not end"
    finally:
        os.close(pidfd)


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is not just waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def run_refused(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The outcome of a server that must not start."""
    command = [*COMMAND, "--run-dir", str(run_dir), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
