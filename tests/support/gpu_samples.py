"""Checks for a run of scripts/gpu_check.py without a GPU: a made-up machine, and one check for each way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from gpu_checks.outcome import MACHINE_TABLE, Check
from gpu_checks.trial import Skip, Trial, expect

GPU_NAME = os.environ.get("KVPAGE_SAMPLE_GPU", "Sample GPU")
ORPHAN_FILE = "KVPAGE_SAMPLE_ORPHAN"
"""Names the variable with the file into which `orphans` writes the process it leaves behind."""


def machine(trial: Trial) -> None:
    if not GPU_NAME:
        raise Skip("there is no sample GPU")
    if GPU_NAME == "broken":
        expect(False, "/dev/nvidia0 is there, but the driver cannot be used")
    trial.row(MACHINE_TABLE, what="GPU", value=GPU_NAME)
    trial.row(MACHINE_TABLE, what="UUID", value="GPU-sample")


def passes(trial: Trial) -> None:
    trial.saw(f"the device {trial.device_uuid}")
    trial.row("Latency", what="map", MiB=2, p50_us=12345.5)


def skips(trial: Trial) -> None:
    raise Skip("nothing to try it on")


def fails(trial: Trial) -> None:
    trial.saw("half of it")
    expect(1 + 1 == 3, "the values | differ")


def raises(trial: Trial) -> None:
    raise KeyError("unforeseen")


def hangs(trial: Trial) -> None:
    trial.saw("before it hung")
    threading.Event().wait()


def crashes(trial: Trial) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crashes_after_passing(trial: Trial) -> None:
    trial.verdict("pass")
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(trial: Trial) -> None:
    sys.exit(3)


def orphans(trial: Trial) -> None:
    """Leaves a process in a session of its own that would never end."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True
    )
    Path(os.environ[ORPHAN_FILE]).write_text(str(child.pid))


MACHINE = Check(name="machine", title="A sample machine", function=f"{__name__}:machine")
CHECKS = tuple(
    Check(
        name=function.__name__,
        title=f"It {function.__name__}",
        function=f"{__name__}:{function.__name__}",
        limit_s=1.5 if function is hangs else 60,
        alone=function in (fails, orphans),
    )
    for function in (passes, skips, fails, raises, hangs, crashes, crashes_after_passing, exits, orphans)
)
