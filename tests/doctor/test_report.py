"""The doctor on this machine, and each of its checks where something is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.doctor.findings import Finding, findings_of
from kvpage.doctor.host import check_limits, check_memory
from kvpage.doctor.report import examine
from kvpage.doctor.service import check_run_directory, check_workers
from kvpage.errors import DeviceUnavailable
from support.memory_contract import run_program
from support.worker_process import WorkerProcess

needs_no_gpu = pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")


def one(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_the_report_of_this_machine_has_every_topic(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_RUN_DIR", str(run_dir))
    found = {finding.topic: finding for finding in examine()}
    assert {"python", "torch", "host memory", "open files", "namespaces", "NVIDIA driver", "run directory"} <= set(
        found
    )
    assert found["python"].state == found["torch"].state == found["host memory"].state == "ok"
    assert found["workers"].state == "absent"


def test_host_memory_really_is_shared(no_leaks: None) -> None:
    assert one(check_memory()).state == "ok"


@pytest.mark.parametrize(("limits", "state"), [((256, 1024), "problem"), ((1024, 4096), "ok"), ((1024, -1), "ok")])
def test_a_low_limit_of_open_files_is_a_problem(limits: tuple[int, int], state: str) -> None:
    assert one(check_limits(limits)).state == state


NO_DRIVER_PROGRAM = """
import json, sys
from dataclasses import asdict
from kvpage.doctor.devices import check_devices
from pathlib import Path
(finding,) = check_devices(Path(sys.argv[1]))
print(json.dumps(asdict(finding)))
"""


def without_a_driver(device_files: Path) -> dict[str, str]:
    """What a process of its own finds: this one may have the driver double, which cannot be unloaded."""
    found: dict[str, str] = json.loads(run_program(NO_DRIVER_PROGRAM, str(device_files)))
    return found


@needs_no_gpu
def test_without_a_driver_there_is_nothing_to_do(tmp_path: Path) -> None:
    finding = without_a_driver(tmp_path)
    assert finding["state"] == "absent"
    assert "host memory" in finding["text"]


@needs_no_gpu
def test_device_files_without_a_driver_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    finding = without_a_driver(tmp_path)
    assert finding["state"] == "problem"
    assert "nvidia0" in finding["text"]
    assert "container" in finding["advice"]


def test_a_run_directory_is_looked_at(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_RUN_DIR", str(run_dir))
    assert one(check_run_directory()).state == "ok"
    run_dir.chmod(0o777)
    assert one(check_run_directory()).state == "problem"
    monkeypatch.setenv("KVPAGE_RUN_DIR", str(run_dir / "not-there"))
    assert one(check_run_directory()).state == "absent"


def test_workers_are_asked(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_RUN_DIR", str(run_dir))
    with WorkerProcess(run_dir) as worker:
        finding = one(check_workers())
        assert finding.state == "ok"
        assert str(worker.pid) in finding.text
        worker.kill()
        assert one(check_workers()).state == "problem"


def test_a_check_that_fails_is_a_finding_and_the_others_run() -> None:
    def refused() -> Iterator[Finding]:
        raise DeviceUnavailable("no device")
        yield

    def broken() -> Iterator[Finding]:
        yield Finding("broken", "ok", "half of it")
        raise ZeroDivisionError

    def fine() -> Iterator[Finding]:
        yield Finding("fine", "ok", "all well")

    found = list(findings_of({"refused": refused, "broken": broken, "fine": fine}))
    assert [(finding.topic, finding.state) for finding in found] == [
        ("refused", "problem"), ("broken", "ok"), ("broken", "problem"), ("fine", "ok"),
    ]  # fmt: skip
    assert "ZeroDivisionError" in found[2].text
