"""Write the tables of simulated batches and prefix hits into docs/planning.md, and draw one (make simulation-tables).

`python scripts/simulation_tables.py chat prefixes` makes only these; their names stand in the document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import draw_batches
import kvpage
from kvpage.errors import KvpageError
from kvpage.simulation.baseline import pools_layout
from kvpage.simulation.caching import Policy
from kvpage.simulation.conversations import Conversations
from kvpage.simulation.layout import SimulatedLayout, layout_of
from kvpage.simulation.report import (
    CONVERSATION_STEPS,
    CONVERSATION_WARM_UP_STEPS,
    CacheRow,
    Extent,
    Row,
    replay_conversations,
    replay_layouts,
)
from kvpage.simulation.streams import BUILT_IN, Stream, stream_of_lengths
from simulated.models import MODELS, request

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "planning.md"
GIB = 1 << 30
MEMORY = {"short": 20 * GIB, "chat": 20 * GIB, "long": 40 * GIB}
STRATEGIES = ("unify", "slab", "nested")
RUNS = 3
SEED = 1


class Pressure(NamedTuple):
    """Conversations on a pool, enough that not all of what they said stays there."""

    model: str
    memory_bytes: int
    conversations: int


PRESSURES = (
    Pressure("gemma-3-27b", 40 * GIB, 80),
    Pressure("gemma-4-26b int8", 20 * GIB, 250),
    Pressure("qwen3-next-80b", 20 * GIB, 200),
    Pressure("mimo 3:2", 20 * GIB, 160),
    Pressure("qwen3.6-35b + draft", 20 * GIB, 220),
)
PREFIX_COLUMNS: tuple[tuple[str, Policy], ...] = (
    ("unify", "older_of_block_and_slab"),
    ("slab", "older_of_block_and_slab"),
    ("nested", "own_oldest"),
    ("nested", "older_of_block_and_slab"),
)
STEADY_COLUMNS = ("unify", "nested")
LIFETIME_MODELS = ("gemma-3-27b", "qwen3.5-35b", "nemotron-h-8b", "jamba-1.5-mini")
STEADY_MODELS = ("gemma-3-27b", "mimo 3:2", "jamba-1.5-mini")


def layouts(model: str, memory_bytes: int) -> Iterator[SimulatedLayout]:
    """One for each strategy that can plan the model."""
    for strategy in STRATEGIES:
        try:
            plan = kvpage.plan(request(model, memory_bytes) | {"strategy": strategy})
        except KvpageError as error:
            print(f"{model}: {strategy}: {error.message}", file=sys.stderr)
            continue
        yield layout_of(plan, memory_bytes=memory_bytes, name=strategy)


def stream_rows(model: str, stream: Stream, extent: Extent) -> dict[str, Row]:
    """The rows of a model by strategy, the baseline `pools` among them."""
    planned = list(layouts(model, MEMORY[stream.name]))
    baseline = pools_layout(planned[0], stream, SEED)
    return {row.name: row for row in replay_layouts([*planned, baseline], stream, extent)}


def batches_table(stream: Stream) -> Iterator[str]:
    """Requests running, by model and strategy."""
    yield f"**{stream.name}**, {MEMORY[stream.name] // GIB} GiB: {stream.about}; {stream.steps:,} steps.\n\n"
    yield "| model | unify | slab | pools | nested |\n"
    yield "|---|---|---|---|---|\n"
    for model in MODELS:
        yield batches_row(model, stream)


def batches_row(model: str, stream: Stream) -> str:
    """A line of that table."""
    rows = stream_rows(model, stream, Extent(steps=stream.steps, runs=RUNS, seed=SEED))
    cells = " | ".join(cell(rows.get(name)) for name in ("unify", "slab", "pools", "nested"))
    return f"| {model} | {cells} |\n"


def cell(row: Row | None) -> str:
    """Requests running and, in brackets, live bytes over the memory."""
    return "–" if row is None else f"{row.mean_running:.0f} ({row.live_share:.2f})".replace("(0.", "(.")


def steady_table() -> Iterator[str]:
    """The same stream measured from the start, and later."""
    stream = BUILT_IN["short"]
    first = Extent(steps=stream.steps, runs=RUNS, seed=SEED)
    later = Extent(steps=4 * stream.steps, warm_up_steps=2 * stream.steps, runs=RUNS, seed=SEED)
    heads = f"unify, first {first.steps} steps | nested | unify, after {later.warm_up_steps} | nested"
    yield f"| model, short | {heads} |\n"
    yield "|---|---|---|---|---|\n"
    for model in STEADY_MODELS:
        cells = [
            cell(stream_rows(model, stream, extent).get(name)) for extent in (first, later) for name in STEADY_COLUMNS
        ]
        yield f"| {model} | {' | '.join(cells)} |\n"


def prefix_table() -> Iterator[str]:
    """Share of prefix tokens found, by layout and eviction policy."""
    extent = Extent(steps=CONVERSATION_STEPS, warm_up_steps=CONVERSATION_WARM_UP_STEPS, runs=RUNS, seed=SEED)
    yield "| model, pool, conversations | unify | slab | nested, own oldest | nested, older of block and slab |\n"
    yield "|---|---|---|---|---|\n"
    for model, memory_bytes, people in PRESSURES:
        rows = replay_conversations(layouts(model, memory_bytes), Conversations(people=people), extent)
        found = {(row.name, row.policy): row for row in rows}
        cells = [found_cell(found.get((name, policy))) for name, policy in PREFIX_COLUMNS]
        yield f"| {model}, {memory_bytes // GIB} GiB, {people} | {' | '.join(cells)} |\n"


def found_cell(row: CacheRow | None) -> str:
    """Share found and, in brackets, what slabs kept by cached blocks alone take of the memory."""
    return "–" if row is None else f"{row.found_share:.3f} ({row.pinned_share:.2f})".replace("0.", ".")


def lifetimes_table() -> Iterator[str]:
    """One request in twenty holds its blocks forty times as long as the others: how far slabs stay partly filled."""
    stream = stream_of_lengths("200,100\n" * 19 + "200,4000\n", "lifetimes")
    extent = Extent(steps=6_000, warm_up_steps=4_000, runs=1)
    yield "| model, 20 GiB | unify | slab | nested |\n|---|---|---|---|\n"
    for model in LIFETIME_MODELS:
        rows = {row.name: row for row in replay_layouts(layouts(model, 20 * GIB), stream, extent)}
        yield f"| {model} | {' | '.join(cell(rows.get(name)) for name in STRATEGIES)} |\n"


def make_sections() -> dict[str, Callable[[], Iterator[str]]]:
    """What there is to make, by its name in the document."""
    batches = {stream.name: partial(batches_table, stream) for stream in BUILT_IN.values()}
    return {**batches, "steady": steady_table, "lifetimes": lifetimes_table, "prefixes": prefix_table}


def put(document: str, name: str, text: str) -> str:
    """The document with `text` between the marks of that section. Raises `ValueError` where they are missing."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    if begin not in document or end not in document:
        raise ValueError(f"{DOCUMENT.name} lacks {begin.strip()} or {end.strip()}")
    before, _, rest = document.partition(begin)
    return before + begin + text + end + rest.partition(end)[2]


def main(names: Sequence[str]) -> None:
    """Make the named tables, or all, showing them as they come."""
    sections = make_sections()
    if unknown := set(names) - set(sections):
        sys.exit(f"no table {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    for name in names or sections:
        lines = []
        for line in sections[name]():
            print(line, end="", flush=True)
            lines.append(line)
        DOCUMENT.write_text(put(DOCUMENT.read_text(), name, "".join(lines)))
    draw_batches.main()


if __name__ == "__main__":
    main(sys.argv[1:])
