"""Memory for tests: the host's, with calls that are counted and fail on demand, and as much of it as the test says."""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable

from kvpage.memory.host import HostMemory
from kvpage.memory.host_calls import HostCalls


class FakeCalls(HostCalls):
    """Counts every call and what is left open. The `fail_at`-th call that can fail, counted from 1, raises ENFILE.

    `close` and `unmap` are counted and never fail: nobody could do anything about it.
    """

    def __init__(self, *, fail_at: int | None = None, before: Callable[[str], None] = lambda name: None) -> None:
        """`before` is told the name of each call that can fail before it is made, and may wait: so may a driver."""
        self.fail_at = fail_at
        self.counts: Counter[str] = Counter()
        self.open_fds: set[int] = set()
        self.open_maps: set[int] = set()
        self._fallible_calls = 0
        self._before = before

    def __repr__(self) -> str:
        return f"<FakeCalls {self._fallible_calls} made, {len(self.open_fds)} fds and {len(self.open_maps)} maps open>"

    def _count(self, name: str) -> None:
        self._before(name)
        self.counts[name] += 1
        self._fallible_calls += 1
        if self._fallible_calls == self.fail_at:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    def _opened(self, fd: int) -> int:
        self.open_fds.add(fd)
        return fd

    def create_memfd(self, name: str) -> int:
        self._count("create_memfd")
        return self._opened(super().create_memfd(name))

    def resize(self, fd: int, size_bytes: int) -> None:
        self._count("resize")
        super().resize(fd, size_bytes)

    def commit(self, fd: int, offset: int, size_bytes: int) -> None:
        self._count("commit")
        super().commit(fd, offset, size_bytes)

    def seal(self, fd: int) -> None:
        self._count("seal")
        super().seal(fd)

    def seals(self, fd: int) -> int:
        self._count("seals")
        return super().seals(fd)

    def access_mode(self, fd: int) -> int:
        self._count("access_mode")
        return super().access_mode(fd)

    def status(self, fd: int) -> os.stat_result:
        self._count("status")
        return super().status(fd)

    def duplicate(self, fd: int) -> int:
        self._count("duplicate")
        return super().duplicate(fd)

    def close(self, fd: int) -> None:
        self.counts["close"] += 1
        self.open_fds.discard(fd)
        super().close(fd)

    def map(self, kept: deque[int], fd: int, size_bytes: int, writable: bool) -> None:
        self._count("map")
        super().map(kept, fd, size_bytes, writable)
        self.open_maps.update(kept)

    def keep_from_children(self, address: int, size_bytes: int) -> None:
        self._count("keep_from_children")
        super().keep_from_children(address, size_bytes)

    def unmap(self, kept: deque[int], size_bytes: int) -> None:
        self.counts["unmap"] += 1
        self.open_maps.difference_update(kept)
        super().unmap(kept, size_bytes)


class FakeMemory(HostMemory):
    """`available` is what it claims to have; it never looks at the machine."""

    def __init__(self, *, available: int = 1 << 30, calls: FakeCalls | None = None) -> None:
        self.calls = calls or FakeCalls()
        self.available = available
        super().__init__(self.calls, lambda: self.available)
