"""`kvpage pools`: create, list, show and delete pools of a running service."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpage.cli.files import read_request
from kvpage.cli.sizes import format_bytes
from kvpage.client.http import Client
from kvpage.client.resources import Holder, Pool
from kvpage.errors import PoolNotFound, printable
from kvpage.token_file import read_token

app = typer.Typer(help="Create, list, show and delete pools.", no_args_is_help=True)
RunDir = Annotated[str | None, typer.Option("--run-dir", help="Run directory of the service.", show_default=False)]
Url = Annotated[str | None, typer.Option("--url", help="Address of the service instead of its socket.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token for --url.")]
_POOL_ID = re.compile(r"pool-[0-9a-f]{16}")
Device = Annotated[str | None, typer.Option("--device", help="Only on this device.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _client(run_dir: str | None, url: str | None, token_file: Path | None) -> Client:
    token = None if token_file is None else read_token(token_file)
    return Client(url, run_dir=run_dir, token=token)


def _found(client: Client, pool: str, device: str | None) -> Pool:
    """The pool of that id or name. Ids come first: nobody chooses them."""
    if _POOL_ID.fullmatch(pool):
        with contextlib.suppress(PoolNotFound):
            found = client.get_pool(pool)
            if device in (None, found.device):
                return found
    return client.find_pool(pool, device)


@app.command()
def create(
    file: Annotated[str, typer.Argument(help="Plan request, JSON or YAML; - for standard input.")],
    name: Annotated[str, typer.Option("--name", help="Unique on the device; the same name and plan is the same pool.")],
    device: Annotated[str, typer.Option("--device", help="Device that holds it.")] = "host",
    rank: Annotated[int | None, typer.Option("--rank", help="Whose plan, where the request has ranks, from 0.")] = None,
    plan_id: Annotated[str | None, typer.Option("--plan-id", help="Refuse any other plan.")] = None,
    handle_kind: Annotated[
        str | None, typer.Option("--handle-kind", help="cuda_ipc for who cannot take what is best on the device.")
    ] = None,
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Plan the request on the server and commit the memory.

    Example: kvpage pools create model.yaml --name mimo
    """
    with _client(run_dir, url, token_file) as client:
        request = read_request(file)
        pool = client.create_pool(
            request, device=device, name=name, rank=rank, plan_id=plan_id, handle_kind=handle_kind
        )
    _print(pool, as_json)


@app.command("list")
def list_pools(run_dir: RunDir = None, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """All pools of the service."""
    with _client(run_dir, url, token_file) as client:
        pools = client.pools()
    if as_json:
        typer.echo(msgspec.json.encode(pools))
        return
    if not pools:
        typer.echo("no pools")
        return
    table = Table("pool", "id", "device", "state", "bytes", "holders", "plan", box=SIMPLE_HEAD, pad_edge=False)
    for pool in pools:
        size = format_bytes(pool.buffer_size_bytes)
        table.add_row(
            Text(printable(pool.name)), pool.id, pool.device, pool.state, size, str(pool.num_holders), pool.plan_id[:19]
        )
    Console(highlight=False).print(table)


@app.command()
def show(
    pool: Annotated[str, typer.Argument(help="Name or id of the pool.")],
    device: Device = None,
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """One pool: its plan, state, and who holds it."""
    with _client(run_dir, url, token_file) as client:
        found = _found(client, pool, device)
    _print(found, as_json)


@app.command()
def delete(
    pool: Annotated[str, typer.Argument(help="Name or id of the pool.")],
    device: Device = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds that holders may take to let go.")] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Forget a pool that is still held then.")] = False,
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> None:
    """Give a pool's memory back. Refused, naming the holders, while a process has it attached."""
    with _client(run_dir, url, token_file) as client:
        found = _found(client, pool, device)
        forgotten = client.delete_pool(found.id, wait_s=wait_s, force=force)
    console = Console(highlight=False, stderr=True, soft_wrap=True, markup=False)
    console.print(f"deleted {printable(found.name)} ({found.id}) on {found.device}")
    if forgotten is not None:
        console.print(f"{forgotten.pinned_bytes:,} bytes stay in use until {forgotten.num_holders} holders let go:")
        _print_holders(console, forgotten.holders, forgotten.num_holders)


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
