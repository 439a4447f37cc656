"""Tables and errors for people. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpage.cli.sizes import format_bytes
from kvpage.errors import KvpageError, printable
from kvpage.plans import GroupPlan, LayerPlan, Plan

WIDE_CHARS = 120
_INDEX = re.compile(r"\.\d+\.")  # of a layer inside its name: model.layers.3.self_attn.attn


def print_error(error: KvpageError) -> None:
    """The code and the message, then each fault that it does not name, with its place in the request."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    message = "\n".join(printable(line) for line in error.message.split("\n"))
    console.print(f"[bold red]error[/] {error.code}: {escape(message)}")
    is_first_named = bool(error.errors) and error.errors[0].detail in error.message
    for fault in error.errors[1:] if is_first_named else error.errors:
        console.print(f"  {escape(printable(fault.pointer or '/'))}: {escape(printable(fault.detail))}")


def print_plan(plan: Plan, *, all_layers: bool = False) -> None:
    """A row for each run of like layers, then the totals. Reasons stand below the table where it would be too wide."""
    console = Console(highlight=False)
    runs = _runs(list(plan.layers.values()), all_layers)
    reasons_inside = console.width >= WIDE_CHARS
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")  # the one column that may be broken: numbers must be whole
    table.add_column("decision", no_wrap=True)
    for column in ("block", "page bytes", "padding"):
        table.add_column(column, justify="right", no_wrap=True)
    if reasons_inside:
        table.add_column("reason", overflow="fold")
    for run in runs:
        cells = _cells(run)
        table.add_row(*cells, *([escape(run[0].reason)] if reasons_inside else []))
    console.print(table)
    if not reasons_inside:
        for run in runs:
            console.print(f"{_names(run)}: {escape(run[0].reason)}", soft_wrap=True)
        console.print()
    for label, value in (*totals(plan), *choice(plan)):
        console.print(f"{label:<22} {value}", soft_wrap=True)


def _cells(run: Sequence[LayerPlan]) -> tuple[str, ...]:
    layer = run[0]
    padding = layer.page_size_bytes - layer.real_page_size_bytes
    share = f" ({padding / layer.page_size_bytes:.1%})" if padding else ""
    return (
        _names(run),
        layer.decision,
        str(layer.block_size),
        f"{layer.page_size_bytes:,}",
        f"{padding:,}{share}",
    )


def totals(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a person asks of a plan, in words and numbers."""
    waste, capacity = plan.waste, plan.capacity
    yield "plan", plan.plan_id
    yield "strategy", plan.strategy
    groups = Counter(_group(group) for group in plan.groups)
    yield "groups", ", ".join(f"{count} of {look}" for look, count in groups.items()) or "none"
    blocks = f"{plan.num_blocks:,} of {plan.bytes_per_block:,} bytes"
    is_cut = any(group.blocks_per_slab > 1 for group in plan.groups)
    yield (
        "slabs" if is_cut else "blocks",
        f"{blocks}, buffer {plan.buffer_size_bytes:,} bytes ({format_bytes(plan.buffer_size_bytes)})",
    )
    if capacity.max_model_len is not None and capacity.request_bytes is not None:
        fits = "-" if capacity.max_concurrency is None else f"{capacity.max_concurrency:.2f}"
        yield (
            "one request",
            (
                f"{capacity.max_model_len:,} tokens: {capacity.request_bytes:,} bytes "
                f"({format_bytes(capacity.request_bytes)}), {fits} fit at once"
            ),
        )
    longest = capacity.longest_request_tokens
    yield "longest request", "any length" if longest is None else f"{longest:,} tokens"
    if waste.total_bytes:
        yield (
            "of a request's bytes",
            ", ".join(
                f"{part / waste.total_bytes:.1%} {name}"
                for name, part in (
                    ("live", waste.live_bytes),
                    ("padding", waste.padding_bytes),
                    ("group rounding", waste.group_rounding_bytes),
                    ("tail", waste.tail_bytes),
                )
            ),
        )


def choice(plan: Plan) -> Iterator[tuple[str, str]]:
    """How the plan was chosen: what requests of its workload hold, and what was weighed beside it."""
    found = plan.efficiency
    if found is None:
        return
    lengths = ", ".join(
        f"{part.min_tokens:,}" if part.min_tokens == part.max_tokens else f"{part.min_tokens:,}-{part.max_tokens:,}"
        for part in found.workload
    )
    least = f"at least {_more(found.floor_over_live)} in any layout"
    held = f"{_more(found.held_over_live)} more than it needs, {least} (requests of {lengths} tokens)"
    yield "a workload holds", held
    for other in plan.rejected:
        cost = "-" if other.cost is None else _more(other.cost)
        yield f"not {other.strategy}", escape(f"{cost}: {other.reason}" if other.cost is None else other.reason)


def _more(ratio: float) -> str:
    return f"{ratio - 1:.2%}"


def _group(group: GroupPlan) -> str:
    tokens = "state" if group.kind == "mamba" else f"{group.block_size} tokens"
    cut = "" if group.blocks_per_slab == 1 else f", {group.blocks_per_slab:,} blocks a slab"
    layers = "1 layer" if len(group.layers) == 1 else f"{len(group.layers)} layers"
    return f"{layers} × {tokens} ({group.kind}{cut})"


def _runs(layers: Sequence[LayerPlan], all_layers: bool) -> list[list[LayerPlan]]:
    """Layers that differ only in name, group and offset, wherever they stand; in the order of the first of each."""
    runs: dict[object, list[LayerPlan]] = {}
    for position, layer in enumerate(layers):
        runs.setdefault(position if all_layers else _look(layer), []).append(layer)
    return list(runs.values())


def _look(layer: LayerPlan) -> tuple[object, ...]:
    shapes = tuple(view.shape for view in layer.tensors)
    family = _INDEX.sub(".*.", layer.name).rstrip("0123456789")
    return (family, layer.kind, layer.decision, layer.block_size, layer.page_size_bytes, layer.reason, shapes)


def _names(run: Sequence[LayerPlan]) -> str:
    """Of one layer its name; of several the first and the last, or one pattern where the index stands inside."""
    first = run[0].name
    if len(run) == 1:
        return escape(first)
    if _INDEX.search(first):
        return f"{len(run)} × {escape(_INDEX.sub('.*.', first))}"
    return f"{escape(first)} … {escape(run[-1].name)}"
