"""Finds what a test left open in this process: descriptors, shared-memory mappings and children."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What this process holds at one moment, counted by a readable name."""

    descriptors: Counter[str]
    """Open file descriptors, named "<number> -> <target>"."""
    mappings: Counter[str]
    """Mapped memfds, by the name the kernel shows."""
    children: Counter[str]
    """Direct children that are not reaped yet, by process id."""

    @classmethod
    def now(cls) -> Holdings:
        """Count after a collection, so that what only garbage holds does not look like a leak."""
        gc.collect()
        return cls(descriptors=_descriptors(), mappings=_memfd_mappings(), children=_children())

    def leaks_since(self, before: Holdings) -> list[str]:
        """One line for each kind of thing that `self` holds and `before` did not; empty when there is none."""
        kinds = {
            "descriptor": self.descriptors - before.descriptors,
            "mapping": self.mappings - before.mappings,
            "child process": self.children - before.children,
        }
        return [f"{kind}: {name} (× {count})" for kind, grown in kinds.items() for name, count in grown.items()]


@contextmanager
def leak_guard() -> Iterator[None]:
    """Raise AssertionError when the block ends normally and holds more than it began with.

    A block that fails keeps its own error: what it left open is then the consequence, not the news.
    """
    before = Holdings.now()
    yield
    leaks = Holdings.now().leaks_since(before)
    if leaks:
        raise AssertionError("left behind:\n  " + "\n  ".join(leaks))


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        found[f"{number} -> {target}"] += 1
    return found


def _memfd_mappings() -> Counter[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split(maxsplit=5)[5] for line in lines if "/memfd:" in line)


def _children() -> Counter[str]:
    found: Counter[str] = Counter()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(f"pid {pid}" for pid in (thread / "children").read_text().split())
    return found
