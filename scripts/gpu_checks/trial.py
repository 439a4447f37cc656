"""What a check is given: the device, and where to tell what it sees."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TextIO, TypeAlias

Cell: TypeAlias = str | int | float
"""Of a table. The unit of a number stands in the name of its column."""


DOUBLE = "driver double"
"""In the name of a device that is none: host memory that answers like one."""


class Skip(Exception):
    """The machine does not allow this check; the message says what it lacks."""


class Failed(Exception):
    """The check ran, and something that must hold does not."""


def expect(holds: bool, what: str) -> None:
    """Raises `Failed` with `what` unless it holds."""
    if not holds:
        raise Failed(what)


class Trial:
    """One run of one check. What it tells is kept even if it crashes or hangs afterwards."""

    def __init__(self, device_uuid: str, events: TextIO) -> None:
        self.device_uuid = device_uuid
        self._events = events

    def saw(self, text: str) -> None:
        """Something seen, in a few words."""
        self._tell(saw=text)

    def row(self, table: str, **cells: Cell) -> None:
        """A row of `table`. In the names of cells `_` stands for a space."""
        self._tell(table=table, row={name.replace("_", " "): value for name, value in cells.items()})

    def verdict(self, status: str, reason: str = "") -> None:
        self._tell(verdict=status, reason=reason)

    def _tell(self, **event: object) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()


def percentile(values: Iterable[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` of a hundred do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
