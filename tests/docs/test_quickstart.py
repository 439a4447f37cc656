"""docs/quickstart.md: its commands run in the order of the page, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from kvpage.run_directory import RunDirectory
from support.api_service import kill_process, worker_pids
from support.checkout import ROOT
from support.markdown import Fence, Page, page
from support.screen import Screen

PAGE = ROOT / "docs" / "quickstart.md"
SERVICE = "kvpage serve\n"
MOST_COMMANDS = 10
INTERRUPTED = 130
ANSI = re.compile(r"\x1b\[[\d;]*m")


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


@pytest.fixture(autouse=True)
def _terminal(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_RUN_DIR", str(run_dir))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "100")


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """The command of the page on a terminal of its own, until it is interrupted there; yields what it has shown."""
    try:
        with Screen(*SERVICE.split()[1:]) as screen:
            screen.wait_for("ready")
            yield ANSI.sub("", screen.all)
            assert screen.interrupt() == INTERRUPTED
    finally:
        for pid in worker_pids(RunDirectory(run_dir)):
            kill_process(pid)


def test_the_commands_print_what_the_page_shows(no_leaks: None, tmp_path: Path, run_dir: Path) -> None:
    def run(typed: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", typed]
        done = subprocess.run(
            command, cwd=tmp_path, check=False, timeout=120, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, typed + done.stdout
        return done.stdout

    def check(typed: str, shown: str | None, printed: str) -> None:
        assert shown is None or agrees(printed, shown), f"{typed}\nprinted:\n{printed}\nthe page shows:\n{shown}"

    all_steps = steps(page(PAGE))
    at = [typed for typed, _ in all_steps].index(SERVICE)
    for typed, shown in all_steps[:at]:
        check(typed, shown, run(typed))
    with served(run_dir) as printed:
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
