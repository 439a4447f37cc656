"""Run as a program: kvpage's server with a bomb in it. `dying_program.py STEP FIFO serve|worker …`

Once armed it kills itself, as `kill -9` would, right before its STEP-th call of the system counted from then. Signal
USR1 arms it, and the fifo then ends for whoever reads it; FIFO `-` arms it from the start. STEP 0 never happens.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

_MODULES = {"posix", "fcntl", "mmap", "_socket"}
# They ask for what the process knows of itself, or happen in every program at any time: no step of what it does.
_NO_STEP = {"getpid", "geteuid", "getuid", "fspath", "fileno", "gettimeout", "setblocking", "settimeout", "urandom"}


def is_step(function: Any) -> bool:
    """Whether a C function is a call of the system."""
    if getattr(function, "__name__", "") in _NO_STEP:
        return False
    owner = getattr(function, "__self__", None)
    return getattr(function, "__module__", None) in _MODULES or isinstance(owner, socket.socket)


class Bomb:
    def __init__(self, step: int) -> None:
        self.armed = False
        self._left = step

    def profile(self, frame: FrameType, event: str, function: Any) -> None:
        if self.armed and event == "c_call" and is_step(function):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    step, fifo = int(sys.argv[1]), sys.argv[2]
    sys.argv[1:] = sys.argv[3:]
    bomb = Bomb(step)

    def arm(number: int, frame: FrameType | None) -> None:
        os.close(os.open(fifo, os.O_WRONLY))
        bomb.armed = True

    signal.signal(signal.SIGUSR1, arm)
    bomb.armed = fifo == "-"
    threading.setprofile(bomb.profile)
    sys.setprofile(bomb.profile)
    from kvpage_server.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
