"""Times that the processes of one machine can tell each other.

In a time namespace (time_namespaces(7)) CLOCK_MONOTONIC and the start times in /proc differ from those outside by
offsets. A worker that takes over from one in another namespace would end leases too early, or take their owners for
dead.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal


@cache
def offset_s(clock: Literal["monotonic", "boottime"]) -> float:
    """How much more this process reads on a clock than the machine does; 0 where there are no time namespaces."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return 0.0
    return next((offset for name, offset in map(_offset, lines) if name == clock), 0.0)


def _offset(line: str) -> tuple[str, float]:
    name, seconds, nanoseconds = line.split()
    return name, int(seconds) + int(nanoseconds) / 1e9
