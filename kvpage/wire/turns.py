"""Using something one after the other, also when a signal handler or a finaliser comes in between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvpage.owned import keep


class Turns:
    """A lock that is not taken twice by one thread and does not stay taken, whatever a signal handler raises."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # plain locks would make a signal handler wait for the thread it runs in
        self._user: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread has its turn: then it is here in a signal handler or a finaliser."""
        return self._user == threading.get_ident()

    def take(self, work: Callable[[], None], *, wait_s: float) -> bool:
        """Do `work` when nobody else does; False when others do for longer than `wait_s`, or this thread does."""
        taken: deque[bool] = deque()
        try:
            keep(taken, self._lock.acquire, True, wait_s)
            if not taken[0] or self._user is not None:
                return False
            self._user = threading.get_ident()
            try:
                work()
            finally:
                self._user = None
            return True
        finally:
            if taken and taken[0]:
                self._lock.release()
