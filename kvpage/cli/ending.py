"""Signals that end a command as exceptions do: what it has begun is undone, and the status says which signal it was."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Ending:
    """Lets the first signal end the process by SystemExit. Closing a terminal may send several."""

    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def __init__(self) -> None:
        self._is_held_back = False
        self._came: int | None = None

    def begin(self) -> None:
        for each in self.signals:
            if signal.getsignal(each) is not signal.SIG_IGN:  # nohup
                signal.signal(each, self._end)

    @contextmanager
    def within(self) -> Iterator[None]:
        """In the block only."""
        before = {each: signal.getsignal(each) for each in self.signals}
        self.begin()
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A signal that comes in the block ends the process at the end of the block."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        if self._came is not None:
            sys.exit(128 + self._came)

    def _end(self, number: int, _: FrameType | None) -> None:
        for each in self.signals:
            signal.signal(each, signal.SIG_IGN)
        self._came = number
        if not self._is_held_back:
            sys.exit(128 + number)
