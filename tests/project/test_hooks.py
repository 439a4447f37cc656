"""What git runs before a commit, for who asked by `make hooks`: the checks of `make lint`, with nothing fetched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checkout import ROOT

CONFIG = ROOT / ".pre-commit-config.yaml"


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def hooks() -> list[dict[str, Any]]:
    return [hook for repo in yaml.safe_load(CONFIG.read_text())["repos"] for hook in repo["hooks"]]


def test_the_config_is_one_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert validate(CONFIG).returncode == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG.read_text().replace("language: system", "langauge: system"))
    assert validate(wrong).returncode != 0


def test_hooks_run_what_is_installed_and_fetch_nothing() -> None:
    assert {repo["repo"] for repo in yaml.safe_load(CONFIG.read_text())["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks()} == {"system"}
    assert {hook["id"]: hook["entry"].split()[0] for hook in hooks()} == {
        "ruff-check": ".venv-dev/bin/ruff",
        "ruff-format": ".venv-dev/bin/ruff",
        "mypy": ".venv-dev/bin/mypy",
    }


@pytest.mark.parametrize("hook", hooks(), ids=lambda hook: hook["id"])
def test_the_entry_of_a_hook_exists_and_takes_its_options(hook: dict[str, Any], tmp_path: Path) -> None:
    """In the environment that runs the tests, which has the tools of .venv-dev."""
    tool, *options = hook["entry"].split()
    program = shutil.which(Path(tool).name, path=str(Path(sys.executable).parent))
    assert program is not None
    (tmp_path / "fine.py").write_text('"""Nothing."""\n')
    done = subprocess.run([program, *options, "fine.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
