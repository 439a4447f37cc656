"""`kvpage top`: devices, pools, tenants and leases of a running service, again and again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from kvpage.cli.pools import RunDir, TokenFile, Url
from kvpage.cli.top_frame import Frame, Frames
from kvpage.cli.top_view import view
from kvpage.client.http import Client
from kvpage.errors import KvpageError
from kvpage.token_file import read_token

MIN_INTERVAL_S = 0.1


def top(
    pool: Annotated[str | None, typer.Option("--pool", help="Only the pools of this name or id.")] = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=MIN_INTERVAL_S, help="Seconds from one frame to the next.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a frame a line.")] = False,
    run_dir: RunDir = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> None:
    """Who has which memory and which blocks, who waits, and how fast they go. Ctrl-C ends it.

    Example: kvpage top --pool mimo
    """
    token = None if token_file is None else read_token(token_file)
    with Client(url, run_dir=run_dir, token=token) as client, contextlib.suppress(KeyboardInterrupt):
        frames = Frames(client, pool)
        first = frames.read()
        console = Console(highlight=False, markup=False)
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
    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(frame, problem), refresh=True)
            time.sleep(interval_s)
            try:
                frame, problem = frames.read(), ""
            except KvpageError as error:
                problem = error.message
