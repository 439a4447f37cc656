"""Workers and servers that kill themselves at a chosen step of what they do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from support.api_service import ApiService
from support.worker_process import WorkerProcess

PROGRAM = Path(__file__).with_name("dying_program.py")


def dying_command(run_dir: Path, step: int | str, program: str) -> list[str]:
    fifo = _fifo(run_dir)
    if not fifo.exists():
        os.mkfifo(fifo)
    return [sys.executable, str(PROGRAM), str(step), str(fifo), program]


def _fifo(run_dir: Path) -> Path:
    return run_dir / "armed"


def arm(pid: int, run_dir: Path) -> None:
    """Steps count from now on. Returns when the process has seen it."""
    os.kill(pid, signal.SIGUSR1)
    os.close(os.open(_fifo(run_dir), os.O_RDONLY))  # opens when the other side does


class DyingWorker(WorkerProcess):
    """Dies right before its `step`-th call of the system after `arm`, or of any function: `any40`; 0 for never."""

    def __init__(self, run_dir: Path, step: int | str = 0, *arguments: str, device: str = "host") -> None:
        super().__init__(run_dir, *arguments, device=device, command=dying_command(run_dir, step, "worker"))

    def arm(self) -> None:
        arm(self.pid, self.run_directory.path)


class DyingApi(ApiService):
    """Dies as `DyingWorker` does; its workers are somebody else's."""

    def __init__(self, run_dir: Path, step: int = 0, *, device: str = "host", wait_ready: bool = True) -> None:
        command = dying_command(run_dir, step, "serve")
        super().__init__(run_dir, "--external-workers", "--device", device, command=command, wait_ready=wait_ready)

    def arm(self) -> None:
        arm(self.pid, self.run_directory.path)
