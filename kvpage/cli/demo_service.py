"""The service that the demo starts for itself, in a run directory of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from kvpage.cli.ending import Ending
from kvpage.errors import InternalError

STEP_TIMEOUT_S = 120.0
END_TIMEOUT_S = 15.0
"""For a process that was asked to end: the service waits 10 s for requests in flight, and then for its worker."""
LAST_WORDS = 10  # lines


class Service(NamedTuple):
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def last_words(self) -> str:
        """The end of what it has logged."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").strip().splitlines()[-LAST_WORDS:])


@contextmanager
def run_directory(keep: Path | None) -> Iterator[str]:
    if keep is not None:
        yield str(keep)
        return
    with tempfile.TemporaryDirectory(prefix="kvpage-demo-") as folder:
        yield folder


@contextmanager
def service(run_dir: str, device: str, ending: Ending, *arguments: str) -> Iterator[Service]:
    """`kvpage serve` and its worker, ended when the block ends."""
    ready, told = os.pipe()
    command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", run_dir, "--ready-fd", str(told)]
    command += ["--config", os.devnull, "--device", device, *arguments]  # nothing of a service of this machine
    with ExitStack() as stack:
        stack.callback(os.close, ready)
        log = stack.enter_context(tempfile.TemporaryFile())  # no pipe: nobody reads while it serves
        with ending.held_back():  # no signal may come between its start and who is to end it
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, pass_fds=[told],
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends it last
            )  # fmt: skip
            stack.callback(end, process)
        os.close(told)
        served = Service(process, log)
        _wait_until_ready(ready, served)
        yield served


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to, and kill it when it does not: nobody waits long for a process that hangs."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(ready: int, served: Service) -> None:
    """Returns when a line comes through `ready`; raises when the server ends or says nothing."""
    readable, _, _ = select.select([ready], [], [], STEP_TIMEOUT_S)
    if readable and os.read(ready, 1):
        return
    end(served.process)
    raise InternalError(f"kvpage serve did not become ready:\n{served.last_words()}")
