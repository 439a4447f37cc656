"""What came of a check."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from gpu_checks.trial import Cell

Status: TypeAlias = Literal["pass", "fail", "skip", "not run"]
Row: TypeAlias = dict[str, Cell]

MACHINE_TABLE = "machine"
"""Of the first check: rows of `what` and `value`. `UUID` among them is the device of all others."""

_LOG_LINES = 3  # of what a crashed check wrote last


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    title: str
    """What must hold, or what is measured: a row of the report."""
    function: str
    """`module:name`; takes a `Trial`."""
    limit_s: float = 30.0
    alone: bool = False
    """Whether it measures time or free memory, or leaves the device in doubt: nothing may run beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: str
    title: str
    status: Status
    reason: str = ""
    """Why it is not a pass."""
    seen: tuple[str, ...] = ()
    tables: dict[str, list[Row]] = field(default_factory=dict)
    took_s: float = 0.0

    def line(self) -> str:
        return json.dumps(asdict(self))


def machine_fact(machine: Outcome, what: str) -> str:
    """Raises KeyError when the first check did not say."""
    for row in machine.tables.get(MACHINE_TABLE, []):
        if row["what"] == what:
            return str(row["value"])
    raise KeyError(what)


def not_run(check: Check, reason: str) -> Outcome:
    return Outcome(check=check.name, title=check.title, status="not run", reason=reason)


def outcome_of(check: Check, events: Iterable[str], returncode: int | None, log: str, took_s: float) -> Outcome:
    """Judge what a check's process told and how it ended. `returncode` None: it had to be killed at its limit.

    A verdict counts only if the process then ended well: a crash at exit is a failure of what was checked.
    """
    seen: list[str] = []
    tables: dict[str, list[Row]] = {}
    verdict: dict[str, Any] | None = None
    for line in events:
        event = json.loads(line)
        if "saw" in event:
            seen.append(event["saw"])
        elif "row" in event:
            tables.setdefault(event["table"], []).append(event["row"])
        else:
            verdict = event
    status, reason = _judged(check, verdict, returncode, log)
    return Outcome(
        check=check.name,
        title=check.title,
        status=status,
        reason=reason,
        seen=tuple(seen),
        tables=tables,
        took_s=round(took_s, 1),
    )


def _judged(check: Check, verdict: dict[str, Any] | None, returncode: int | None, log: str) -> tuple[Status, str]:
    if returncode == 0 and verdict is not None:
        return verdict["verdict"], verdict["reason"]
    if returncode is None:
        how = f"hung: killed after {check.limit_s:g} s"
    elif returncode < 0:
        how = f"crashed: {signal.Signals(-returncode).name}"
    else:
        how = f"ended with status {returncode}"
    said = f"{': '.join(filter(None, [verdict['verdict'], verdict['reason']]))}, then " if verdict is not None else ""
    last = "; ".join(line.strip() for line in log.splitlines()[-_LOG_LINES:] if line.strip())
    return "fail", f"{said}{how}" + (f" ({last})" if last else "")
