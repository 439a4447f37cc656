"""A real device worker in a process of its own, started by exec as a person would start it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvpage.run_directory import RunDirectory
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import ListPools, Role
from support.eventually import TIMEOUT_S, until

READY_TIMEOUT_MS = 60_000
IS_MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ
"""Under `make coverage` processes are asked to end before they are killed: what was killed cannot say what it ran."""
WORKER_COMMAND = [sys.executable, "-m", "kvpage_server", "worker"]


class WorkerProcess:
    """Ready for clients once it is made. `with` ends it, whatever the test did to it."""

    def __init__(
        self, run_dir: Path, *arguments: str, device: str = "host", command: Sequence[str] = WORKER_COMMAND
    ) -> None:
        """Raises AssertionError with the worker's log when it ends before it is ready."""
        self.run_directory = RunDirectory(run_dir)
        self.socket_path = self.run_directory.worker_socket(device)
        self._log = run_dir / "worker.log"
        ready_out, ready_in = os.pipe()
        try:
            self._child = self._start(run_dir, [*command, "--device", device, *arguments], ready_in)
        finally:
            os.close(ready_in)
        with open(ready_out, "rb") as ready:
            assert readable(ready.fileno()), "the worker neither became ready nor ended"
            line = ready.readline()
        if line != b"ready\n":
            self.wait()
            raise AssertionError(f"the worker ended with {self._child.returncode}: {self.log()}")

    def _start(self, run_dir: Path, command: Sequence[str], ready_in: int) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--run-dir", str(run_dir), "--ready-fd", str(ready_in)],
                pass_fds=[ready_in],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def client(self, *, role: Role = "client", client_name: str = "test") -> WorkerClient:
        return WorkerClient(self.socket_path, role=role, client_name=client_name, timeout_s=60)

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def settles_at(self, num_fds: int, client: WorkerClient, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether the worker comes to have `num_fds` descriptors; each request of `client` gives it another turn.

        What strangers sent is closed by a thread of the worker, which on a busy machine may wait for its turn too.
        """

        def settled() -> bool:
            client.request(ListPools())
            return self.num_fds() == num_fds

        with contextlib.suppress(AssertionError):
            return until(settled, timeout_s)
        return False

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self._child.kill()
        self.wait()

    def terminate(self) -> int:
        """Ask it to end; its exit status."""
        self._child.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self._child.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            if IS_MEASURED:
                self._child.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(5)
            self.kill()


def readable(fd: int, timeout_ms: int = READY_TIMEOUT_MS) -> bool:
    """Wait until `fd` has data or has ended; False when nothing happens for very long."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def run_refused_worker(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The outcome of a worker that must not start."""
    command = [*WORKER_COMMAND, "--run-dir", str(run_dir), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
