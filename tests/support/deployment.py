"""What files in deploy/ would start, read by the parsers that kvpage itself uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvpage.cli import health
from kvpage_server.configured import settings_of
from kvpage_server.setting_fields import Fields, Program
from kvpage_server.setting_flags import parser_of
from kvpage_server.setting_sources import resolve
from kvpage_server.worker_budget import parse_memory
from support.checkout import ROOT

DEPLOY = ROOT / "deploy"
NO_FILE = Path("/nonexistent/kvpage.toml")


class Started(NamedTuple):
    """A program of kvpage with its settings."""

    program: Program
    settings: Fields


def started(arguments: Sequence[str], environment: Mapping[str, str]) -> Started:
    """Raises SystemExit for flags that there are not, `SpecInvalid` for values and variables, AssertionError for what
    is no server.
    """
    program, *flags = arguments
    if program not in ("serve", "worker"):
        raise AssertionError(f"kvpage {program} starts no server")
    known: Program = "serve" if program == "serve" else "worker"
    found = resolve(parser_of(known, "").parse(flags), environment, system_file=NO_FILE)
    assert not found.ignored_variables, f"no settings of kvpage: {found.ignored_variables}"
    if known == "serve":
        settings_of(found)  # refuses what it would not start with
    elif found.fields.memory is not None:
        parse_memory(found.fields.memory)
    return Started(known, found.fields)


def faults_between(programs: Iterable[Started]) -> list[str]:
    """Why these would not serve together."""
    apis = [settings for program, settings in programs if program == "serve"]
    workers = [settings.device for program, settings in programs if program == "worker"]
    if len(apis) != 1:
        return [f"{len(apis)} API processes"]
    [api] = apis
    faults = []
    if not api.external_workers:
        faults.append("the API would start workers of its own")
    if sorted(map(str, workers)) != sorted(api.devices):
        faults.append(f"the API is told of {api.devices}, and workers serve {workers}")
    if len({settings.run_dir for _, settings in programs}) != 1:
        faults.append("they look for each other in different folders")
    return faults


def is_probe(command: Sequence[str]) -> bool:
    """Whether it is a `kvpage health` that the fast way understands."""
    return list(command[:2]) == ["kvpage", "health"] and health.parse(command[2:]) is not None


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def tool_beside_python(name: str) -> str | None:
    """A program of a development dependency."""
    return shutil.which(name, path=str(Path(sys.executable).parent))


def output_of(*command: str, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)
    return done.returncode, done.stdout + done.stderr
