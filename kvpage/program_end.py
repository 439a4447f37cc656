"""How a program of kvpage ends, whatever its work was: Ctrl-C at any time, and an output that takes nothing.

Ctrl-C is dealt with before anything else is loaded, so this needs little.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def end_at_once_when_interrupted() -> None:
    """Without a word, before the work begins and when it is over: nothing has to be undone, and Python would show a
    traceback of whatever module it was loading. What was started to take no notice of Ctrl-C goes on to take none.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))


def end_of(work: Callable[[], int | None], *, as_json: bool) -> int:
    """The exit status of `work`, which was told what it prints. In it Ctrl-C is a KeyboardInterrupt, so that what it
    has begun is undone.
    """
    from kvpage.exit_status import FAILED, INTERRUPTED

    prepare_streams()
    try:
        with _raising():
            status = _status_of(work)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        _give_output_up(error, as_json=as_json)
        return FAILED
    return status


def prepare_streams() -> None:
    """Let no output fail for a character that the terminal's encoding lacks, or because a stream is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _raising() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _status_of(work: Callable[[], int | None]) -> int:
    """Also of what ends by itself, as parsers of command lines do behind a help."""
    try:
        return work() or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _give_output_up(error: OSError, *, as_json: bool) -> None:
    """Nobody reads any more (`| head`), which is no error to speak of; or the disk is full, which is."""
    if not isinstance(error, BrokenPipeError):
        import json

        told = {"code": "output", "message": str(error), "details": {"errno": error.errno}, "retryable": False}
        with suppress(OSError):
            sys.stderr.write(f"{json.dumps(told)}\n" if as_json else f"error: {error}\n")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # Python flushes both once more at exit
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
