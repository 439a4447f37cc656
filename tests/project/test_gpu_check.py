"""scripts/gpu_check.py without a GPU: how checks may end, what the report says, and what the driver double can show."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_checks import catalogue, report
from gpu_checks.machine import no_gpu
from gpu_checks.outcome import MACHINE_TABLE, Outcome, outcome_of
from gpu_checks.runner import run_all
from gpu_checks.trial import Failed, Skip
from support import gpu_samples
from support.checkout import ROOT
from support.fakecuda import MIB, FakeDevices

SCRIPT = ROOT / "scripts" / "gpu_check.py"
SAMPLES = ("--catalogue", "support.gpu_samples")


def run_script(
    *arguments: str, report_path: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(SCRIPT), "--report", str(report_path), *arguments]
    added = {"PYTHONPATH": path, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **added})


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """By check; one line of JSON each."""
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {outcome["check"]: outcome for outcome in told}


# --- how checks may end -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], str, Path]:
    """One run of all samples: the process, the report, and the file with the process that one check left behind."""
    folder = tmp_path_factory.mktemp("samples")
    orphan = folder / "orphan"
    done = run_script(*SAMPLES, report_path=folder / "report.md", environment={"KVPAGE_SAMPLE_ORPHAN": str(orphan)})
    return done, (folder / "report.md").read_text(), orphan


@pytest.mark.parametrize(
    ("check", "status", "reason"),
    [
        ("machine", "pass", ""),
        ("passes", "pass", ""),
        ("skips", "skip", "nothing to try it on"),
        ("fails", "fail", "the values | differ"),
        ("raises", "fail", "KeyError: 'unforeseen'"),
        ("hangs", "fail", "hung: killed after 1.5 s"),
        ("crashes", "fail", "crashed: SIGSEGV"),
        ("crashes_after_passing", "fail", "pass, then crashed: SIGSEGV"),
        ("exits", "fail", "ended with status 3"),
        ("orphans", "pass", ""),
    ],
)
def test_every_way_to_end_is_recorded_as_such_and_costs_only_its_check(
    sample_run: tuple[subprocess.CompletedProcess[str], str, Path], check: str, status: str, reason: str
) -> None:
    outcome = outcomes(sample_run[0])[check]
    assert outcome["status"] == status
    assert outcome["reason"].startswith(reason)
    assert bool(outcome["reason"]) == bool(reason)


def test_what_a_check_told_before_it_failed_is_kept(
    sample_run: tuple[subprocess.CompletedProcess[str], str, Path],
) -> None:
    told = outcomes(sample_run[0])
    assert told["fails"]["seen"] == ["half of it"]
    assert told["passes"]["seen"] == ["the device GPU-sample"]


def test_a_failed_check_is_in_the_exit_status(
    sample_run: tuple[subprocess.CompletedProcess[str], str, Path],
) -> None:
    assert sample_run[0].returncode == 1
    assert "failed: fails, raises, hangs, crashes, crashes_after_passing, exits" in sample_run[0].stderr


def test_no_process_outlives_its_check(sample_run: tuple[subprocess.CompletedProcess[str], str, Path]) -> None:
    assert not Path(f"/proc/{int(sample_run[2].read_text())}").exists()


def test_the_report_has_a_row_for_every_check_and_every_number(
    sample_run: tuple[subprocess.CompletedProcess[str], str, Path],
) -> None:
    text = sample_run[1]
    assert "| GPU | Sample GPU |" in text
    assert "3 passed, 6 failed, 1 skipped, 0 not run" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| It ")]
    assert [row[0].removeprefix("| It ") for row in rows] == [check.name for check in gpu_samples.CHECKS]
    assert "| It fails | **fail** |" in text
    assert "the values \\| differ; half of it" in text
    assert "## Latency\n\n| what | MiB | p50 us |\n| --- | --- | --- |\n| map | 2 | 12,345.5 |\n" in text


def test_checks_for_which_no_time_is_left_are_not_run() -> None:
    late = list(run_all(catalogue.CHECKS, "GPU-sample", total_s=0))
    assert {outcome.status for outcome in late} == {"not run"}
    assert len(late) == len(catalogue.CHECKS)
    text = report.render(sample_machine("Sample GPU"), late)
    assert text.count("| **not run** |") == len(late)


def test_a_check_whose_process_tells_nothing_is_a_failure() -> None:
    outcome = outcome_of(catalogue.CHECKS[0], [], 0, "", 0.0)
    assert (outcome.status, outcome.reason) == ("fail", "ended with status 0")


def test_a_check_that_failed_and_then_hung_says_both() -> None:
    failed = json.dumps({"verdict": "fail", "reason": "wrong bytes"})
    outcome = outcome_of(catalogue.CHECKS[0], [failed], None, "", 0.0)
    assert outcome.reason == "fail: wrong bytes, then hung: killed after 30 s"


# --- machines without a GPU, and with one that does not work ----------------------------------------------------------


def test_without_a_gpu_the_report_says_not_run_and_nothing_failed(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    done = run_script(report_path=path, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("not run: ")
    assert "\nNot run: " in path.read_text()
    assert path.read_text().count(" | not run |") == len(catalogue.CHECKS)
    assert done.stdout == ""


def test_results_of_a_gpu_are_not_replaced_by_not_run(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    text = report.render(sample_machine("Sample GPU"), [])
    path.write_text(text)
    done = run_script(*SAMPLES, report_path=path, environment={"KVPAGE_SAMPLE_GPU": ""})
    assert done.returncode == 0, done.stderr
    assert path.read_text() == text


def test_a_gpu_that_cannot_be_used_is_a_failure_and_every_check_not_run(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    done = run_script(*SAMPLES, report_path=path, environment={"KVPAGE_SAMPLE_GPU": "broken"})
    assert done.returncode == 1
    assert [outcome["status"] for outcome in outcomes(done).values()] == ["fail"]
    assert path.read_text().count("| **not run** |") == 9
    assert "/dev/nvidia0 is there, but the driver cannot be used" in path.read_text()


def test_device_files_without_a_driver_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert isinstance(no_gpu("no driver", tmp_path), Skip)
    (tmp_path / "nvidiactl").touch()
    assert isinstance(no_gpu("no driver", tmp_path), Skip)
    (tmp_path / "nvidia0").touch()
    assert isinstance(no_gpu("no driver", tmp_path), Failed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(no_gpu("no device", tmp_path), Skip)


def test_the_report_in_the_docs_is_from_this_script_and_has_all_checks() -> None:
    text = (ROOT / "docs" / "gpu-report.md").read_text()
    assert text.startswith(report.HEAD)
    missing = [check.name for check in catalogue.CHECKS if f"| {check.title} |" not in text]
    assert missing == [], "run make gpu-check again"


def test_every_check_of_the_catalogue_exists_and_has_a_name_of_its_own() -> None:
    names = [check.name for check in catalogue.CHECKS]
    assert len(set(names)) == len(names)
    for check in (catalogue.MACHINE, *catalogue.CHECKS):
        module, name = check.function.split(":")
        assert callable(getattr(importlib.import_module(module), name)), check


# --- the driver double ------------------------------------------------------------------------------------------------


def sample_machine(gpu: str) -> Outcome:
    tables: Any = {MACHINE_TABLE: [{"what": "GPU", "value": gpu}, {"what": "UUID", "value": "GPU-sample"}]}
    return Outcome(check="machine", title="A machine", status="pass", tables=tables)


def test_results_of_a_driver_double_do_not_get_into_the_docs(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    double, gpu = sample_machine("kvpage driver double: host memory, no GPU"), sample_machine("Sample GPU")
    with pytest.raises(report.NoReport):
        report.write(docs / ".." / "docs" / "gpu-report.md", "text", double, docs)
    assert list(docs.iterdir()) == []
    report.write(docs / "gpu-report.md", "text", gpu, docs)
    report.write(tmp_path / "elsewhere.md", "text", double, docs)


def test_the_double_is_refused_by_the_command_too(tmp_path: Path) -> None:
    before = (ROOT / "docs" / "gpu-report.md").read_text()
    done = run_script(
        *SAMPLES,
        report_path=ROOT / "docs" / "gpu-report.md",
        environment={"KVPAGE_SAMPLE_GPU": "driver double", "KVPAGE_SAMPLE_ORPHAN": str(tmp_path / "orphan")},
    )
    assert done.returncode == 1
    assert "is for results of a GPU" in done.stderr
    assert (ROOT / "docs" / "gpu-report.md").read_text() == before


ON_THE_DOUBLE = (
    *("share-driver", "exporter-killed", "fresh-thread", "no-context"),
    *("cycles", "read-only", "ipc", "ipc-holder", "worker-killed"),
)
"""Checks that need no kernels, and not minutes of copying in host memory; `kvpage serve` among them."""


def test_what_needs_no_kernels_passes_on_the_driver_double(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    with FakeDevices(1, total_bytes=1024 * MIB) as devices:
        done = run_script("--only", *ON_THE_DOUBLE, report_path=path, environment=devices.env(fill="165"))
    told = {check: (outcome["status"], outcome["reason"]) for check, outcome in outcomes(done).items()}
    assert told == dict.fromkeys(("machine", *ON_THE_DOUBLE), ("pass", "")), done.stderr
    text = path.read_text()
    assert "| GPU | kvpage driver double: host memory, no GPU |" in text
    assert text.count("| **not run** |") == len(catalogue.CHECKS) - len(ON_THE_DOUBLE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        ("share-driver", "cuMemImportFromShareableHandle:0:1"),
        ("cycles", "cuMemUnmap:40:999"),
        ("fresh-thread", "cuMemMap:1:201"),
        ("ipc", "cuIpcOpenMemHandle:0:205"),
    ],
)
def test_a_driver_that_refuses_fails_the_check(tmp_path: Path, check: str, fault: str) -> None:
    """`machine` is asked first and tries each kind itself; what it says of them does not stop the others."""
    with FakeDevices(1, total_bytes=256 * MIB) as devices:
        done = run_script("--only", check, report_path=tmp_path / "report.md", environment=devices.env(faults=fault))
    assert (done.returncode, outcomes(done)[check]["status"]) == (1, "fail"), done.stderr
