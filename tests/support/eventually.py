"""Waiting for something in another process that offers no event to wait for.

The end of one client and the request of another reach a worker in no order: the kernel names a connection that was
just served before one that changed since. So a test that ends one party and asks another what became of it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")

TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


def until(attempt: Callable[[], _Value | None], timeout_s: float = TIMEOUT_S) -> _Value:
    """The first result that counts as true. Raises AssertionError when there is none for very long."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not (value := attempt()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return value
