"""A client in a process of its own, told what to do over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from support.worker_process import readable

PROGRAM = Path(__file__).with_name("remote_program.py")


class RemoteClient:
    """`do` sends a command and returns the answer; `kill` ends the process as a crash would."""

    def __init__(self, *, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs the client, such as `unshare`."""
        self._child = subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        stdin.flush()
        assert readable(stdout.fileno()), f"no answer to {command}"
        line = stdout.readline()
        assert line, f"the client ended at {command} with {self._child.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Returns when the process is gone, and with it its sockets and mappings."""
        pidfd = os.pidfd_open(self.pid)
        self._child.kill()
        assert readable(pidfd)
        os.close(pidfd)
        self._reap()

    def end(self) -> None:
        """Let it end by itself; returns when it has."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        assert self._child.wait(60) == 0
        self._reap()

    def _reap(self) -> None:
        with self._child:
            pass  # closes the pipes and waits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self.kill()
