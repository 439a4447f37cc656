"""Trying again while a worker is being replaced or has no room."""

from __future__ import annotations

import time

from kvpage.errors import KvpageError

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class Patience:
    """Bounded by `timeout_s`. Pauses become longer, up to `_LONGEST_PAUSE_S`.

    Not woken by the file of a new socket: a worker that has room again makes none, and asking costs some 50 µs.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def wait(self, error: KvpageError) -> None:
        """Return when it may be worth trying again after `error`. Raises it when it is not, or when time is over."""
        time.sleep(self.pause_s(error))

    def pause_s(self, error: KvpageError) -> float:
        """As `wait`, for whoever pauses in another way: how long."""
        if not error.retryable or self.left_s <= 0:
            raise error
        pause_s = min(self.left_s, self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s
