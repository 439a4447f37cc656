"""Starting `cuda_child` and receiving what it makes."""

from __future__ import annotations

import array
import base64
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from kvpage.errors import DeviceUnavailable, InternalError, error_from_code
from kvpage.memory.base import Progress, no_progress

SILENCE_S = 120.0
"""How long the driver may take for one step. The first call on a device that sleeps takes seconds."""

_TICK_S = 0.2  # how often somebody who has abandoned the creation is noticed
_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Made:
    """What the child has told last. `fd` is the caller's."""

    message: dict[str, Any]
    fd: int | None

    @property
    def handle(self) -> bytes:
        return base64.b64decode(self.message.get("handle", ""))


HOLDERS: list[subprocess.Popen[bytes]] = []
"""Children that hold memory, and outlive this process if somebody else still uses that; and those that hang."""
_holders_lock = threading.Lock()  # guards the list: one thread makes memory, another reaps


def run_task(
    task: str, device: str, size_bytes: int = 0, on_progress: Progress = no_progress, *, given: bytes = b""
) -> Made:
    """Run one task of `cuda_child` to its result. `given` is its standard input.

    Raises what the child raised, what `on_progress` raises (the child is then killed), and `DeviceUnavailable` when
    the child dies or is silent for `SILENCE_S`.
    """
    ours, theirs = socket.socketpair()
    with ours, contextlib.ExitStack() as undo:
        with theirs:
            child = _spawn(task, device, size_bytes, theirs, given)
        undo.callback(_end, child)
        messages = undo.enter_context(contextlib.closing(Messages(ours)))
        made = _result(messages, child, on_progress)
        if made.message.get("handle"):
            undo.pop_all()  # the child lives as long as the memory; all messages have been read
            with _holders_lock:
                HOLDERS.append(child)
        reap_holders()
        return made


def reap_holders() -> None:
    """Take leave of holders that have ended: to be called when a child has, or they stay zombies. Never blocks."""
    with _holders_lock:
        HOLDERS[:] = [child for child in HOLDERS if child.poll() is None]


def _spawn(task: str, device: str, size_bytes: int, theirs: socket.socket, given: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "kvpage.memory.cuda_child"]
    command += [str(theirs.fileno()), task, device, str(size_bytes)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], cwd="/", start_new_session=True
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
        stdin.write(given)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:  # one that waits inside the driver dies when that returns
        with _holders_lock:
            HOLDERS.append(child)


class Messages:
    """Lines of JSON from the child, the last one with a descriptor. The child is our own program, and trusted."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._data = b""
        self._fds: list[int] = []

    def next(self, timeout_s: float) -> Made | None:
        """None when nothing came in `timeout_s`. Raises EOFError at the end."""
        while b"\n" not in self._data:
            self._socket.settimeout(timeout_s)
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _MESSAGE_BYTES, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError:
                return None
            for _, _, packed in ancillary:
                self._fds.extend(array.array("i", packed))
            if not data:
                raise EOFError
            self._data += data
        line, self._data = self._data.split(b"\n", 1)
        message = json.loads(line)
        if "made" not in message:
            return Made(message, None)
        if not self._fds:  # the kernel dropped it (MSG_CTRUNC): no number was free for it here
            raise InternalError(
                "device memory was made, but its descriptor found no room in this process: close files, or raise its"
                " limit (ulimit -n)",
                details={"errno": errno.EMFILE},
            )
        return Made(message, self._fds.pop())

    def close(self) -> None:
        """Close descriptors that nobody took."""
        while self._fds:
            os.close(self._fds.pop())


def _result(messages: Messages, child: subprocess.Popen[bytes], on_progress: Progress) -> Made:
    progress, silent_s = 0, 0.0
    while True:
        try:
            received = messages.next(_TICK_S)
        except (EOFError, ConnectionResetError) as error:
            _end(child)
            raise DeviceUnavailable(
                f"the process that was to use the CUDA driver ended with status {child.returncode}; what it wrote"
                " before is in the log of this one"
            ) from error
        if received is None:
            silent_s += _TICK_S
            if silent_s >= SILENCE_S:
                raise DeviceUnavailable(
                    f"the CUDA driver has not answered for {SILENCE_S:.0f} s; dmesg may say why (Xid)"
                )
            on_progress(progress)
            continue
        silent_s = 0.0
        if "progress" in received.message:
            progress = received.message["progress"]
            on_progress(progress)
        elif "error" in received.message:
            told = received.message["error"]
            raise error_from_code(told["code"], told["message"], details=told["details"])
        else:
            return received
