"""`kvpage fleet`: allocators on the nodes of a Ray cluster, and plans for ranks on several of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvpage.cli import completion
from kvpage.cli.fleet_output import print_fleet, print_plan
from kvpage.cli.options import AsJson, Quiet, examples
from kvpage.client.fleet_resources import Place
from kvpage.errors import NotSupported, SpecInvalid, how_to_install, shorten
from kvpage.exit_status import TRY_AGAIN

if TYPE_CHECKING:
    from kvpage.fleet.manager import FleetManager

app = typer.Typer(
    help="One plan for the ranks on several machines of a Ray cluster.",
    no_args_is_help=True,
    epilog=examples("kvpage fleet up --device cuda:0 --device cuda:1", "kvpage fleet plan model.yaml --name mimo"),
)
Address = Annotated[
    str, typer.Option("--address", metavar="ADDRESS", help="Of the Ray cluster; auto: the one on this machine.")
]
Force = Annotated[bool, typer.Option("--force", help="Also what is held, and without waiting for nodes that are away.")]


@app.command(
    epilog=examples(
        "kvpage fleet up",
        "kvpage fleet up --device cuda:0 --device cuda:1 --memory 0.9 --json",
        "kvpage fleet up --external",
    )
)
def up(
    address: Address = "auto",
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device", metavar="DEVICE", help="Served on each node; several times. Left out: host.",
            autocompletion=completion.among(lambda: ["host", "cuda:0"]),
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES|SHARE", help="Budget of each device's worker.")
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", metavar="DIR", help="On each node. Left out: KVPAGE_RUN_DIR there, or the default."),
    ] = None,
    external: Annotated[
        bool, typer.Option("--external", help="Something else runs the service on each node (an init system).")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="For the nodes to be ready, at most.")
    ] = 120.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Start an allocator on each node that has none, wait until all are ready, and mend plans.

    Nodes that have one stay as they are, so the same command again takes in nodes that came later or came back.
    """
    from kvpage.fleet.records import ServiceOptions

    options = ServiceOptions(devices=tuple(device or ["host"]), memory=memory, run_dir=run_dir, is_external=external)
    with _manager(address) as manager:
        print_fleet(manager.up(options, wait_s=wait_s), as_json=as_json)


@app.command(
    epilog=examples(
        "kvpage fleet plan model.yaml --name mimo",
        "kvpage fleet plan model.yaml --name mimo --place a/cuda:0 --place b/cuda:0",
    )
)
def plan(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Plan request, JSON or YAML; - for standard input.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the plan, by which engines find it.")],
    place: Annotated[
        list[str] | None,
        typer.Option("--place", metavar="NODE/DEVICE", help="Of each rank, in order. Left out: chosen by memory."),
    ] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Plan all ranks of the request, and reserve their pools on all nodes or on none.

    Ranks without memory_bytes have what is left of their device. The same name and request again: the same plan.
    """
    from kvpage.cli.files import read_request

    request, places = read_request(file), _places(place)
    if not isinstance(request, dict):
        raise SpecInvalid(f"a plan request is a mapping, not {type(request).__name__}")
    with _manager(address) as manager:
        print_plan(manager.plan(request, name, places), as_json=as_json)


@app.command(epilog=examples("kvpage fleet status", "kvpage fleet status --json"))
def status(address: Address = "auto", as_json: AsJson = False) -> None:
    """Nodes, devices, and how it is with each rank of each plan."""
    with _manager(address) as manager:
        print_fleet(manager.status(), as_json=as_json)


@app.command(epilog=examples("kvpage fleet down mimo", "kvpage fleet down --force --json"))
def down(
    name: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="Name or id. Left out: all plans, services and allocators.")
    ] = None,
    address: Address = "auto",
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Give a plan back on all its nodes, or end the fleet. Refused while an engine holds a pool.

    Exit status 75 while a node that is away still has a part of it.
    """
    with _manager(address) as manager:
        if name is None:
            left = manager.down(force=force)
        else:
            rest = manager.release(name, force=force)
            left = [] if rest is None else [rest]
    if as_json:
        typer.echo(msgspec.json.encode({"left": left}))
    elif not quiet:
        typer.echo("the fleet has ended" if name is None else f"gave {shorten(name)} back", err=True)
    for one in left:
        if not as_json:
            typer.echo(
                f"{one.name} ({one.id}) is not gone yet: {', '.join(one.unreachable) or 'a pool is held'}", err=True
            )
    if left:
        raise typer.Exit(TRY_AGAIN)


@contextmanager
def _manager(address: str) -> Iterator[FleetManager]:
    """Of the cluster, for one command. Raises `NotSupported`, `DeviceUnavailable`."""
    if find_spec("ray") is None:
        raise NotSupported(f"kvpage fleet needs Ray: {how_to_install('fleet')}")
    from kvpage.fleet import ray_cluster
    from kvpage.fleet.manager import FleetManager

    ray_cluster.connect(address)
    try:
        yield FleetManager(ray_cluster.RayTransport(), new_id=ray_cluster.new_id)
    finally:
        ray_cluster.disconnect()


def _places(texts: Sequence[str] | None) -> list[Place] | None:
    if not texts:
        return None
    places = []
    for text in texts:
        node, slash, device = text.rpartition("/")
        if not (node and slash and device):
            raise SpecInvalid(f"--place {shorten(text)} is not NODE/DEVICE, such as node-a/cuda:0")
        places.append(Place(node=node, device=device))
    return places
