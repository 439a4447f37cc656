"""Set-up does what is missing and no more, and says plainly why it cannot go on."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import sys
from pathlib import Path

import pytest

from bootstrap import bring_up_to_date
from environment import BootstrapError, Environment, own_variables
from stamp import Stamp, sources_digest
from support.checkout import ROOT

TORCH_ALREADY_THERE = "2.13.0+cpu"


class RecordingEnvironment(Environment):
    """Notes what it is asked for instead of doing it."""

    def __init__(self, folder: Path, *, usable: bool = True) -> None:
        super().__init__(folder)
        self.steps: list[str] = []
        self._usable = usable

    def usable(self) -> bool:
        return self._usable

    def create(self, *, share_system_packages: bool) -> None:
        self.steps.append("create")

    def build_wheel(self) -> Path:
        self.steps.append("build wheel")
        return self.folder / "kvpage.whl"

    def pip_install(self, *arguments: str, quiet: bool = True) -> None:
        self.steps.append("pip " + " ".join(arguments))

    def compile_modules(self) -> None:
        self.steps.append("compile")

    def importable_torch(self) -> str | None:
        return TORCH_ALREADY_THERE


def steps_of(folder: Path, extras: tuple[str, ...] = ("server",), *, usable: bool = True) -> list[str]:
    environment = RecordingEnvironment(folder, usable=usable)
    bring_up_to_date(environment, extras, editable=False)
    return [step.replace(str(folder), "VENV") for step in environment.steps]


REINSTALL = ["build wheel", "pip --no-deps --force-reinstall VENV/kvpage.whl"]


@pytest.mark.parametrize("compiling", [[], ["compile"]])
def test_a_new_environment_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling: list[str]
) -> None:
    """Compiled beforehand is only what no import would compile for good."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1" if compiling else "")
    steps = steps_of(tmp_path, usable=False)
    assert steps[0] == "create"
    assert steps[1].startswith("pip hatchling")
    assert steps[2:] == [*REINSTALL, "pip --no-compile VENV/kvpage.whl[server]", *compiling]


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    steps_of(tmp_path, ("dev", "server"))
    assert steps_of(tmp_path, ("server",)) == []


def test_changed_sources_replace_the_wheel_only_and_keep_the_extras(tmp_path: Path) -> None:
    steps_of(tmp_path, ("dev", "server"))
    rewrite(tmp_path, sources="older")
    assert steps_of(tmp_path, ("server",)) == REINSTALL
    assert steps_of(tmp_path, ("dev", "server")) == []


@pytest.mark.parametrize("stamp", ["", "[]", '{"requirements": "x"}'])
def test_an_unreadable_stamp_means_everything(tmp_path: Path, stamp: str) -> None:
    steps_of(tmp_path)
    (tmp_path / "kvpage-bootstrap.json").write_text(stamp)
    assert len(steps_of(tmp_path)) >= 4


def test_changed_requirements_or_a_new_extra_mean_everything(tmp_path: Path) -> None:
    steps_of(tmp_path)
    assert len(steps_of(tmp_path, ("dev", "server"))) >= 4
    rewrite(tmp_path, requirements="older")
    assert len(steps_of(tmp_path)) >= 4


def rewrite(folder: Path, **fields: str) -> None:
    """Change fields of the stamp that a run left."""
    path = folder / "kvpage-bootstrap.json"
    found = Stamp.read(path)
    assert found is not None
    values = {"requirements": found.requirements, "sources": found.sources, **fields}
    Stamp(requirements=values["requirements"], sources=values["sources"], extras=found.extras).write(path)


def test_an_interrupted_install_leaves_no_stamp(tmp_path: Path) -> None:
    class Failing(RecordingEnvironment):
        def pip_install(self, *arguments: str, quiet: bool = True) -> None:
            raise BootstrapError("no network")

    steps_of(tmp_path)
    rewrite(tmp_path, sources="older")
    with pytest.raises(BootstrapError):
        bring_up_to_date(Failing(tmp_path), ("server",), editable=False)
    assert not (tmp_path / "kvpage-bootstrap.json").exists()


def test_the_digest_of_the_sources_sees_content_names_and_new_files(tmp_path: Path) -> None:
    module = tmp_path / "kvpage" / "a.py"
    module.parent.mkdir()
    module.write_text("1")
    digests = [sources_digest(tmp_path)]
    module.write_text("2")
    digests.append(sources_digest(tmp_path))
    module.rename(module.with_name("b.py"))
    digests.append(sources_digest(tmp_path))
    (tmp_path / "kvpage" / "c.py").write_text("")
    digests.append(sources_digest(tmp_path))
    assert len(set(digests)) == 4
    (tmp_path / "kvpage" / "__pycache__").mkdir()
    (tmp_path / "kvpage" / "__pycache__" / "c.pyc").write_text("")
    assert sources_digest(tmp_path) == digests[-1]


def test_a_python_without_ensurepip_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(BootstrapError, match="python3-venv"):
        Environment(tmp_path / "venv").create(share_system_packages=False)


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(BootstrapError, match="KVPAGE_VENV"):
        Environment(tmp_path).create(share_system_packages=False)
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("share", [False, True])
def test_a_new_environment_is_usable_and_sees_the_systems_packages_when_asked(tmp_path: Path, share: bool) -> None:
    environment = Environment(tmp_path / "venv")
    assert not environment.usable()
    environment.create(share_system_packages=share)
    assert environment.usable()
    settings = (tmp_path / "venv" / "pyvenv.cfg").read_text()
    assert f"include-system-site-packages = {str(share).lower()}" in settings
    [packages] = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (packages / "good.py").write_text("1")
    (packages / "of_python_2.py").write_text("print 1")
    environment.compile_modules()
    assert [path.name.split(".")[0] for path in (packages / "__pycache__").iterdir() if "good" in path.name] == ["good"]
    (environment.python.parent / "python").unlink()
    assert not environment.usable()


def test_two_set_ups_wait_for_each_other_and_leave_no_file(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    again = os.open(tmp_path, os.O_RDONLY)
    with environment.locked(), pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)
    assert list(tmp_path.iterdir()) == []


def test_pip_says_something_only_when_it_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment = Environment(tmp_path / "venv")
    environment.python = tmp_path / "pip"
    for status in (0, 1):
        environment.python.write_text(f"#!/bin/sh\necho a warning >&2\nexit {status}\n")
        environment.python.chmod(0o700)
        with contextlib.suppress(BootstrapError):
            environment.pip_install("wheel")
        assert ("a warning" in capfd.readouterr().err) == (status != 0)


def test_settings_of_an_active_environment_do_not_reach_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "PIP_USER", "PIP_TARGET"):
        monkeypatch.setenv(name, "elsewhere")
    assert "elsewhere" not in own_variables().values()
    assert own_variables()["PATH"] == os.environ["PATH"]


def test_an_old_python_reaches_the_version_check() -> None:
    tree = ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(), feature_version=(3, 7))
    check = next(index for index, node in enumerate(tree.body) if isinstance(node, ast.If))
    imports = [node for node in tree.body[:check] if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["from __future__ import annotations", "import sys"]
