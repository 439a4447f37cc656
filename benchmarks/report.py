"""What was measured, as a table for people, as JSON, and as docs/benchmarks.md; and what is wrong with such a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import Effort, Row, Unit

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
VLLM_PLANNER, VLLM_POOL, STOCK_CACHE = "vLLM's planner", "vLLM's block pool", "stock cache of transformers"
OPTIONAL_PEERS = {
    VLLM_PLANNER: "no vLLM can be imported, and `VLLM_SOURCE` names no folder with an unpacked wheel of it",
    VLLM_POOL: "the same",
    STOCK_CACHE: "transformers cannot be imported",
}
"""Peers that need not be installed → what is so where one was not compared with."""

Pair = tuple[str, str]
"""What is measured, and beside what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    title: str
    about: str
    """What the rows and their peers mean, in Markdown."""
    pairs: tuple[Pair, ...]
    """Every row that `measure` returns, in the order of the report; those of optional peers may be missing."""
    in_short: tuple[Pair, ...] = ()
    """Those that stand at the head of the page."""
    measure: Callable[[Effort], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    subject: Subject
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        pairs = [(row.name, row.peer) for row in self.rows]
        surplus = set(pairs) - set(self.subject.pairs)
        missing = {pair for pair in self.subject.pairs if pair not in pairs and pair[1] not in OPTIONAL_PEERS}
        if surplus or missing or len(set(pairs)) < len(pairs):
            raise ValueError(
                f"{self.subject.title}: measured and not declared {sorted(surplus)}, declared and not measured"
                f" {sorted(missing)}, or a row came twice"
            )

    def row(self, pair: Pair) -> Row | None:
        return next((row for row in self.rows if (row.name, row.peer) == pair), None)

    @property
    def absent(self) -> list[str]:
        """Peers of which no row is there."""
        return sorted({peer for name, peer in self.subject.pairs if self.row((name, peer)) is None})


def measured(subject: Subject, effort: Effort) -> Measured:
    return Measured(subject=subject, rows=tuple(subject.measure(effort)))


def main_of(subject: Subject) -> None:
    """Measure one subject alone and print it."""
    print(as_text(measured(subject, Effort())))


# --- for people -------------------------------------------------------------------------------------------------------


def as_text(one: Measured) -> str:
    lines = [one.subject.title]
    for row in one.rows:
        ours, theirs = shown(row.ours, row.unit), shown(row.theirs, row.unit)
        lines.append(
            f"  {row.name:<58} {ours:>12}   {theirs:>12} {row.peer:<44} × {significant(row.ratio):>7}"
            f"  ({significant(row.low)} to {significant(row.high)}, n = {row.rounds})"
        )
    return "\n".join([*lines, *(f"  not there: {peer}: {OPTIONAL_PEERS[peer]}" for peer in one.absent)])


def as_json(facts: dict[str, str], parts: Iterable[Measured]) -> str:
    subjects = [
        {
            "title": one.subject.title,
            "rows": [asdict(row) for row in one.rows],
            "absent": one.absent,
        }
        for one in parts
    ]
    return json.dumps({"machine": facts, "subjects": subjects}, indent=1, ensure_ascii=False) + "\n"


# --- docs/benchmarks.md -----------------------------------------------------------------------------------------------

HEAD = """# Benchmarks

Written by `make bench` (`benchmarks/run.py`); do not edit.

Each row is something that kvpage does beside what else does it, or beside the least that it could cost. Both sides take
turns, round after round, in the same run. Ours and the peer's are medians. The ratio is the median of the ratios of
single rounds, and next to it stands where the middle half of those lay. **Below 1 we are quicker, or smaller.** Compare
ratios, not times: those are of this machine.
"""
COLUMNS = ("what", "beside", "ours", "the peer's", "ratio", "middle half", "rounds")
NOT_RUN = "not run"


def as_page(facts: dict[str, str], parts: Sequence[Measured]) -> str:
    sections = [HEAD, _machine(facts)]
    absent = sorted({peer for one in parts for peer in one.absent})
    if absent:
        lines = [f"- {peer}: {OPTIONAL_PEERS[peer]}." for peer in absent]
        sections.append("Peers that were not there:\n\n" + "\n".join(lines) + "\n")
    sections.append(_in_short(parts))
    sections += [_section(one) for one in parts]
    return "\n".join(sections)


def _machine(facts: dict[str, str]) -> str:
    return "| of the run | |\n| --- | --- |\n" + "".join(f"| {name} | {value} |\n" for name, value in facts.items())


def _in_short(parts: Sequence[Measured]) -> str:
    lines = [_cells(["in short", "beside", "ratio", "middle half"]), _cells(["---"] * 4)]
    for one in parts:
        for pair in one.subject.in_short:
            name, peer, _, _, ratio, spread, _ = _row(pair, one.row(pair))
            lines.append(_cells([f"[{one.subject.title}](#{_anchor(one.subject.title)}): {name}", peer, ratio, spread]))
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z ]", "", title.lower()).replace(" ", "-")


def _section(one: Measured) -> str:
    lines = [_cells(COLUMNS), _cells(["---"] * len(COLUMNS))]
    lines += [_cells(_row(pair, one.row(pair))) for pair in one.subject.pairs]
    return f"## {one.subject.title}\n\n{one.subject.about.strip()}\n\n" + "\n".join(lines) + "\n"


def _row(pair: Pair, row: Row | None) -> list[str]:
    if row is None:
        return [*pair, NOT_RUN, NOT_RUN, "–", "–", "–"]
    figures = [shown(row.ours, row.unit), shown(row.theirs, row.unit), significant(row.ratio)]
    return [*pair, *figures, f"{significant(row.low)} – {significant(row.high)}", f"{row.rounds:,}"]


def _cells(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


_SCALES: dict[Unit, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
}


def shown(value: float, unit: Unit) -> str:
    """In the largest unit of which it is at least one, with three digits."""
    scales = _SCALES[unit]
    size, name = next(((size, name) for size, name in scales if value >= size), scales[-1])
    return f"{significant(value / size)} {name}"


def significant(value: float) -> str:
    """Three digits that count, without an exponent."""
    decimals = next((decimals for bound, decimals in ((99.95, 0), (9.995, 1), (0.9995, 2)) if value >= bound), 3)
    return f"{value:,.{decimals}f}"


# --- what is wrong with a page ----------------------------------------------------------------------------------------

LARGEST_DISAGREEMENT = 4.0
"""Of the median of ratios and the ratio of medians, which differ on a machine that is busy now and then."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A row as the page has it; None where its peer was not there."""

    title: str
    pair: Pair
    figures: tuple[float, float, float, float, float] | None
    """Ours and theirs in seconds or bytes, the ratio, low, high."""


def printed(page: str) -> Iterator[Printed]:
    """Every row of every section. Raises `ValueError` for one that nobody can read."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE)[2:]:
            name, peer, ours, theirs, ratio, spread, _ = line.split(" | ")
            if ours == NOT_RUN:
                yield Printed(title, (name, peer), None)
            else:
                low, high = map(_number, spread.split(" – "))
                yield Printed(title, (name, peer), (_value(ours), _value(theirs), _number(ratio), low, high))


def wrong_rows(page: str, subjects: Iterable[Subject]) -> list[str]:
    """Rows that the page has and `subjects` have not, or the other way; ratios that are not those of their sides."""
    rows = list(printed(page))
    declared = [(subject.title, pair) for subject in subjects for pair in subject.pairs]
    found = [(row.title, row.pair) for row in rows]
    faults = [f"{title}: {pair} is not on the page" for title, pair in declared if (title, pair) not in found]
    faults += [f"{title}: {pair} is nobody's" for title, pair in found if (title, pair) not in declared]
    faults += [f"{row.title}: {row.pair} is not run, and must be" for row in rows if _must_run(row)]
    return faults + [f"{row.title}: {row.pair} has a wrong ratio or spread" for row in rows if _is_wrong(row)]


def _must_run(row: Printed) -> bool:
    return row.figures is None and row.pair[1] not in OPTIONAL_PEERS


def _is_wrong(row: Printed) -> bool:
    if row.figures is None:
        return False
    ours, theirs, ratio, low, high = row.figures
    apart = ratio / (ours / theirs)
    return not (low <= ratio <= high and 1 / LARGEST_DISAGREEMENT < apart < LARGEST_DISAGREEMENT)


def _value(text: str) -> float:
    number, unit = text.split(" ")
    sizes = {name: size for scales in _SCALES.values() for size, name in scales}
    return _number(number) * sizes[unit]


def _number(text: str) -> float:
    return float(text.replace(",", ""))
