"""One thread that waits: for sockets, for the time, and for what other threads have to tell."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import selectors
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from kvpage_server.worker_log import log

Callback: TypeAlias = Callable[[], None]

_FEW_TIMERS = 256


class Timer:
    """A callback at a time, unless it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Runs callbacks one at a time until `stop`. A callback that raises is logged and the loop goes on: a worker must
    not lose its pools to one bad request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._epoll = select.epoll()  # not a selector, which takes as long again to say who is ready
        self._watched: dict[int, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._purge_at = _FEW_TIMERS
        self._posted: deque[Callback] = deque()
        self._running = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self.watch(self._wake_out, selectors.EVENT_READ, self._run_posted)

    def watch(self, sock: socket.socket | int, events: int, callback: Callback) -> None:
        """Call `callback` whenever `sock`, a socket or a descriptor, is ready for `events`. 0 stops watching."""
        fd = sock if isinstance(sock, int) else sock.fileno()
        mask = (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (
            select.EPOLLOUT if events & selectors.EVENT_WRITE else 0
        )
        if not mask:
            if self._watched.pop(fd, None) is not None:
                self._epoll.unregister(fd)
            return
        if fd in self._watched:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._watched[fd] = callback

    def call_after(self, delay_s: float, callback: Callback) -> Timer:
        timer = Timer(callback)
        if len(self._timers) >= self._purge_at:
            self._purge()
        heapq.heappush(self._timers, (self.clock() + delay_s, next(self._order), timer))
        return timer

    def _purge(self) -> None:
        """Drop what was cancelled: a time that is far away would keep it for as long."""
        self._timers = [entry for entry in self._timers if entry[2].callback is not None]
        heapq.heapify(self._timers)
        self._purge_at = max(_FEW_TIMERS, 2 * len(self._timers))

    def post(self, callback: Callback) -> None:
        """Have `callback` run by the loop. From any thread, and from signal handlers."""
        self._posted.append(callback)
        with contextlib.suppress(BlockingIOError):  # so many bytes wait there that it will wake up anyway
            self._wake_in.send(b"\0")

    def wake_for_signals(self) -> None:
        """Let a signal wake the loop whichever thread the kernel hands it to. In the main thread only."""
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        self._running = True
        while self._running:
            for fd, _ in self._epoll.poll(self._timeout_s()):
                callback = self._watched.get(fd)
                if callback is not None:  # else an earlier one of this round has ended it
                    _run(callback)
            self._run_timers()

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        self._epoll.close()
        self._wake_in.close()
        self._wake_out.close()

    def _timeout_s(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.clock()) if self._timers else None

    def _run_timers(self) -> None:
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                _run(callback)

    def _run_posted(self) -> None:
        self._wake_out.recv(4096)
        for _ in range(len(self._posted)):
            _run(self._posted.popleft())


class Deadline:
    """Calls back when `delay_s` have passed since `start`, unless `cancel` comes first. May be started again."""

    def __init__(self, loop: Loop, delay_s: float, callback: Callback) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._callback = callback
        self._timer: Timer | None = None

    def start(self) -> None:
        """One that runs goes on as it is."""
        if self._timer is None:
            self._timer = self._loop.call_after(self._delay_s, self._run_out)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run_out(self) -> None:
        self._timer = None
        self._callback()


def _run(callback: Callback) -> None:
    try:
        callback()
    except Exception:  # noqa: BLE001 - whatever it is, the memory of every client hangs on this loop
        log("internal_error", level="error", traceback=traceback.format_exc())
