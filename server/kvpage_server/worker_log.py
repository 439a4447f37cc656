"""The worker's log: one JSON object on a line of standard error for each thing worth knowing later."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import UTC, datetime
from typing import Literal

Level = Literal["info", "warning", "error"]


def log(event: str, *, level: Level = "info", **fields: object) -> None:
    """Write `event` with its `fields`; those that JSON does not know are written as text. Never raises for the log's
    own sake: a full disk or a reader that went away must not end the process that holds the memory.
    """
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": time, "level": level, "event": event, "pid": os.getpid(), **fields}, default=str)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
