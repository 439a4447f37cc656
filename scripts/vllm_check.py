"""`make test-vllm`: a real vLLM engine on a CPU, stock and on kvpage's memory, token by token; records its traces.

    python scripts/vllm_check.py

It makes an environment of its own, .venv-vllm, of 2.1 GB, which is used again the next time. Exits 0 when all is as it
should be, 1 when something is not, and 3 when the environment cannot be made: then nothing was tried.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from environment import own_variables

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts" / "vllm_checks" / "requirements.txt"
SCENARIO = ROOT / "scripts" / "vllm_checks" / "scenario.py"
STORE_SCENARIO = ROOT / "scripts" / "vllm_checks" / "store_scenario.py"
TRACES = ROOT / "tests" / "data"
TORCH = "torch==2.13.0+cpu"
"""What the wheel of vLLM is built for. The version without +cpu may stand for a build of gigabytes for a GPU."""
FAILED, NOT_RUN = 1, 3


class NotMade(Exception):
    """Why there is no environment."""


def make_environment(folder: Path) -> Path:
    """Its interpreter, with all that is pinned. Raises `NotMade`."""
    check_machine()
    python, stamp = folder / "bin" / "python", folder / "kvpage-vllm.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + TORCH.encode() + sys.version.encode()).hexdigest()
    if not (python.exists() and stamp.exists() and stamp.read_text() == wanted):
        print(f"making {folder} (2.1 GB)", flush=True)
        if folder.exists() and not (folder / "pyvenv.cfg").exists():
            raise NotMade(f"{folder} exists and is no virtual environment; set KVPAGE_VLLM_VENV to another folder")
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)])
        index = os.environ.get("KVPAGE_TORCH_INDEX")
        pip_install(python, *(["--extra-index-url", index] if index else []), TORCH)
        pip_install(python, "--requirement", str(REQUIREMENTS))
        stamp.write_text(wanted)
    pip_install(python, "--no-build-isolation", "--force-reinstall", str(ROOT))
    return python


def check_machine() -> None:
    machine, version = f"{platform.system()} on {platform.machine()}", sys.version_info[:2]
    if machine != "Linux on x86_64" or version not in ((3, 11), (3, 12)):
        raise NotMade(
            f"what is pinned is for Python 3.11 or 3.12 and Linux on x86_64, and this is Python "
            f"{version[0]}.{version[1]}, {machine}; choose another by PYTHON=python3.12"
        )


def pip_install(python: Path, *arguments: str) -> None:
    """Without what the packages ask for beside: the list is whole for what is used here."""
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *arguments])


def run(command: list[str]) -> None:
    done = subprocess.run(command, env=own_variables(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise NotMade(f"{' '.join(command[1:4])} … failed: {' '.join(errors[-2:])}")


def main() -> int:
    folder = ROOT / os.environ.get("KVPAGE_VLLM_VENV", ".venv-vllm")
    try:
        python = make_environment(folder)
    except NotMade as error:
        print(f"NOT RUN: the environment for vLLM cannot be made: {error}", file=sys.stderr)
        return NOT_RUN
    environment = own_variables() | {"PYTHONPATH": str(ROOT / "scripts"), "PYTHONSAFEPATH": "1"}
    for command in ([str(SCENARIO), str(TRACES)], [str(STORE_SCENARIO)]):
        done = subprocess.run([str(python), *command], env=environment, cwd=folder, check=False)
        if done.returncode:
            return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
