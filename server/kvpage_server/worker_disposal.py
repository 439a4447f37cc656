"""Closing the sockets of clients where nobody waits for it.

Closing can take as long as a stranger likes. A client may have sent descriptors that were never received, and the last
close of what they name waits for its owner: a TCP socket that lingers, a file of a file system in user space. The
kernel drops them in the thread that closes the client's socket (Linux 6.18: `close` then took the whole linger time),
so where something is left to drop that thread is not the worker's loop.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

from kvpage.wire.channel import keep_urgent_data

MAX_THREADS = 16
STOP_S = 1.0


class Disposal:
    """Closes sockets at once, or on threads of its own when something is left in them: one as a rule, more while
    others are stuck, `MAX_THREADS` at most.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all that follows
        self._sockets: deque[socket.socket] = deque()
        self._num_threads = 0
        self._num_busy = 0
        self._ending = False

    def __repr__(self) -> str:
        return f"<Disposal {len(self._sockets)} sockets wait, {self._num_busy} of {self._num_threads} threads busy>"

    @property
    def num_open(self) -> int:
        """Sockets that are not closed yet."""
        return len(self._sockets) + self._num_busy

    @property
    def num_stuck(self) -> int:
        """Sockets that will stay open for who knows how long: those that keep all threads busy, and all behind them."""
        return self.num_open if self._num_busy == MAX_THREADS else 0

    def close(self, sock: socket.socket) -> None:
        """End the connection now, and give its descriptor back as soon as that can be done. Never blocks."""
        with contextlib.suppress(OSError):  # the other end is gone already
            sock.shutdown(socket.SHUT_RDWR)
        if _is_empty(sock):
            _close(sock)
            return
        with self._changed:
            self._sockets.append(sock)
            num_idle = self._num_threads - self._num_busy
            if len(self._sockets) > num_idle and self._num_threads < MAX_THREADS:
                self._start_thread()
            self._changed.notify()

    def stop(self) -> None:
        """Let the threads end; those that are stuck are left to the end of the process. May be called twice."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_threads == 0, STOP_S)

    def _start_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # no room for another thread: the others take their turn later
            threading.Thread(target=self._run, name="dispose", daemon=True).start()
            self._num_threads += 1

    def _run(self) -> None:
        with self._changed:
            while self._changed.wait_for(lambda: self._sockets or self._ending) and self._sockets:
                sock = self._sockets.popleft()
                self._num_busy += 1
                self._changed.release()
                try:
                    _close(sock)
                finally:
                    self._changed.acquire()
                    self._num_busy -= 1
            self._num_threads -= 1
            self._changed.notify_all()


def _is_empty(sock: socket.socket) -> bool:
    """Whether nothing is left in a socket that has been shut down, so that nothing more can come."""
    try:
        keep_urgent_data(sock)
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:  # a listening socket, or one whose other end has gone without reading
        return False


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed all the same, close(2)
        sock.close()
