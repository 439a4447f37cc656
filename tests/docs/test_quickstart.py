"""docs/quickstart.md: its commands run in the order of the page, and print what it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.checkout import ROOT
from support.markdown import Fence, Page, page

PAGE = ROOT / "docs" / "quickstart.md"
SERVICE = "kvpage serve\n"
MOST_COMMANDS = 10
TERMINAL: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def steps(quickstart: Page) -> list[tuple[str, str | None]]:
    """What is typed, and what the page shows of its output."""
    fences = [*quickstart.fences, Fence(info="", text="", line=0)]
    return [
        (typed.text, shown.text if shown.info == "text" else None)
        for typed, shown in pairwise(fences)
        if typed.info == "sh"
    ]


def agrees(printed: str, shown: str) -> bool:
    """`…` stands for anything; spaces at the ends of lines do not count."""
    pattern = ".*".join(map(re.escape, _trimmed(shown).split("…")))
    return re.fullmatch(pattern, _trimmed(printed), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


@pytest.fixture
def environment(run_dir: Path) -> dict[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"KVPAGE_RUN_DIR": str(run_dir), "PATH": programs, "COLUMNS": "100"}


@contextmanager
def served(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The command of the page in a terminal of its own; yields what it prints until it is ready."""
    child = subprocess.Popen(SERVICE.split(), cwd=folder, env=environment, **TERMINAL)
    assert child.stdout is not None
    try:
        printed = ""
        while not printed.rstrip().endswith("ready"):
            line = child.stdout.readline()
            assert line, f"the service ended before it was ready: {printed}"
            printed += line
        yield printed
    finally:
        child.send_signal(signal.SIGINT)
        _, status = child.communicate(timeout=60), child.returncode
    assert status in (0, -signal.SIGINT, 128 + signal.SIGINT)


def test_the_commands_print_what_the_page_shows(no_leaks: None, tmp_path: Path, environment: dict[str, str]) -> None:
    def run(typed: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", typed]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=120, **TERMINAL)
        assert done.returncode == 0, typed + done.stdout
        return str(done.stdout)

    def check(typed: str, shown: str | None, printed: str) -> None:
        assert shown is None or agrees(printed, shown), f"{typed}\nprinted:\n{printed}\nthe page shows:\n{shown}"

    all_steps = steps(page(PAGE))
    at = [typed for typed, _ in all_steps].index(SERVICE)
    for typed, shown in all_steps[:at]:
        check(typed, shown, run(typed))
    with served(tmp_path, environment) as printed:
        check(*all_steps[at], printed)
        for typed, shown in all_steps[at + 1 :]:
            check(typed, shown, run(typed))


def test_there_are_few_commands_and_each_output_has_one() -> None:
    typed = [text for text, _ in steps(page(PAGE))]
    assert SERVICE in typed
    assert 5 < len(typed) <= MOST_COMMANDS
    shown = [fence for fence in page(PAGE).fences if fence.info == "text"]
    assert len(shown) == 1 + sum(text is not None for _, text in steps(page(PAGE)))  # 1: how to install


def test_output_that_differs_is_seen() -> None:
    assert agrees("a 12\n\nb  \n", "a …\nb\n")
    assert not agrees("a 12\nb\n", "a …\nc\n")
    assert not agrees("a 12\nb\n", "a 12\n")
