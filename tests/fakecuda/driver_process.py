"""A process that calls the driver, told what to do by a test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from support.checkout import ROOT
from support.fakecuda import FakeDevices

PROGRAM = Path(__file__).with_name("driver_program.py")
TIMEOUT_S = 60.0


class DriverProcess:
    """`code` answers what the driver returned, `ok` what came out of a call that must work (see driver_program.py)."""

    def __init__(
        self,
        devices: FakeDevices,
        *,
        init: bool = True,
        context: bool = False,
        faults: str = "",
        log: bool = False,
        visible: str | None = None,
        fill: str | None = None,
    ) -> None:
        """`init`: call cuInit, expecting success. `context`: make device 0's current too."""
        added = devices.env(faults=faults, log=log, visible=visible, fill=fill)
        path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(TIMEOUT_S)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno())],
                env={**os.environ, **added, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )
        if init:
            self.ok("call", "cuInit", 0)
        if context:
            self.ok("call", "cuCtxSetCurrent", self.ok("out", "cuDevicePrimaryCtxRetain", 0))

    @property
    def pid(self) -> int:
        return self._child.pid

    def _send(
        self, command: str, arguments: Sequence[object], thread: str, fds: Sequence[int], background: bool = False
    ) -> None:
        message = json.dumps({"do": command, "arguments": arguments, "thread": thread, "background": background})
        socket.send_fds(self._sock, [message.encode()], list(fds))

    def _ask(self, command: str, arguments: Sequence[object], thread: str, fds: Sequence[int]) -> Any:
        self._send(command, arguments, thread, fds)
        return self._receive(command, arguments)

    def _receive(self, command: str, arguments: Sequence[object]) -> Any:
        answer, received, _, _ = socket.recv_fds(self._sock, 65536, 8)
        assert answer, f"the process ended at {command}{arguments} with {self._child.wait()}"
        return *json.loads(answer), received

    def code(self, command: str, *arguments: object, thread: str = "", fds: Sequence[int] = ()) -> int:
        code, _, received = self._ask(command, arguments, thread, fds)
        assert not received
        return int(code)

    def ok(self, command: str, *arguments: object, thread: str = "", fds: Sequence[int] = ()) -> Any:
        code, value, received = self._ask(command, arguments, thread, fds)
        assert (code, received) == (0, []), f"{command}{arguments} answered {code}"
        return value

    def start(self, command: str, *arguments: object) -> None:
        """Send without waiting; `finish` waits."""
        self._send(command, arguments, "", [])

    def finish(self) -> int:
        """The result code of what was started."""
        return int(self._receive("what was started", [])[0])

    def in_background(self, command: str, *arguments: object) -> None:
        """Let another thread do it, and never ask how it ended."""
        self._send(command, arguments, "background", [], background=True)
        self._receive(command, arguments)

    def export(self, handle: int) -> int:
        """A descriptor of the chunk, which the caller closes. The driver made it inheritable, as the real one does."""
        code, inheritable, [fd] = self._ask("export", [handle], "", [])
        assert (code, inheritable) == (0, True)
        return int(fd)

    def dies(self, command: str, *arguments: object) -> int:
        """Send what ends the process; how it ended, as a negative signal number."""
        self._send(command, arguments, "", [])
        assert self._sock.recv(1) == b""
        return self._child.wait(TIMEOUT_S)

    # --- the sequences that most tests begin with --------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> int:
        return int(self.ok("out", "cuMemAddressReserve", size_bytes, 0, 0, 0))

    def map(self, pointer: int, size_bytes: int, handle: int) -> None:
        self.ok("call", "cuMemMap", pointer, size_bytes, 0, handle, 0)

    def mapped(self, size_bytes: int, handle: int, flags: int = 3, device: int = 0) -> int:
        """The address of the chunk, mapped into a reservation of its own."""
        pointer = self.reserve(size_bytes)
        self.map(pointer, size_bytes, handle)
        self.ok("access", pointer, size_bytes, flags, device)
        return pointer

    def kill(self) -> None:
        """Returns when the process is gone, and with it what it held."""
        self._child.kill()
        self._child.wait(TIMEOUT_S)

    def close(self) -> None:
        self._sock.close()
        self._child.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
