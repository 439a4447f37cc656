"""Lines on standard error, from processes that must go on when nobody reads them: what cannot be written is lost.

Whoever reads a pipe or a terminal may stop reading, and then a write blocks for as long. Making the descriptor
non-blocking would do the same to everybody else who has it, such as the shell; so a thread writes there. A regular
file takes lines at once, and keeps those written right before a process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import stat
import threading

MAX_WAITING_LINES = 1000
_FLUSH_S = 1.0
"""How long the end of a process waits for a reader."""
_STDERR = 2


def write_line(text: str) -> None:
    """Never waits nor fails. Past Python's buffer: what that cannot get rid of makes the exit status 120."""
    line = text.encode("utf-8", "backslashreplace") + b"\n"
    if _is_regular():
        _write(line)
    else:
        _writer.add(line)


def flush_lines() -> None:
    """Wait a moment for what is still to be written. Runs at exit by itself, unless a signal ends the process."""
    _writer.flush()


def _is_regular() -> bool:
    try:
        return stat.S_ISREG(os.fstat(_STDERR).st_mode)
    except OSError:
        return False


def _write(line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, line)


class _Writer:
    """A thread, from the first line on."""

    def __init__(self) -> None:
        # Of all queues the one to which a signal handler may add while the same thread is adding.
        self._waiting: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_started = False

    def add(self, line: bytes) -> None:
        if self._waiting.qsize() < MAX_WAITING_LINES:
            self._waiting.put(line)
        if not self._is_started:
            self._start()

    def flush(self) -> None:
        if self._is_started:
            written = threading.Event()
            self._waiting.put(written)
            written.wait(_FLUSH_S)

    def _start(self) -> None:
        if self._lock.acquire(blocking=False):  # else another is at it
            with contextlib.suppress(RuntimeError):  # no thread can be had now: the next line tries again
                threading.Thread(target=self._write_all, name="standard-error", daemon=True).start()
                self._is_started = True
            if not self._is_started:
                self._lock.release()

    def _write_all(self) -> None:
        while True:
            next_ = self._waiting.get()
            if isinstance(next_, threading.Event):
                next_.set()
            else:
                _write(next_)


_writer = _Writer()
atexit.register(flush_lines)
