"""`kvpage plan` of several ranks: a row for each sort of rank, then what holds for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvpage.cli.sizes import format_bytes
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan


def has_ranks(request: Any) -> bool:
    return isinstance(request, dict) and request.get("ranks") is not None


def show_ranks(request: Any, *, as_json: bool) -> None:
    """Plans all ranks and prints them; warnings go to standard error."""
    from kvpage.planner.ranks import plan_ranks

    ranked = plan_ranks(request)
    if as_json:
        typer.echo(ranked.to_json())
    else:
        print_ranks(ranked)
    for warning in ranked.warnings:
        typer.echo(f"warning: {warning}", err=True)


def print_ranks(ranked: RankedPlan) -> None:
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ranks", overflow="fold", min_width=6)
    for column in ("layers", "block bytes", "could hold", "buffer", "one request"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for ranks in _alike(ranked):
        table.add_row(_numbers(ranks), *_cells(ranked.ranks[ranks[0]], ranked.blocks_that_fit[ranks[0]]))
    console.print(table)
    for label, value in totals(ranked):
        console.print(f"{label:<22} {value}", soft_wrap=True)


def totals(ranked: RankedPlan) -> Iterator[tuple[str, str]]:
    """What is the same on all ranks, in words and numbers."""
    first = ranked.ranks[0]
    yield "strategy", first.strategy
    yield "ranks", str(len(ranked.ranks))
    yield "blocks", f"{ranked.num_blocks:,} on every rank"
    yield "groups", ", ".join(f"{group.block_size} tokens ({group.kind})" for group in first.groups) or "none"
    if ranked.kv_replicas is not None:
        yield "KV replicas", str(ranked.kv_replicas)
    if first.capacity.max_concurrency is not None:
        yield "requests at once", f"{first.capacity.max_concurrency:.2f} of {first.capacity.max_model_len:,} tokens"
    longest = first.capacity.longest_request_tokens
    yield "longest request", "any length" if longest is None else f"{longest:,} tokens"


def _alike(ranked: RankedPlan) -> list[list[int]]:
    """Ranks with the same plan, in the order of the first of each."""
    found: dict[str, list[int]] = {}
    for rank, plan in enumerate(ranked.ranks):
        found.setdefault(plan.plan_id, []).append(rank)
    return list(found.values())


def _numbers(ranks: Sequence[int]) -> str:
    """`0-3, 8`."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _cells(plan: Plan, could_hold: int | None) -> tuple[str, ...]:
    request_bytes = plan.capacity.request_bytes
    return (
        str(len(plan.layers)),
        f"{plan.bytes_per_block:,}",
        "-" if could_hold is None else f"{could_hold:,}",
        format_bytes(plan.buffer_size_bytes),
        "-" if request_bytes is None else format_bytes(request_bytes),
        plan.plan_id.removeprefix("sha256:")[:8],
    )
