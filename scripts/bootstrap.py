"""Set up everything that `make demo`, `make test` and `make dev` need; standard library only.

    python3 scripts/bootstrap.py demo|test|dev

`demo` and `test` build the wheel and install it into `.venv`; `dev` installs the checkout, editable, into
`.venv-dev`. KVPAGE_VENV names another folder. An active environment is never touched. What was installed is
recorded in the environment, so a second run with nothing changed does nothing, and one with changed sources only
builds and installs the wheel again.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before any import that an older Python does not have
    sys.exit(
        f"kvpage needs Python 3.11 or newer, and this is {sys.version.split()[0]} ({sys.executable}). "
        "Choose another, for example: make demo PYTHON=python3.12"
    )

import argparse
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

from environment import CHECKOUT, BootstrapError, Environment, system_has_torch
from stamp import Stamp, requirements_digest, sources_digest
from torch_choice import TorchFacts, choose_torch

EXTRAS = {"demo": ("server", "torch"), "test": ("dev", "server", "torch"), "dev": ("dev", "server", "torch")}
FOLDERS = {"demo": ".venv", "test": ".venv", "dev": ".venv-dev"}


def main(arguments: list[str]) -> int:
    """Make the environment of one purpose current; returns the exit status."""
    parser = argparse.ArgumentParser(description="Set up kvpage's environment.")
    parser.add_argument("purpose", choices=sorted(EXTRAS))
    purpose: str = parser.parse_args(arguments).purpose
    environment = Environment(CHECKOUT / os.environ.get("KVPAGE_VENV", FOLDERS[purpose]))
    try:
        with environment.locked():
            bring_up_to_date(environment, EXTRAS[purpose], editable=purpose == "dev")
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    return 0


def bring_up_to_date(environment: Environment, extras: tuple[str, ...], *, editable: bool) -> None:
    """Install what the stamp says is missing or old, and write the new stamp last."""
    if not environment.usable():
        environment.create(share_system_packages=system_has_torch())  # torch is large: use the one that is there
    found = Stamp.read(environment.stamp_path)
    sources = "editable" if editable else sources_digest()
    wanted = Stamp(requirements=requirements_digest(), sources=sources, extras=extras)
    missing = found.missing(wanted) if found is not None else "everything"
    if missing == "nothing":
        return
    environment.stamp_path.unlink(missing_ok=True)
    if found is not None and missing == "wheel":
        install_wheel(environment)
        wanted = replace(wanted, extras=found.extras)
    else:
        install_everything(environment, extras, editable=editable)
    wanted.write(environment.stamp_path)
    say(f"{environment.folder.name} is ready")


def install_everything(environment: Environment, extras: tuple[str, ...], *, editable: bool) -> None:
    """Install torch, then kvpage, then what its extras need. What is imported first compiles itself, if it may."""
    install_torch(environment)
    if editable:
        say(f"installing the checkout, editable, with {', '.join(extras)}")
        environment.pip_install("--no-compile", "--editable", f"{CHECKOUT}[{','.join(extras)}]")
    else:
        install_built(environment, extras)
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        environment.compile_modules()


def install_built(environment: Environment, extras: tuple[str, ...]) -> None:
    """The wheel of the checkout, as a user gets it, and what it needs."""
    say("installing the build tool")
    environment.pip_install(*environment.build_requirements())
    wheel = install_wheel(environment)
    say(f"installing what it needs for {', '.join(extras)}")
    environment.pip_install("--no-compile", f"{wheel}[{','.join(extras)}]")


def install_wheel(environment: Environment) -> Path:
    """Build the wheel of the checkout and put it in place of the installed one."""
    say("building and installing the wheel")
    wheel = environment.build_wheel()
    environment.pip_install("--no-deps", "--force-reinstall", str(wheel))
    return wheel


def install_torch(environment: Environment) -> None:
    """Find out what `choose_torch` needs to know, cheapest first, and do what it says."""
    wanted = os.environ.get("KVPAGE_TORCH") or None
    importable = None if wanted else environment.importable_torch()
    choice = choose_torch(
        TorchFacts(
            wanted=wanted,
            importable=importable,
            cpu_build=None if wanted or importable else environment.find_cpu_torch(),
            nvidia_driver=has_nvidia_driver(),
            cpu_index=os.environ.get("KVPAGE_TORCH_INDEX") or None,
            system=platform.system(),
        )
    )
    say(f"torch: {choice.message}")
    if choice.pip_arguments:
        environment.pip_install("--no-compile", *choice.pip_arguments, quiet=False)


def has_nvidia_driver() -> bool:
    """True where the kernel driver or its tool is there."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def say(message: str) -> None:
    """Tell the user what is going on, at once."""
    print(f"bootstrap: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
