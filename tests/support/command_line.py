"""`kvpage` as a person types it: as a program of its own, and the same in this process, which is ten times as fast."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpage.cli import main

COMMAND = [sys.executable, "-c", "from kvpage.cli import main; main()"]
COLUMNS = "160"


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The outcome of a program."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"COLUMNS": COLUMNS} | environment,
    )


def run_here(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """What `run` returns. Not for commands that become another program (serve, worker) or are told to end by signals.

    What a program would print as a traceback is raised.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with _typed(arguments, stdin, {"COLUMNS": COLUMNS} | environment):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            main()
    status = end.value.code or 0
    assert isinstance(status, int)
    return subprocess.CompletedProcess(["kvpage", *arguments], status, _text(out), _text(err))


@contextlib.contextmanager
def _typed(arguments: tuple[str, ...], stdin: str, environment: dict[str, str]) -> Iterator[None]:
    """This process has that command line, input and environment meanwhile."""
    before = sys.argv, sys.stdin, dict(os.environ)
    interrupts = signal.getsignal(signal.SIGINT)
    sys.argv = ["kvpage", *arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    os.environ.update(environment)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupts)
        sys.argv, sys.stdin, old = before
        os.environ.clear()
        os.environ.update(old)


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
