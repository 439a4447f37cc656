"""Another process that shares memory with a check and does what it is told."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

SCRIPTS = Path(__file__).resolve().parent.parent
MESSAGE_BYTES = 1 << 18


def child_environment() -> dict[str, str]:
    """Of a process that is to find these modules."""
    path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


class PeerFailed(Exception):
    """The other process could not do it; the message is its error."""


class PeerDied(Exception):
    """The other process ended before it answered."""


class Peer:
    """`do` sends a command and returns the answer. `with` ends the process."""

    def __init__(
        self, device_uuid: str, *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """`prefix`: a command that runs the program, such as `unshare`. `environment`: what differs from ours."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = subprocess.Popen(
                [*prefix, sys.executable, "-m", "gpu_checks.peer_program", str(theirs.fileno()), device_uuid],
                pass_fds=[theirs.fileno()],
                env={**child_environment(), **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def do(self, command: str, *, fd: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Raises `PeerFailed` with the error of the other side, `PeerDied` when there is none."""
        message = json.dumps({"do": command, **arguments}).encode()
        try:
            socket.send_fds(self._socket, [message], [] if fd is None else [fd])
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        except (BrokenPipeError, ConnectionResetError):
            data, fds = b"", []
        if not data:
            raise PeerDied(f"the other process ended with status {self._child.wait()} at {command}")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        if fds:
            answer["fd"] = fds[0]
        return answer

    def kill(self) -> int:
        """SIGKILL. Returns a pidfd, the caller's, that becomes readable when the process is gone."""
        pidfd = os.pidfd_open(self.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return pidfd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()


def wait_until_gone(pidfd: int) -> None:
    """Closes `pidfd`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.close(pidfd)
