"""How every program ends that is interrupted, or whose output nobody takes: by its exit status, and in no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvpage.exit_status import DONE, FAILED, INTERRUPTED, TRY_AGAIN
from support.checkout import ROOT
from support.command_line import COMMAND
from support.stand_in_service import StandInService

REQUEST = str(ROOT / "examples" / "mimo.json")
READY = {"status": "ready", "checks": []}

# Ctrl-C in the moment in which MODULE is to be loaded; MODULE `-`: when all is done and Python ends.
INTERRUPTED_PROGRAM = """
import atexit, os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            interrupt()

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

module, program, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Interrupting())
if module == "-":
    atexit.register(interrupt)
if program == "kvpage":
    from kvpage.cli import main
    main()
else:
    runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def ready(run_dir: Path) -> Iterator[Path]:
    """Run directory of a service that says that it is ready."""
    with StandInService(run_dir, lambda _: (200, READY)):
        yield run_dir


def ended(line: str, command: Sequence[str], run_dir: Path) -> subprocess.CompletedProcess[str]:
    """What a shell started with a line such as `exec "$@" >&-`."""
    environment = os.environ | {"KVPAGE_RUN_DIR": str(run_dir), "KVPAGE_CONFIG": os.devnull}
    return subprocess.run(
        ["bash", "-c", line, "bash", *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip


def interrupted_at(module: str, *command: str, run_dir: Path) -> tuple[int, str, str]:
    done = ended('exec "$@"', [sys.executable, "-c", INTERRUPTED_PROGRAM, module, *command], run_dir)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("kvpage.cli.health", ("kvpage", "health")),
        ("socket", ("kvpage", "health")),
        ("typer", ("kvpage", "events", "--json")),
        ("kvpage.cli.commands", ("kvpage", "top")),
        ("rich.live", ("kvpage", "top")),
        ("httpx", ("kvpage", "pools", "create", REQUEST, "--name", "one")),
        ("kvpage.planner", ("kvpage", "plan", REQUEST)),
        ("kvpage_server.serve", ("kvpage_server", "serve")),
        ("uvicorn", ("kvpage_server", "serve")),
        ("kvpage_server.start_worker", ("kvpage_server", "start-worker", "--device", "host")),
        ("pydantic_settings", ("kvpage_server", "config")),
        ("kvpage.memory.host", ("kvpage_server", "worker", "--device", "host")),
        ("msgspec", ("kvpage_server", "worker", "drain", "--device", "host")),
    ],
)
def test_ctrl_c_while_a_program_still_loads_ends_it_without_a_word(
    run_dir: Path, module: str, command: tuple[str, ...]
) -> None:
    assert interrupted_at(module, *command, run_dir=run_dir) == (INTERRUPTED, "", "")
    assert not run_dir.exists() or not list(run_dir.iterdir())


@pytest.mark.parametrize("command", [("health",), ("version",)])
def test_ctrl_c_when_the_work_is_done_ends_a_program_without_a_word(ready: Path, command: tuple[str, ...]) -> None:
    status, out, err = interrupted_at("-", "kvpage", *command, run_dir=ready)
    assert (status, err) == (INTERRUPTED, "")
    assert out


def test_what_was_started_to_take_no_notice_of_ctrl_c_takes_none(ready: Path) -> None:
    program = [sys.executable, "-c", INTERRUPTED_PROGRAM, "socket", "kvpage", "health"]
    done = ended("trap '' INT; exec \"$@\"", program, ready)
    assert (done.returncode, done.stdout, done.stderr) == (DONE, "ready\n", "")


PRINTING = [
    [*COMMAND, "health"],
    [*COMMAND, "version"],
    [sys.executable, "-m", "kvpage_server", "config"],
]


@pytest.mark.parametrize("command", PRINTING, ids=lambda command: command[-1])
def test_a_command_whose_output_is_closed_does_its_work(ready: Path, command: list[str]) -> None:
    done = ended('exec "$@" >&-', command, ready)
    assert (done.returncode, done.stderr) == (DONE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("command", PRINTING, ids=lambda command: command[-1])
def test_an_output_that_takes_nothing_is_said(ready: Path, command: list[str]) -> None:
    done = ended('exec "$@" > /dev/full', command, ready)
    told = ended('exec "$@" --json > /dev/full', command, ready)
    assert (done.returncode, done.stderr) == (FAILED, "error: [Errno 28] No space left on device\n")
    assert (told.returncode, json.loads(told.stderr)["code"]) == (FAILED, "output")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_where_errors_are_not_taken_either_the_exit_status_is_left(run_dir: Path) -> None:
    """FAILED where the error could not be told, whatever it was."""
    nobody = [*COMMAND, "pools", "list"]
    assert ended('exec "$@" 2>&-', nobody, run_dir).returncode == TRY_AGAIN
    assert ended('exec "$@" 2> /dev/full', nobody, run_dir).returncode == FAILED
    assert ended('exec "$@" > /dev/full 2>&1', [*COMMAND, "version"], run_dir).returncode == FAILED
