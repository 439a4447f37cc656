"""`kvpage pools`: create, list, show and delete pools of a running service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpage.cli import completion, pool_blocks
from kvpage.cli.options import AsJson, Device, PoolName, Quiet, examples, on_service
from kvpage.cli.pool_names import find
from kvpage.cli.sizes import format_bytes
from kvpage.errors import printable
from kvpage.exit_status import TRY_AGAIN

if TYPE_CHECKING:
    from kvpage.client.http import Client
    from kvpage.client.resources import Holder, Pool

app = typer.Typer(
    help="Create, list, show and delete pools, and see who holds their blocks.",
    no_args_is_help=True,
    epilog=examples("kvpage pools create model.yaml --name mimo", "kvpage pools list --json"),
)


@app.command(
    epilog=examples(
        "kvpage pools create model.yaml --name mimo",
        "kvpage pools create model.yaml --name mimo-2 --no-wait --json",
    )
)
@on_service
def create(
    client: Client,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Plan request, JSON or YAML; - for standard input.")],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Unique on the device; the same name and plan: the same pool.")
    ],
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="Device that holds it.", autocompletion=completion.devices),
    ] = "host",
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="Whose plan, where the request has ranks, from 0.")
    ] = None,
    plan_id: Annotated[str | None, typer.Option("--plan-id", metavar="ID", help="Refuse any other plan.")] = None,
    handle_kind: Annotated[
        str | None,
        typer.Option(
            "--handle-kind",
            metavar="KIND",
            help="cuda_ipc for who cannot take what is best on the device.",
            autocompletion=completion.among(lambda: ["cuda_ipc"]),
        ),
    ] = None,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait", min=0, metavar="SECONDS", show_default="as long as it takes", help="For its memory, at most."
        ),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="End when the memory is reserved.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Plan the request on the server and commit the memory.

    Waits until the pool is ready, with a bar on a terminal.
    The service goes on committing when nobody waits; the same command again finds the same pool and waits on.
    Exit status 75 when the time to wait is over.
    """
    from kvpage.cli.files import read_request
    from kvpage.cli.pool_waiting import Waiting, wait_until_committed

    request = read_request(file)
    pool = client.create_pool(
        request, device=device, name=name, rank=rank, plan_id=plan_id, handle_kind=handle_kind, wait_s=0
    )
    if not no_wait:
        pool = wait_until_committed(client, pool, Waiting.of(wait_s, quiet=quiet, as_json=as_json))
    _print(pool, as_json)
    if pool.state == "creating" and not no_wait:
        raise typer.Exit(TRY_AGAIN)


@app.command("list", epilog=examples("kvpage pools list", "kvpage pools list --json"))
@on_service
def list_pools(client: Client, as_json: AsJson = False) -> None:
    """All pools of the service."""
    pools = client.pools()
    if as_json:
        typer.echo(msgspec.json.encode(pools))
        return
    if not pools:
        typer.echo("no pools")
        return
    table = Table("pool", "id", "device", "state", "size", "holders", "plan", box=SIMPLE_HEAD, pad_edge=False)
    for pool in pools:
        size = format_bytes(pool.buffer_size_bytes)
        table.add_row(
            Text(printable(pool.name)), pool.id, pool.device, pool.state, size, str(pool.num_holders), pool.plan_id[:19]
        )
    Console(highlight=False).print(table)


@app.command(epilog=examples("kvpage pools show mimo", "kvpage pools show mimo --device host --json"))
@on_service
def show(client: Client, pool: PoolName, device: Device = None, as_json: AsJson = False) -> None:
    """One pool: its plan, state, and who holds it."""
    _print(find(client, pool, device), as_json)


@app.command(epilog=examples("kvpage pools delete mimo --wait 60", "kvpage pools delete mimo-2 --force --json"))
@on_service
def delete(
    client: Client,
    pool: PoolName,
    device: Device = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="That holders may take to let go.")
    ] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Forget a pool that is still held then.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Give a pool's memory back. Refused, naming the holders, while a process has it attached."""
    from kvpage.cli.pool_waiting import Waiting, delete_when_free

    found = find(client, pool, device)
    forgotten = delete_when_free(client, found, Waiting.of(wait_s, quiet=quiet, as_json=as_json), force=force)
    if as_json:
        told = {"id": found.id, "name": found.name, "device": found.device, "forgotten": forgotten}
        typer.echo(msgspec.json.encode(told))
        return
    console = Console(highlight=False, stderr=True, soft_wrap=True, markup=False)
    if not quiet:
        console.print(f"deleted {printable(found.name)} ({found.id}) on {found.device}")
    if forgotten is not None:
        console.print(f"{forgotten.pinned_bytes:,} bytes stay in use until {forgotten.num_holders} holders let go:")
        _print_holders(console, forgotten.holders, forgotten.num_holders)


pool_blocks.add_commands(app)


def _print(pool: Pool, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(pool))
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"pool       {printable(pool.name)} ({pool.id})")
    console.print(f"device     {pool.device}")
    console.print(f"state      {pool.state}")
    console.print(f"plan       {pool.plan_id}")
    console.print(f"memory     {pool.committed_bytes:,} of {pool.buffer_size_bytes:,} bytes committed")
    if pool.error:
        console.print(f"error      {pool.error.code}: {printable(pool.error.message)}")
    _print_holders(console, pool.holders, pool.num_holders)
    if not pool.num_holders:
        console.print("held by    nobody")


def _print_holders(console: Console, holders: Sequence[Holder], num_holders: int) -> None:
    for holder in holders:
        name = printable(holder.client_name) or "a process"
        console.print(f"held by    {name} (pid {holder.pid or '?'}, uid {holder.uid})")
    if num_holders > len(holders):
        console.print(f"           and {num_holders - len(holders)} more")
