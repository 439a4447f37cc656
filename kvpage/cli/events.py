"""`kvpage events`: what happens in a service, as it happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvpage.cli import completion
from kvpage.cli.ending import Ending
from kvpage.cli.options import examples, on_service
from kvpage.cli.pool_names import find
from kvpage.errors import KvpageError, SpecInvalid, nearest, printable, shorten
from kvpage.exit_status import FAILED, TRY_AGAIN, error_json

if TYPE_CHECKING:
    from kvpage.client.events import Event
    from kvpage.client.http import Client
    from kvpage.client.resources import Pool

KINDS = ("stored", "removed", "missed", "pool")
_HASHES_SHOWN = 2
_HASH_CHARS = 12

EXAMPLES = examples(
    "kvpage events --kind pool",
    "kvpage events --pool mimo --json --timeout 60",
    "kvpage events --pool mimo --kind pool --changes --count 1 --timeout 300",
)


@on_service
def events(
    client: Client,
    pool: Annotated[
        str | None,
        typer.Option("--pool", metavar="POOL", help="Only of the pool of this name or id, until it has gone.",
                     autocompletion=completion.pools),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help=f"Only these: {', '.join(KINDS)}. Several times.",
                     autocompletion=completion.among(lambda: KINDS)),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--last-event-id", "--since", metavar="ID",
                     help="Go on after this event. Left out: begin with the pools that there are."),
    ] = None,
    is_of_changes: Annotated[
        bool, typer.Option("--changes", help="Leave out the states that pools have when it begins.")
    ] = False,
    count: Annotated[
        int | None, typer.Option("--count", min=1, metavar="N", help="End after so many events.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="End after this time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an event a line; errors too.")] = False,
) -> None:  # fmt: skip
    """Pools and cached contents that come and go, a line each, as they do. Ctrl-C ends it.

    When the service is restarted it goes on where it was, and says so on standard error.
    Exit status 75 when the time is over before --count events came, or when the service stays away for 30 s.
    """
    wanted = _checked_kinds(kinds)
    if is_of_changes and after is not None:
        raise SpecInvalid("--since goes on after an event, and --changes begins now: give one of the two")
    pool_id = None if pool is None else find(client, pool, None).id
    if pool_id is None:
        client.devices()  # a service that is not there is said now, not after the time for one that is restarted
    standing = _Standing(client.pools() if is_of_changes else ())  # before the stream, so that no change is between
    printer = _Printer(as_json=as_json)
    left = count
    with Ending().within(), _ends_with_its_reader(), _time_is_over_after(timeout_s) as clock:
        for event in client.events(pool_id, after=after, on_loss=printer.lost):
            if standing.has(event) or (wanted and event.kind not in wanted):
                continue
            printer.print(event)
            left = None if left is None else left - 1
            if left == 0:
                return
    if left is not None:  # or the pool has gone
        raise typer.Exit(TRY_AGAIN if clock.is_over else FAILED)


def _checked_kinds(kinds: list[str] | None) -> frozenset[str]:
    """Raises `SpecInvalid`."""
    for kind in kinds or ():
        if kind not in KINDS:
            raise SpecInvalid(f"--kind {shorten(kind)!r} is none of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    return frozenset(kinds or ())


class _Standing:
    """The states of pools when it begins: a stream tells them first, and they are no news."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._states = {pool.id: pool.state for pool in pools}

    def has(self, event: Event) -> bool:
        """Whether that is all that the event says. What a pool is told of next is news, whatever it is."""
        if event.kind != "pool":
            return False
        data = msgspec.to_builtins(event.data)
        was = self._states.pop(data["pool_id"], None)
        return was is not None and was == str(data["state"])


class _Printer:
    """Every line is written whole and at once: whoever reads a pipe waits for it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_lost = False

    def print(self, event: Event) -> None:
        if self._is_lost and not self._as_json:
            sys.stderr.write("the service answers again; events go on\n")
        self._is_lost = False
        sys.stdout.write((_as_json(event) if self._as_json else _for_people(event)) + "\n")
        sys.stdout.flush()

    def lost(self, error: KvpageError) -> None:
        self._is_lost = True
        shown = error_json(error) if self._as_json else f"lost the service, trying again: {printable(error.message)}"
        sys.stderr.write(shown + "\n")
        sys.stderr.flush()


def _as_json(event: Event) -> str:
    return msgspec.json.encode({"kind": event.kind, "id": event.id, "data": event.data}).decode()


def _for_people(event: Event) -> str:
    data = msgspec.to_builtins(event.data)
    words = [time.strftime("%H:%M:%S"), f"{event.kind:<7}", data["pool_id"]]
    if event.kind == "pool":
        words += [f"{printable(data['name'])} on {printable(data['device'])}: {data['state']}"]
    elif "hashes" in data:
        hashes = [one[:_HASH_CHARS] for one in data["hashes"][:_HASHES_SHOWN]]
        more = len(data["hashes"]) - len(hashes)
        words += [f"group {data['group']}: {', '.join(hashes)}{f' and {more:,} more' if more else ''}"]
    else:
        words += ["events are gone: list its contents anew"]
    return " ".join(words)


class _NobodyReads(BaseException):
    """Like an interrupt, as `_TimeIsOver`."""


@contextlib.contextmanager
def _ends_with_its_reader() -> Iterator[None]:
    """A pipe whose reader has gone (`| head -1`) ends the block when that happens, not with the next event."""
    if not _writes_to_a_pipe():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        raise _NobodyReads

    def watch() -> None:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors only, which are told unasked
        poll.poll()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)  # which is waiting for an answer

    signal.signal(signal.SIGUSR1, end)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except _NobodyReads:
        raise BrokenPipeError from None
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the watch goes on as long as the process


def _writes_to_a_pipe() -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # a stream of another kind
        return False


class _Clock:
    is_over = False


class _TimeIsOver(BaseException):
    """Like an interrupt: nobody who handles errors on the way shall take it for one."""


@contextlib.contextmanager
def _time_is_over_after(timeout_s: float | None) -> Iterator[_Clock]:
    """Ends the block then, whatever it waits for: no event need come."""
    clock = _Clock()
    if timeout_s is None:
        yield clock
        return

    def end(_: int, __: FrameType | None) -> None:
        raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        with contextlib.suppress(_TimeIsOver):
            try:
                yield clock
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            return
        clock.is_over = True
    finally:
        signal.signal(signal.SIGALRM, before)
