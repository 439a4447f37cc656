"""What memory holds whenever Python code of kvpage.pages has stored into it, bytecode by bytecode."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from kvpage.pages import allocator

PAGES = os.path.dirname(allocator.__file__)
_WORD_BYTES = 8


class Moments:
    """Of some ranges of a buffer, as they are before every bytecode that runs: what a kill would leave there."""

    def __init__(self, buffer: Any, ranges: Sequence[tuple[int, int]]) -> None:
        self._view = memoryview(buffer)
        self.ranges = ranges
        self.seen: list[bytes] = []

    def now(self) -> bytes:
        return b"".join(self._view[start:end] for start, end in self.ranges)

    def put(self, moment: bytes, buffer: Any) -> None:
        """Into another buffer, which holds zeros."""
        at = 0
        for start, end in self.ranges:
            buffer[start:end] = moment[at : at + end - start]
            at += end - start

    def outside(self) -> bytes:
        """All that is in no range."""
        edges = [0, *(edge for one in self.ranges for edge in one), len(self._view)]
        return b"".join(self._view[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))

    def _on_event(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PAGES):
            return None
        frame.f_trace_opcodes = True
        now = self.now()
        if not self.seen or self.seen[-1] != now:
            self.seen.append(now)
        return self._on_event

    def of(self, act: Callable[[], object]) -> list[bytes]:
        """Before `act`, amid it, and after it; of stores of more than a word also the halves."""
        outside = self.outside()
        self.seen = [self.now()]
        with _traced(self._on_event):
            act()
        self.seen.append(self.now())
        assert self.outside() == outside, "a store that nobody saw"
        found = list(self.seen)
        for before, after in zip(self.seen, self.seen[1:], strict=False):
            found += _halves(before, after)
        return list(dict.fromkeys(found))


def _halves(before: bytes, after: bytes) -> Iterator[bytes]:
    old, new = (np.frombuffer(some + bytes(-len(some) % _WORD_BYTES), np.int64) for some in (before, after))
    changed = np.flatnonzero(old != new)
    if len(changed) > 1:
        for half in (changed[: len(changed) // 2], changed[len(changed) // 2 :]):
            mixed = old.copy()
            mixed[half] = new[half]
            yield mixed.tobytes()[: len(before)]


@contextmanager
def _traced(on_event: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield
    finally:
        sys.settrace(before)


def failing(act: Callable[[], object], moment: int) -> bool:
    """Do `act` and raise `MemoryError` before its `moment`-th bytecode in kvpage.pages, counted from 1; False when it
    ended before that."""
    num_seen = 0

    def on_event(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_seen
        if not frame.f_code.co_filename.startswith(PAGES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_seen += 1
            if num_seen == moment:
                raise MemoryError
        return on_event

    with _traced(on_event):
        try:
            act()
        except MemoryError:
            return True
    return num_seen >= moment
