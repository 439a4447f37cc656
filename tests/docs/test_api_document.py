"""docs/api.md has every operation, with examples that run in the order of the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpage_server.roles import RULES
from support.api_service import ApiService
from support.checkout import ROOT

PAGE = ROOT / "docs" / "api.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(language: str) -> str:
    return "\n".join(text for kind, text in FENCE.findall(PAGE.read_text()) if kind == language)


def run(command: list[str], script: str, folder: Path, run_dir: Path) -> str:
    environment = {**os.environ, "KVPAGE_RUN_DIR": str(run_dir)}
    done = subprocess.run(
        command, input=script, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_shell_and_then_the_python_examples_run(no_leaks: None, run_dir: Path, tmp_path: Path) -> None:
    with ApiService(run_dir):
        shown = run(["bash", "-euo", "pipefail"], code("sh"), tmp_path, run_dir)
        assert re.findall(r"(?:^|\})(\d{3})$", shown, re.MULTILINE) == ["304", "409", "204"]
        assert re.findall(r'"code":"([a-z-]+)"', shown) == ["spec-invalid"]
        assert json.loads((tmp_path / "created.json").read_text())["state"] == "ready"
        assert '"status":"ready"' in shown
        printed = run([sys.executable, "-"], code("python"), tmp_path, run_dir)
        assert "('worker:host', True)" in printed
        assert "draft (" in printed


def test_every_operation_has_a_section_with_an_example() -> None:
    described = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
    operations = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert sections(PAGE.read_text()).keys() == operations
    for operation, text in sections(PAGE.read_text()).items():
        assert "```sh\napi " in text or "```sh\nprintf" in text, operation


def test_the_list_of_operations_has_each_once() -> None:
    listed = re.findall(r"^\| \[`(\w+ \S+)`\]", PAGE.read_text(), re.MULTILINE)
    assert listed == list(sections(PAGE.read_text()))


def test_the_list_of_operations_names_the_role_of_each() -> None:
    paths = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
    rules = {
        f"{method.upper()} {path}": RULES[described["operationId"]]
        for path, methods in paths.items()
        for method, described in methods.items()
    }
    listed = dict(re.findall(r"^\| \[`(\w+ \S+)`\]\S* \| (\S+) \|", PAGE.read_text(), re.MULTILINE))
    assert listed == {name: "–" if rule.is_open else rule.role.label for name, rule in rules.items()}


def sections(page: str) -> dict[str, str]:
    """Text by operation."""
    parts = re.split(r"^### `(\w+ \S+)`$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_search_for_sections_finds_them() -> None:
    assert sections("# a\n\n### `GET /a`\nx\n### `PUT /b`\ny\n") == {"GET /a": "\nx\n", "PUT /b": "\ny\n"}
