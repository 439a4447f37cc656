"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvpage.errors import KvpageError

State: TypeAlias = Literal["ok", "absent", "problem"]
"""`absent`: kvpage works without it, and does less. `problem`: something that is there does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    state: State
    text: str
    advice: str = ""
    """What to do; empty when nothing needs to be done."""


Check: TypeAlias = Callable[[], Iterator[Finding]]


def findings_of(checks: dict[str, Check]) -> Iterator[Finding]:
    """What every check finds. One that fails unforeseen is itself a problem, and the others still run."""
    for topic, check in checks.items():
        try:
            yield from check()
        except KvpageError as error:
            yield Finding(topic, "problem", error.message)
        except Exception as error:  # noqa: BLE001 a report that stops half-way helps nobody
            yield Finding(topic, "problem", f"{type(error).__name__}: {error}", "this is a fault of kvpage: report it")
