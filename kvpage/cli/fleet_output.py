"""A fleet and its plans as tables."""

from __future__ import annotations

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpage.cli.sizes import format_bytes
from kvpage.client.fleet_resources import Fleet, FleetPlan
from kvpage.errors import printable


def print_fleet(fleet: Fleet, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(fleet))
        return
    console = Console(highlight=False)
    table = Table("node", "state", "device", "available", "of", box=SIMPLE_HEAD, pad_edge=False)
    for node in fleet.nodes:
        name = Text(printable(node.name))
        if not node.devices:
            table.add_row(name, node.state, "-", "-", "-")
        for device in node.devices:
            sizes = format_bytes(device.available_bytes), format_bytes(device.limit_bytes)
            table.add_row(name, node.state, device.device, *sizes)
    console.print(table)
    for node in fleet.nodes:
        if node.detail:
            console.print(f"{printable(node.name)}: {printable(node.detail)}", markup=False, soft_wrap=True)
    for plan in fleet.plans:
        _print_plan(console, plan)
    if not fleet.plans:
        console.print("no plans")


def print_plan(plan: FleetPlan, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(plan))
    else:
        _print_plan(Console(highlight=False), plan)


def _print_plan(console: Console, plan: FleetPlan) -> None:
    console.print(
        f"plan {plan.name} ({plan.id}): {plan.state}, {plan.num_blocks:,} blocks on each of {plan.world_size} ranks",
        markup=False,
        soft_wrap=True,
    )
    table = Table("rank", "node", "device", "state", "holders", "plan", box=SIMPLE_HEAD, pad_edge=False)
    for rank in plan.ranks:
        table.add_row(
            str(rank.rank),
            Text(printable(rank.node)),
            rank.device,
            rank.state,
            str(rank.num_holders),
            rank.plan_id.removeprefix("sha256:")[:8],
        )
    console.print(table)
