"""A command on a terminal of its own, as a person sees it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess

from support.command_line import COMMAND
from support.eventually import until
from support.worker_process import readable


class Screen:
    """The command on a terminal of its own of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self._fd, terminal = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "50"}
        try:
            self._child = subprocess.Popen(
                [*COMMAND, *arguments], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
            )
        finally:
            os.close(terminal)
        self.shown = self.all = ""
        """Since something was last waited for, and since the beginning."""

    def wait_for(self, text: str) -> None:
        self.shown = ""
        until(lambda: self._read() and text in self.shown)

    def interrupt(self) -> int:
        """As Ctrl-C does; its exit status."""
        self._child.send_signal(signal.SIGINT)
        return self.ended()

    def ended(self) -> int:
        """Its exit status, when it has ended by itself."""
        until(lambda: not self._read())
        return self._child.wait(60)

    def _read(self) -> bool:
        """False when it shows nothing any more."""
        assert readable(self._fd), f"it shows nothing any more: {self.all}"
        try:
            data = os.read(self._fd, 65536).decode("utf-8", "replace")
        except OSError:  # how a terminal ends
            return False
        self.shown += data
        self.all += data
        return bool(data)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        os.close(self._fd)
