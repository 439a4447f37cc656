"""All checks, in the order in which one depends on another."""

from __future__ import annotations

from functools import partial

from kvpage.doctor.devices import check_devices
from kvpage.doctor.findings import Finding, findings_of
from kvpage.doctor.host import check_limits, check_memory, check_namespaces
from kvpage.doctor.service import check_run_directory, check_workers
from kvpage.doctor.software import check_packages, check_python


def examine(run_dir: str | None = None) -> list[Finding]:
    """Look at everything. Takes a few seconds for each device. `run_dir`: None for the default."""
    return list(
        findings_of(
            {
                "python": check_python,
                "packages": check_packages,
                "host memory": check_memory,
                "open files": check_limits,
                "namespaces": check_namespaces,
                "NVIDIA devices": check_devices,
                "run directory": partial(check_run_directory, run_dir),
                "workers": partial(check_workers, run_dir),
            }
        )
    )
