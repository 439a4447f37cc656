"""A virtual environment of our own: made, checked, and filled through its own pip."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CONSTRAINTS = CHECKOUT / "constraints.txt"

# Settings that would send pip's installs elsewhere, or another project's modules into ours.
FOREIGN_VARIABLES = ("PIP_PREFIX", "PIP_ROOT", "PIP_TARGET", "PIP_USER", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")

IMPORT_TORCH = "import torch; print(torch.__version__)"


class BootstrapError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


class Environment:
    """The virtual environment in `folder`; nothing else is ever written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp_path = folder / "kvpage-bootstrap.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep two set-ups of one environment apart: the second waits. No file is left: the folder above is locked."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        above = os.open(self.folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(above, fcntl.LOCK_EX)
            yield
        finally:
            os.close(above)

    def usable(self) -> bool:
        """True when its interpreter runs, has pip, and is the version that runs this script."""
        return self.python.exists() and self._output("-c", "import pip, sys; print(sys.version)") == sys.version

    def create(self, *, share_system_packages: bool) -> None:
        """Make it anew, on its own or seeing the packages of the Python it is made from."""
        if self.folder.exists() and not (self.folder / "pyvenv.cfg").exists():
            raise BootstrapError(
                f"{self.folder} exists and is not a virtual environment; move it or set KVPAGE_VENV to another folder"
            )
        if importlib.util.find_spec("ensurepip") is None:
            raise BootstrapError(
                f"{sys.executable} cannot put pip into a virtual environment because its ensurepip module is missing. "
                "On Debian and Ubuntu install the package python3-venv; elsewhere use a complete Python "
                "(make demo PYTHON=/path/to/python3)"
            )
        print(f"bootstrap: making {self.folder}", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        sharing = ["--system-site-packages"] if share_system_packages else []
        self._run([sys.executable, "-m", "venv", *sharing, str(self.folder)], "making the virtual environment")

    def build_requirements(self) -> list[str]:
        """What pyproject.toml asks for to build the wheel."""
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
        requires: list[str] = project["build-system"]["requires"]
        return requires

    def build_wheel(self) -> Path:
        """Build the checkout's wheel inside the environment's folder; returns its path."""
        output = self.folder / "wheel"
        shutil.rmtree(output, ignore_errors=True)
        command = [str(self.python), "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)]
        self._run(command, "building the wheel", show=False)
        return next(output.glob("kvpage-*.whl"))

    def pip_install(self, *arguments: str, quiet: bool = True) -> None:
        """Run `pip install` with the lock as constraints. When quiet, what it says is shown only if it fails."""
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--constraint",
            str(CONSTRAINTS),
        ]
        self._run([*command, *arguments], f"pip install {' '.join(arguments)}", show=not quiet)

    def compile_modules(self) -> None:
        """Write the byte code of everything, for where no import does: each process would compile it for itself.

        With all cores; pip has one. What is no Python of this version stays as it is.
        """
        packages = self._output("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        if packages:
            self._output("-m", "compileall", "-qq", "-j", "0", packages)

    def importable_torch(self) -> str | None:
        """Version of the torch the environment imports now, or None."""
        return self._output("-c", IMPORT_TORCH)

    def find_cpu_torch(self) -> str | None:
        """Newest exact CPU build, such as "2.13.0+cpu", that pip can install from its configured sources, or None."""
        listing = self._output("-m", "pip", "index", "versions", "torch") or ""
        for version in cpu_builds(listing):
            dry_run = ["-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", f"torch=={version}"]
            if self._output(*dry_run) is not None:
                return version
        return None

    def _output(self, *arguments: str) -> str | None:
        return output_of([str(self.python), *arguments])

    def _run(self, command: list[str], what: str, *, show: bool = True) -> None:
        """Run `command`; what it prints is shown as it comes, or with `show=False` only when it fails."""
        stdout, stderr = (None, None) if show else (subprocess.PIPE, subprocess.STDOUT)
        done = subprocess.run(command, cwd=CHECKOUT, env=own_variables(), stdout=stdout, stderr=stderr, check=False)
        if done.returncode != 0:
            if done.stdout is not None:
                print(done.stdout.decode(errors="replace"), file=sys.stderr, flush=True)
            raise BootstrapError(f"{what} failed with exit status {done.returncode}; its output is above")


def system_has_torch() -> bool:
    """True when the Python below any active environment imports torch, as in a GPU vendor's container."""
    base_python: str = getattr(sys, "_base_executable", sys.executable)
    return output_of([base_python, "-c", IMPORT_TORCH]) is not None


def output_of(command: list[str]) -> str | None:
    """What `command` prints, or None when it fails; its error output is dropped."""
    done = subprocess.run(command, cwd=CHECKOUT, env=own_variables(), capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def own_variables() -> dict[str, str]:
    """This process's environment variables without those that would lead pip or Python elsewhere."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}


def cpu_builds(listing: str) -> list[str]:
    """The CPU builds of torch in what `pip index versions torch` prints, newest first and at least 2.9."""
    versions = set(re.findall(r"\b(\d+\.\d+\.\d+)\+cpu\b", listing))
    ordered = sorted((tuple(map(int, version.split("."))) for version in versions), reverse=True)
    return [".".join(map(str, parts)) + "+cpu" for parts in ordered if parts >= (2, 9)]
