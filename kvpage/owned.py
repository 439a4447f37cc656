"""Keeping what the system gives, whatever a signal handler raises and whenever: Ctrl-C raises KeyboardInterrupt.

Python runs signal handlers when a call returns, when a function begins and when a loop turns; what the handler raises
there discards the result of that call. A descriptor that was the result is open for ever then. So what must not be lost
goes from the system call into its owner, and from there back to the system, in one call that runs in C to its end.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

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
