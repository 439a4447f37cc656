"""KeyboardInterrupt at a chosen moment: in turn at each at which CPython may run a signal handler."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_MOMENTS = ("call", "c_return")  # when a function has begun and when one written in C returns; left out: turns of loops


def interrupted(work: Callable[[], object], moment: int) -> bool:
    """Do `work` and interrupt it at the `moment`-th chance, counted from 1; False when it ended before that.

    An interruption that a finaliser has swallowed counts as one. Whatever `work` returned is dropped.
    """
    num_seen = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_seen
        num_seen += event in _MOMENTS
        if num_seen == moment:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with warnings.catch_warnings(), _quiet_finalisers():
        warnings.simplefilter("ignore", ResourceWarning)  # Python's own sockets close themselves, and say so
        sys.setprofile(look)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
    return num_seen >= moment


@contextmanager
def _quiet_finalisers() -> Iterator[None]:
    """A KeyboardInterrupt in a finaliser is told to nobody."""
    before = sys.unraisablehook

    def tell(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)

    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = before


def quick_holdings() -> tuple[int, int]:
    """How many descriptors and mapped memfds this process has, without looking for garbage first."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:")
