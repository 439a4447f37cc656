"""What `kvpage simulate` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpage.errors import printable
from kvpage.simulation.conversations import Conversations
from kvpage.simulation.report import CacheRow, Extent, Row
from kvpage.simulation.streams import Stream


def print_rows(
    stream: Stream, extent: Extent, rows: Sequence[Row], refused: Mapping[str, str], *, as_json: bool
) -> None:
    """A row for each layout, then the strategies that have none."""
    if as_json:
        found = {"rows": [asdict(row) for row in rows], "refused": dict(refused)}
        typer.echo(json.dumps({"stream": stream.name, "about": stream.about, "extent": asdict(extent), **found}))
        return
    console = Console(highlight=False)
    console.print(table(rows))
    console.print(f"stream {escape(printable(stream.name))}: {escape(stream.about)}", soft_wrap=True)
    _print_rest(console, extent, refused)


def print_cache_rows(
    conversations: Conversations,
    extent: Extent,
    rows: Sequence[CacheRow],
    refused: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    """A row for each layout and policy, then the strategies without a layout."""
    if as_json:
        found = {"rows": [asdict(row) for row in rows], "refused": dict(refused)}
        typer.echo(json.dumps({"conversations": asdict(conversations), "extent": asdict(extent), **found}))
        return
    console = Console(highlight=False)
    console.print(cache_table(rows))
    turns = f"{conversations.turns.low}-{conversations.turns.high} turns each"
    console.print(f"{conversations.people:,} conversations at once, {turns}", soft_wrap=True)
    console.print("evicts: each group its own oldest block, or the older of that and the oldest slab", soft_wrap=True)
    _print_rest(console, extent, refused)


def _print_rest(console: Console, extent: Extent, refused: Mapping[str, str]) -> None:
    console.print(_extent(extent), soft_wrap=True)
    for name, message in refused.items():
        console.print(f"[yellow]{escape(name)}[/] has no layout: {escape(printable(message))}", soft_wrap=True)


def cache_table(rows: Sequence[CacheRow]) -> Table:
    """What share of prefix tokens is found, and what the cache takes for it."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("strategy", "evicts"):
        shown.add_column(column, no_wrap=True)
    for column in ("found", "from – to", "cached", "pinned", "running", "evicted"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        evicts = "own" if row.policy == "own_oldest" else "older"
        cells = [row.name, evicts, f"{row.found_share:.3f}", f"{row.least_found:.3f} – {row.most_found:.3f}"]
        cells += [f"{row.cached_share:.1%}", f"{row.pinned_share:.1%}", f"{row.mean_running:,.1f}"]
        shown.add_row(*cells, f"{row.evicted_blocks:,.0f}")
    return shown


def table(rows: Sequence[Row]) -> Table:
    """Requests running and shares of the memory."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("strategy", no_wrap=True)
    for column in ("running", "from – to", "live", "held", "preempted", "finished"):
        shown.add_column(column, justify="right", no_wrap=True)
    has_refused = any(row.refused for row in rows)
    if has_refused:
        shown.add_column("too long", justify="right", no_wrap=True)
    for row in rows:
        cells = [row.name, f"{row.mean_running:,.1f}", f"{row.fewest_running:,.1f} – {row.most_running:,.1f}"]
        cells += [f"{row.live_share:.1%}", f"{row.held_share:.1%}", f"{row.preemptions:,.0f}", f"{row.finished:,.0f}"]
        shown.add_row(*cells, *([f"{row.refused:,.0f}"] if has_refused else []))
    return shown


def _extent(extent: Extent) -> str:
    start = f"after {extent.warm_up_steps:,}" if extent.warm_up_steps else "from an empty pool"
    runs = f"mean of {extent.runs:,} runs" if extent.runs > 1 else "one run"
    return f"{runs} of {extent.steps:,} steps {start}, seed {extent.seed}; %: of the memory"
