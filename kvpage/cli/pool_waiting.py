"""Waiting for a pool: until its memory is committed, or until its holders have let go. With progress on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from kvpage.cli.sizes import format_bytes
from kvpage.client.calls import MAX_WAIT_S
from kvpage.client.http import Client
from kvpage.client.resources import ForgottenPool, Pool
from kvpage.errors import Conflict, error_from_code, printable
from kvpage.exit_status import INTERRUPTED

_LOOK_S = 0.25
"""From one look at the pool to the next, where somebody watches."""
_SILENT_S = 0.5
"""What takes no longer needs no bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    wait_s: float | None
    """At most; None: as long as it takes."""
    as_json: bool
    console: Console | None
    """Where progress is shown; None: nowhere."""

    @classmethod
    def of(cls, wait_s: float | None, *, quiet: bool, as_json: bool) -> Self:
        console = Console(stderr=True, highlight=False)
        is_seen = console.is_terminal and not console.is_dumb_terminal and not quiet and not as_json
        return cls(wait_s=wait_s, as_json=as_json, console=console if is_seen else None)

    def look_s(self, left_s: float) -> float:
        """How long to ask at once."""
        return min(left_s, MAX_WAIT_S if self.console is None else _LOOK_S)


def wait_until_committed(client: Client, pool: Pool, waiting: Waiting) -> Pool:
    """The pool when it is ready, or as it is when the time is over. Raises why it failed.

    Ctrl-C ends the waiting and the process, not the pool.
    """
    deadline_s = _deadline_s(waiting)
    with _explained(waiting, pool, _goes_on(pool)):
        if waiting.console is not None:
            pool = _looked(client, pool, deadline_s, min(_SILENT_S, MAX_WAIT_S))
        with _bar(waiting.console, pool) as show:
            while pool.state == "creating" and time.monotonic() < deadline_s:
                pool = _looked(client, pool, deadline_s, waiting.look_s(MAX_WAIT_S))
                show(pool)
    if pool.error is not None:
        raise error_from_code(pool.error.code, pool.error.message, details=pool.error.details)
    return pool


def delete_when_free(client: Client, pool: Pool, waiting: Waiting, *, force: bool) -> ForgottenPool | None:
    """As `Client.delete_pool`, saying meanwhile for whom it waits."""
    deadline_s = _deadline_s(waiting)
    with _explained(waiting, pool, _not_deleted(pool)), _spinner(waiting.console) as show:
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            look_s = left_s if waiting.console is None else waiting.look_s(left_s)
            try:
                return client.delete_pool(pool.id, wait_s=look_s, force=force and look_s >= left_s)
            except Conflict as error:
                if look_s >= left_s:
                    raise
                show(f"waiting for {_holders(error)} of {printable(pool.name)}, {left_s:,.0f} s left")


def _deadline_s(waiting: Waiting) -> float:
    return time.monotonic() + (float("inf") if waiting.wait_s is None else waiting.wait_s)


def _looked(client: Client, pool: Pool, deadline_s: float, at_most_s: float) -> Pool:
    """What it is by then, or earlier when it changes."""
    left_s = max(0.0, deadline_s - time.monotonic())
    return client.get_pool(pool.id, wait_s=min(left_s, at_most_s)) if pool.state == "creating" else pool


def _holders(error: Conflict) -> str:
    holders = error.details.get("holders") or []
    named = [f"{one.get('client_name') or 'a process'} (pid {one.get('pid') or '?'})" for one in holders[:2]]
    more = [f"{len(holders) - 2} more"] if len(holders) > 2 else []
    return printable(", ".join([*named, *more])) or "the holders"


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def _goes_on(pool: Pool) -> str:
    name = printable(pool.name)
    return (
        f"the service goes on committing {name} ({pool.id}); see how far it is with `kvpage pools show {pool.id}`, or"
        f" give the memory back with `kvpage pools delete {pool.id}`"
    )


def _not_deleted(pool: Pool) -> str:
    return (
        f"{printable(pool.name)} ({pool.id}) stays, unless its holders let go in this moment; see with"
        f" `kvpage pools show {pool.id}`"
    )


@contextlib.contextmanager
def _explained(waiting: Waiting, pool: Pool, message: str) -> Iterator[None]:
    """Whoever interrupts the waiting is told what goes on."""
    try:
        yield
    except KeyboardInterrupt:
        told: dict[str, Any] = {"code": "interrupted", "message": message, "details": {"pool_id": pool.id}}
        shown = json.dumps(told | {"retryable": True}) if waiting.as_json else f"interrupted: {message}"
        sys.stderr.write(f"{shown}\n")
        raise typer.Exit(INTERRUPTED) from None


# --- what is shown ----------------------------------------------------------------------------------------------------


class _Bytes(ProgressColumn):
    """`12.5 GiB of 64 GiB, 3.1 GiB/s`."""

    def render(self, task: Task) -> Text:
        rate = "" if not task.speed else f", {format_bytes(int(task.speed))}/s"
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}{rate}")


def _whole(overflow: Literal["fold", "ellipsis"] = "fold") -> Column:
    """On one line, whatever the terminal's width."""
    return Column(no_wrap=True, overflow=overflow)


@contextlib.contextmanager
def _bar(console: Console | None, pool: Pool) -> Iterator[Callable[[Pool], None]]:
    if console is None or pool.state != "creating":
        yield lambda _: None
        return
    name = TextColumn("committing {task.description}", markup=False, table_column=_whole(overflow="ellipsis"))
    columns = (name, BarColumn(bar_width=16), _Bytes(table_column=_whole()), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(printable(pool.name), total=pool.buffer_size_bytes, completed=pool.committed_bytes)

        def show(seen: Pool) -> None:
            progress.update(task, completed=seen.committed_bytes, refresh=True)

        show(pool)
        yield show


@contextlib.contextmanager
def _spinner(console: Console | None) -> Iterator[Callable[[str], None]]:
    if console is None:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        tasks: list[TaskID] = []

        def show(text: str) -> None:
            if not tasks:  # most pools are deleted at once, and then there is nothing to say
                tasks.append(progress.add_task(text, total=None))
            progress.update(tasks[0], description=text, refresh=True)

        yield show
