"""All checks, in the order in which one depends on another."""

from __future__ import annotations

from kvpage.doctor.devices import check_devices
from kvpage.doctor.findings import Finding, findings_of
from kvpage.doctor.host import check_limits, check_memory, check_namespaces
from kvpage.doctor.service import check_run_directory, check_workers
from kvpage.doctor.software import check_packages, check_python


def examine() -> list[Finding]:
    """Look at everything. Takes a few seconds for each device."""
    return list(
        findings_of(
            {
                "python": check_python,
                "packages": check_packages,
                "host memory": check_memory,
                "open files": check_limits,
                "namespaces": check_namespaces,
                "NVIDIA devices": check_devices,
                "run directory": check_run_directory,
                "workers": check_workers,
            }
        )
    )
