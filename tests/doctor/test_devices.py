"""The doctor on NVIDIA devices, as a process of its own on the driver double."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.fakecuda import FakeDevice, FakeDevices, fake_uuid
from support.worker_process import WorkerProcess

COMMAND = [sys.executable, "-c", "from kvpage.cli import main; main()", "doctor"]


def doctor(devices: FakeDevices, run_dir: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | devices.env(**options) | {"KVPAGE_RUN_DIR": str(run_dir)}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, env=environment)


def findings(done: subprocess.CompletedProcess[str], topic: str) -> list[dict[str, str]]:
    return [found for found in json.loads(done.stdout)["findings"] if found["topic"] == topic]


def test_every_device_is_tried(run_dir: Path) -> None:
    with FakeDevices(2) as devices:
        done = doctor(devices, run_dir, "--json")
        assert done.returncode == 0, done.stdout
        for number, uuid in enumerate(devices.uuids):
            about, vmm, ipc = findings(done, f"cuda:{number}")
            assert uuid in about["text"]
            assert {found["state"] for found in (about, vmm, ipc)} == {"ok"}
            assert (vmm["text"][:8], ipc["text"][:8]) == ("cuda_vmm", "cuda_ipc")
        assert sum(map(devices.used_bytes, devices.uuids)) == 0


def test_what_a_device_lacks_is_told_with_what_to_use_instead(run_dir: Path) -> None:
    with FakeDevices([FakeDevice(uuid=fake_uuid(1), vmm=False)]) as devices:
        _, vmm, ipc = findings(doctor(devices, run_dir, "--json"), "cuda:0")
        assert (vmm["state"], ipc["state"]) == ("absent", "ok")
        assert "cuda_ipc" in vmm["advice"]


def test_a_device_that_shares_nothing_is_a_problem(run_dir: Path) -> None:
    with FakeDevices([FakeDevice(uuid=fake_uuid(1), vmm=False, ipc=False)]) as devices:
        done = doctor(devices, run_dir, "--json")
        assert done.returncode == 1
        assert [found["state"] for found in findings(done, "cuda:0")] == ["ok", "problem", "problem"]


def test_a_device_that_cannot_be_used_is_a_problem_and_the_rest_is_told(run_dir: Path) -> None:
    with FakeDevices(1) as devices:
        done = doctor(devices, run_dir, "--json", faults="cuDevicePrimaryCtxRetain:0:46")
        assert done.returncode == 1
        (device,) = findings(done, "cuda:0")
        assert (device["state"], devices.uuids[0] in device["text"]) == ("problem", True)
        assert findings(done, "host memory")[0]["state"] == "ok"


def test_a_person_reads_what_works_and_what_to_do(run_dir: Path) -> None:
    with FakeDevices(1) as devices, WorkerProcess(run_dir) as worker:
        shown = doctor(devices, run_dir, visible="").stdout
        assert "no device can be seen" in shown or "0 devices visible" in shown
        assert str(worker.pid) in shown
