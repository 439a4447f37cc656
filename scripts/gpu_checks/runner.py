"""Runs checks one after the other, each in a process of its own, and leaves no process behind."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from gpu_checks.outcome import Check, Outcome, not_run, outcome_of
from gpu_checks.peer import child_environment

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE_MS = 5000  # with a killed process that waits inside the driver


def run_all(checks: Iterable[Check], device_uuid: str, total_s: float) -> Iterator[Outcome]:
    """The outcomes in turn. What there is no time left for is `not run`."""
    deadline_s = time.monotonic() + total_s
    for check in checks:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            yield not_run(check, f"the {total_s:g} s for all checks were used up")
        else:
            yield run(dataclasses.replace(check, limit_s=round(min(check.limit_s, left_s), 1)), device_uuid)


def run(check: Check, device_uuid: str) -> Outcome:
    """Whatever the check does, this returns soon after its limit."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        events, log = Path(folder, "events"), Path(folder, "log")
        events.touch()
        with log.open("wb") as output:
            command = [sys.executable, "-m", "gpu_checks.child", str(events), check.function, device_uuid]
            process = subprocess.Popen(
                command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            returncode = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            _end(process)
        text = log.read_text(errors="replace")
        sys.stderr.write(text)
        lines = events.read_text().splitlines()
        return outcome_of(check, lines, returncode, text, time.monotonic() - started_s)


def adopt_orphans() -> None:
    """Processes whose parent has died become children of this one, so that none outlives its check."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_MS / 1000)
    stuck: set[int] = set()
    while pids := _children() - stuck - {process.pid}:
        stuck |= {pid for pid in pids if not _ended(pid)}


def _children() -> set[int]:
    return {
        int(pid) for thread in Path("/proc/self/task").iterdir() for pid in (thread / "children").read_text().split()
    }


def _ended(pid: int) -> bool:
    """Kill a child of this process and reap it. False when it does not end: it waits inside the kernel."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_PATIENCE_MS):
            return False
    finally:
        os.close(pidfd)
    os.waitpid(pid, 0)
    return True
