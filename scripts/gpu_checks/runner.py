"""Runs checks, each in a process of its own, and leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpu_checks.outcome import Check, Outcome, not_run, outcome_of
from gpu_checks.peer import child_environment

NUM_TOGETHER = 4
MARK = "KVPAGE_GPU_CHECK"
"""In the environment of every process of a check: what to kill at its end."""

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE_MS = 5000  # with a killed process that waits inside the driver


def run_all(checks: Sequence[Check], device_uuid: str, total_s: float) -> Iterator[Outcome]:
    """The outcomes, first of those that may run beside each other. What there is no time left for is `not run`."""
    deadline_s = time.monotonic() + total_s

    def run_in_time(check: Check) -> Outcome:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return not_run(check, f"the {total_s:g} s for all checks were used up")
        return run(replace(check, limit_s=round(min(check.limit_s, left_s), 1)), device_uuid)

    with ThreadPoolExecutor(NUM_TOGETHER) as threads:
        yield from threads.map(run_in_time, [check for check in checks if not check.alone])
    yield from map(run_in_time, [check for check in checks if check.alone])


def run(check: Check, device_uuid: str) -> Outcome:
    """Whatever the check does, this returns soon after its limit."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        events, log = Path(folder, "events"), Path(folder, "log")
        events.touch()
        with log.open("wb") as output:
            command = [sys.executable, "-m", "gpu_checks.child", str(events), check.function, device_uuid]
            environment = {**child_environment(), "PYTHONFAULTHANDLER": "1", MARK: folder}
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            returncode = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            _end(process, f"{MARK}={folder}".encode())
        text = log.read_text(errors="replace")
        sys.stderr.write(text)
        lines = events.read_text().splitlines()
        return outcome_of(check, lines, returncode, text, time.monotonic() - started_s)


def adopt_orphans() -> None:
    """Processes whose parent has died become children of this one, so that none outlives its check."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """Kill the process and, one generation after the other, what it has started."""
    if process.poll() is None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_MS / 1000)
    stuck: set[int] = set()
    while pids := {pid for pid in _children() - stuck if mark in _environment_of(pid)}:
        stuck |= {pid for pid in pids if not _ended(pid)}


def _children() -> set[int]:
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def _environment_of(pid: int) -> list[bytes]:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


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
