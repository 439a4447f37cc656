"""`kvpage top`: devices, pools, tenants and leases of a running service, again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from kvpage.cli import completion
from kvpage.cli.ending import Ending
from kvpage.cli.options import examples, on_service
from kvpage.errors import KvpageError

if TYPE_CHECKING:
    from kvpage.cli.top_frame import Frame, Frames
    from kvpage.client.http import Client

MIN_INTERVAL_S = 0.1
EXAMPLES = examples("kvpage top --once", "kvpage top --pool mimo --interval 1", "kvpage top --once --json")


@on_service
def top(
    client: Client,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool", metavar="POOL", help="Only the pools of this name or id.", autocompletion=completion.pools
        ),
    ] = None,
    interval_s: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=MIN_INTERVAL_S, help="From one frame to the next."),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a frame a line; errors too.")] = False,
) -> None:
    """Who has which memory and which blocks, who waits, and how fast they go. Ctrl-C ends it."""
    from kvpage.cli.top_frame import Frames
    from kvpage.cli.top_view import view

    frames = Frames(client, pool)
    first = frames.read()
    console = Console(highlight=False, markup=False)
    with Ending().within():  # a screen that was taken is given back
        if not once and not as_json and console.is_terminal and not console.is_dumb_terminal:
            _show(console, first, frames, interval_s)
            return
        for frame in _following(first, frames, interval_s, once=once):
            if as_json:
                typer.echo(msgspec.json.encode(frame))
            else:
                console.print(view(frame))


def _following(first: Frame, frames: Frames, interval_s: float, *, once: bool) -> Iterator[Frame]:
    yield first
    while not once:
        time.sleep(interval_s)
        yield frames.read()


def _show(console: Console, frame: Frame, frames: Frames, interval_s: float) -> None:
    """On the whole screen until it is interrupted. A service that does not answer meanwhile may come again."""
    from kvpage.cli.top_view import view

    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(frame, problem), refresh=True)
            time.sleep(interval_s)
            try:
                frame, problem = frames.read(), ""
            except KvpageError as error:
                problem = error.message
