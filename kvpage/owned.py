"""Keeping what the system gives, whatever a signal handler raises and whenever: Ctrl-C raises KeyboardInterrupt.

Python runs signal handlers when a call returns, when a function begins and when a loop turns; what the handler raises
there discards the result of that call. A descriptor that was the result is open for ever then. So what must not be lost
goes from the system call into its owner, and from there back to the system, in one call that runs in C to its end. When
several calls belong together, they are made where no signal handler runs: outside the main thread.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


def keep(kept: deque[_T], function: Callable[..., _T], *arguments: Any) -> None:
    """Append `function(*arguments)` to `kept`; for a `function` written in C nothing can come between the two.

    There must be an argument. Raises what `function` raises.
    """
    kept.extend(map(function, *zip(arguments)))  # zip: each argument as a tuple of one


def give_back(kept: deque[_T], function: Callable[..., object], *arguments: Any) -> None:
    """Take everything out of `kept` and call `function(item, *arguments)` with it; nothing can come between the two."""
    if kept:
        for_each = ((argument,) * len(kept) for argument in arguments)
        deque(map(function, islice(iter(kept.popleft, None), len(kept)), *for_each), maxlen=0)


class Descriptors(deque[int]):
    """Open file descriptors, closed when this is closed, and at the latest when nobody refers to it any more."""

    def move(self, into: Descriptors, count: int) -> None:
        """The first `count` belong to `into` from now on."""
        into.extend(islice(iter(self.popleft, None), count))

    def release(self) -> list[int]:
        """All of them, which belong to the caller from now on."""
        return list(islice(iter(self.popleft, None), len(self)))

    def close(self) -> None:
        """May be called twice."""
        give_back(self, os.close)

    def __del__(self, _at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _at_exit():
            self.close()


def uninterrupted(work: Callable[[], _T]) -> _T:
    """What `work()` returns or raises, done to its end even if the caller is interrupted while it waits for it.

    Then nobody takes the result, so its death must give back what it stands for; and what `work` uses must belong to
    `work`, which may go on running.
    """
    if threading.get_ident() == threading.main_thread().ident:
        return _elsewhere(work)
    return work()


def _elsewhere(work: Callable[[], _T]) -> _T:
    errand = _Errand(work)
    try:
        # Not `threading.Thread`: interrupted in `start`, it keeps what it was to run, or stops the thread half-way.
        _thread.start_new_thread(errand.run, ())
        errand.wait()
        return errand.outcome()
    except BaseException:
        if errand.is_begun:
            errand.wait()
        raise
    finally:
        del errand, work  # the traceback of what it raised leads here, and must not lead back


class _Errand(Generic[_T]):
    def __init__(self, work: Callable[[], _T]) -> None:
        self.is_begun = False
        self._work = work
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._result: list[_T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        self.is_begun = True
        try:
            self._result.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._error = error
        finally:
            del self._work  # with what belongs to it
            self._running.release()

    def wait(self) -> None:
        with self._running:  # both ends of it are written in C
            pass

    def outcome(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._result.pop()
