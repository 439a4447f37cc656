"""`python -m kvpage_server PROGRAM …`: programs that share little, so each imports only its own part.

`start-worker` is what a person means by `kvpage worker`; it ends by becoming `worker`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from kvpage.program_end import end_at_once_when_interrupted, end_of

_USAGE = "usage: python -m kvpage_server {serve,start-worker,worker,config} …\n"


def main() -> int:
    end_at_once_when_interrupted()
    _open_standard_streams()
    program, arguments = sys.argv[1:2], sys.argv[2:]
    work = _work_of(program, arguments)
    return end_of(lambda: work(arguments), as_json="--json" in arguments)


def _work_of(program: list[str], arguments: list[str]) -> Callable[[Sequence[str]], int]:
    if program in (["start-worker"], ["worker"]) and arguments[:1] in (["drain"], ["replace"]):
        from kvpage_server import worker_commands

        return worker_commands.main
    if program == ["worker"]:
        from kvpage_server import worker

        return worker.main
    if program == ["start-worker"]:
        from kvpage_server import start_worker

        return start_worker.main
    if program == ["config"]:
        from kvpage_server import config_command

        return config_command.main
    if program == ["serve"]:
        from kvpage_server import serve

        return serve.main
    return _refuse


def _refuse(_: Sequence[str]) -> int:
    sys.stderr.write(_USAGE)
    return 2


def _open_standard_streams() -> None:
    """Else the next file or socket that is opened would be standard error, and get what is meant for the log."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    sys.exit(main())
