"""docs/gpu-report.md, from what came of the checks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_checks.outcome import MACHINE_TABLE, Check, Outcome, Row
from gpu_checks.trial import DOUBLE, Cell

HEAD = "# GPU report\n\nWritten by `make gpu-check` (`scripts/gpu_check.py`); do not edit.\n"


class NoReport(Exception):
    """This must not be written there."""


def render_not_run(reason: str, checks: Sequence[Check]) -> str:
    rows: list[Row] = [{"check": check.title, "result": "not run"} for check in checks]
    return f"{HEAD}\nNot run: {_sentence(reason)}\n\n## Checks\n\n{_table(rows)}"


def has_results(path: Path) -> bool:
    """Whether the report at `path` is about a GPU."""
    return path.exists() and "\n## Machine\n" in path.read_text()


def render(machine: Outcome, outcomes: Sequence[Outcome]) -> str:
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in ("pass", "fail", "skip")}
    others = len(outcomes) - sum(counts.values())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [
        HEAD,
        f"{today}: {counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped, {others} not run.\n",
        f"## Machine\n\n{_table([{'what': 'date', 'value': today}, *machine.tables.get(MACHINE_TABLE, [])])}",
        f"## Checks\n\n{_table([_check_row(outcome) for outcome in outcomes])}",
        *(f"## {name}\n\n{_table(rows)}" for name, rows in _tables(outcomes).items()),
    ]
    return "\n".join(parts)


def write(path: Path, text: str, machine: Outcome, docs: Path) -> None:
    """Raises `NoReport` for what a driver double gave, below `docs`: nobody may take it for a GPU's."""
    if DOUBLE in machine.line() and path.resolve().is_relative_to(docs.resolve()):
        raise NoReport(f"the device is a {DOUBLE}: {path} is for results of a GPU; name another file with --report")
    path.write_text(text, encoding="utf-8")


def _check_row(outcome: Outcome) -> Row:
    said = [outcome.reason] if outcome.reason else []
    return {
        "check": outcome.title,
        "result": outcome.status if outcome.status == "pass" else f"**{outcome.status}**",
        "s": outcome.took_s,
        "what was seen": "; ".join([*said, *outcome.seen]),
    }


def _tables(outcomes: Iterable[Outcome]) -> dict[str, list[Row]]:
    """All rows by the name of their table, in the order in which they came."""
    tables: dict[str, list[Row]] = {}
    for outcome in outcomes:
        for name, rows in outcome.tables.items():
            tables.setdefault(name, []).extend(rows)
    return tables


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Cell) -> str:
    text = f"{value:,}" if isinstance(value, int | float) else value
    return " ".join(text.replace("|", "\\|").split())


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
