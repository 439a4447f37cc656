"""`make test-vllm` says why it tried nothing, where its environment cannot be made; what it pins is whole."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest

import vllm_check
from kvpage.integrations.vllm.engine_checks import check_version

PINNED = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+_-]+")


def test_every_requirement_is_pinned_and_the_engine_is_of_the_tested_range() -> None:
    lines = vllm_check.REQUIREMENTS.read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not PINNED.fullmatch(line)] == []
    [engine] = [line for line in pins if line.startswith("vllm")]
    check_version(engine.partition("==")[2])


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_another_machine_is_told_so(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert vllm_check.main() == vllm_check.NOT_RUN
    assert "NOT RUN" in capsys.readouterr().err


def test_a_folder_of_others_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(vllm_check, "check_machine", lambda: None)
    monkeypatch.setenv("KVPAGE_VLLM_VENV", str(tmp_path))
    assert vllm_check.main() == vllm_check.NOT_RUN
    assert "KVPAGE_VLLM_VENV" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "kept"


def test_what_failed_is_told_with_the_error_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "import sys; sys.exit('looking\\nERROR: No matching distribution found for torch')"
    monkeypatch.setattr(vllm_check, "check_machine", lambda: vllm_check.run([sys.executable, "-c", failing]))
    monkeypatch.setenv("KVPAGE_VLLM_VENV", str(tmp_path / "new"))
    assert vllm_check.main() == vllm_check.NOT_RUN
    assert "No matching distribution" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
