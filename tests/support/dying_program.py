"""Run as a program: kvpage's server, or another program, with a bomb in it.

`dying_program.py STEP FIFO serve|worker …`, `dying_program.py STEP FIFO PROGRAM.py …`

Once armed it kills itself, as `kill -9` would, right before its STEP-th call of the system counted from then. STEP
`any40`: right before its 40th call of any function. Signal USR1 arms it, and the fifo then ends for whoever reads it;
FIFO `-` arms it from the start. STEP 0 never happens.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

_MODULES = {"posix", "fcntl", "mmap", "_socket"}
# They ask for what the process knows of itself, or happen in every program at any time: no step of what it does.
_NO_STEP = {"getpid", "geteuid", "getuid", "fspath", "fileno", "gettimeout", "setblocking", "settimeout", "urandom"}

_IMPORTING = "<frozen importlib"  # hundreds of calls to find a module that is needed for the first time: no steps


def is_step(function: Any) -> bool:
    """Whether a C function is a call of the system."""
    if getattr(function, "__name__", "") in _NO_STEP:
        return False
    owner = getattr(function, "__self__", None)
    return getattr(function, "__module__", None) in _MODULES or isinstance(owner, socket.socket)


class Bomb:
    def __init__(self, step: str) -> None:
        self.armed = False
        self._is_any = step.startswith("any")
        self._left = int(step.removeprefix("any"))

    def profile(self, frame: FrameType, event: str, function: Any) -> None:
        if self.armed and event in ("c_call", "call") and not frame.f_code.co_filename.startswith(_IMPORTING):
            if not self._is_any and not (event == "c_call" and is_step(function)):
                return
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    step, fifo = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    bomb = Bomb(step)

    def arm(number: int, frame: FrameType | None) -> None:
        os.close(os.open(fifo, os.O_WRONLY))
        bomb.armed = True

    signal.signal(signal.SIGUSR1, arm)
    bomb.armed = fifo == "-"
    threading.setprofile(bomb.profile)
    sys.setprofile(bomb.profile)
    if sys.argv[1].endswith(".py"):
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    from kvpage_server.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
