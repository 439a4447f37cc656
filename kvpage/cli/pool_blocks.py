"""`kvpage pools leases`, `tenants`, `set-tenant` and `clear-prefixes`: who has the blocks of a pool, on whose terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from kvpage.cli import completion
from kvpage.cli.options import AsJson, Device, PoolName, Quiet, examples, on_service
from kvpage.cli.pool_names import find
from kvpage.cli.sizes import parse_bytes
from kvpage.errors import printable

if TYPE_CHECKING:
    from kvpage.client.block_resources import TenantState
    from kvpage.client.http import Client

NO_QUOTA = "none"


def add_commands(app: typer.Typer) -> None:
    app.command("leases", epilog=examples("kvpage pools leases mimo", "kvpage pools leases mimo --json"))(leases)
    app.command("tenants", epilog=examples("kvpage pools tenants mimo", "kvpage pools tenants mimo --json"))(tenants)
    app.command(
        "set-tenant",
        epilog=examples(
            "kvpage pools set-tenant mimo team-a --quota 1MiB --weight 2",
            "kvpage pools set-tenant mimo team-a --quota none --json",
        ),
    )(set_tenant)
    app.command("clear-prefixes", epilog=examples("kvpage pools clear-prefixes mimo"))(clear_prefixes)


@on_service
def leases(client: Client, pool: PoolName, device: Device = None, as_json: AsJson = False) -> None:
    """Who has blocks of a pool: the first 64 leases, with the processes that hold them.

    A lease ends with its process, or, over HTTP, when its time is over. To free its blocks, end the process.
    """
    from kvpage.cli.top_view import leases_table

    found = find(client, pool, device)
    states = client.leases(found.id)
    if as_json:
        typer.echo(msgspec.json.encode(states))
        return
    blocks = client.get_pool(found.id).blocks
    if not states or blocks is None:
        typer.echo("no leases")
        return
    console = Console(highlight=False, markup=False)
    console.print(leases_table(states, blocks.groups))
    if blocks.num_leases > len(states):
        console.print(f"and {blocks.num_leases - len(states):,} more leases")


@on_service
def tenants(client: Client, pool: PoolName, device: Device = None, as_json: AsJson = False) -> None:
    """Who shares a pool: what they hold, what they may, who waits and has waited."""
    states = client.tenants(find(client, pool, device).id)
    if as_json:
        typer.echo(msgspec.json.encode(states))
        return
    _print_tenants(states)


@on_service
def set_tenant(
    client: Client,
    pool: PoolName,
    name: Annotated[
        str, typer.Argument(metavar="TENANT", help="'' for those who name none.", autocompletion=completion.tenants)
    ],
    quota: Annotated[
        str | None,
        typer.Option("--quota", metavar="BYTES", help="Most that its leases may hold, such as 8GiB; none: no limit."),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option("--priority", metavar="N", help="-100 to 100; the higher is served strictly before the lower."),
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option("--weight", metavar="N", help="1 to 1,000; its share among those of the same priority."),
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Change what a tenant may. What is not given stays as it is; what it holds beyond a new quota stays its own."""
    found = find(client, pool, device)
    asked = None if quota in (None, NO_QUOTA) else parse_bytes(str(quota))
    before = next((one for one in client.tenants(found.id) if one.name == name), None)
    state = client.set_tenant(
        found.id,
        name,
        quota_bytes=before.quota_bytes if quota is None and before is not None else asked,
        priority=_chosen(priority, 0 if before is None else before.priority),
        weight=_chosen(weight, 1 if before is None else before.weight),
    )
    if as_json:
        typer.echo(msgspec.json.encode(state))
    elif not quiet:
        _print_tenants([state])


@on_service
def clear_prefixes(
    client: Client, pool: PoolName, device: Device = None, quiet: Quiet = False, as_json: AsJson = False
) -> None:
    """Forget every cached prefix of a pool, because the weights have changed. Blocks stay with those who hold them."""
    found = find(client, pool, device)
    client.clear_prefixes(found.id)
    if as_json:
        typer.echo(msgspec.json.encode({"id": found.id, "name": found.name, "device": found.device, "cleared": True}))
    elif not quiet:
        typer.echo(f"cleared the prefixes of {printable(found.name)} ({found.id}) on {found.device}", err=True)


def _chosen(typed: int | None, before: int) -> int:
    return before if typed is None else typed


def _print_tenants(states: list[TenantState]) -> None:
    from kvpage.cli.top_view import tenants_table

    if not states:
        typer.echo("no tenants")
        return
    Console(highlight=False, markup=False).print(tenants_table(states))
