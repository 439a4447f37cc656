"""The log of the API process: one line of JSON, or text on a terminal, with the names of fields that the workers use.

The rest of the server logs through `logging`, with fields as `extra`; so do the web server and other libraries.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvpage.errors import printable
from kvpage_server.rate_limit import Buckets
from kvpage_server.settings import LogFormat, LogLevel
from kvpage_server.standard_error import write_line

WARNINGS_PER_S = 1.0
WARNINGS_AT_ONCE = 20.0
_STDERR = 2
_OF_WEB_SERVER = "uvicorn.error"
_FIRST = ("time", "level", "event", "logger", "pid", "request_id")
"""What every line begins with, where it has it."""
_NOT_FOR_US = ("color_message", "message", "asctime")
"""What the web server adds for a formatter of its own, and what other formatters leave in a record."""


def configure_logging(log_format: LogFormat, log_level: LogLevel) -> None:
    """From here on everything this process logs goes to standard error in that form."""
    handler = _StandardError()
    handler.setFormatter(formatter(is_json=log_format == "json" or (log_format == "auto" and not os.isatty(_STDERR))))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger(_OF_WEB_SERVER).addFilter(SparingWarnings())


class SparingWarnings(logging.Filter):
    """The web server warns of every connection that speaks no HTTP, whoever opened it: strangers must not fill the
    disk. Errors are kept: those are faults of the service.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._warnings = Buckets(WARNINGS_PER_S, burst=WARNINGS_AT_ONCE, max_names=1, clock_s=clock_s)
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if self._warnings.take("all") > 0:
            self._num_left_out += 1
            return False
        if self._num_left_out:
            record.num_left_out_before = self._num_left_out
            self._num_left_out = 0
        return True


class _StandardError(logging.Handler):
    """Writes as the workers do: no disk and no reader ends or stops the process, nor makes what could not be written
    its exit status.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:  # noqa: BLE001  # a line that cannot be formatted is no reason to fail who logs it
            write_line(f"a line of {record.name} could not be formatted")


def formatter(*, is_json: bool) -> logging.Formatter:
    last: list[Processor]
    if is_json:
        last = [structlog.processors.format_exc_info, _ordered, structlog.processors.JSONRenderer()]
    else:
        # Not the traceback that shows local variables: tokens are among them.
        plain = structlog.dev.plain_traceback
        colors = os.isatty(_STDERR) and "NO_COLOR" not in os.environ
        last = [
            _one_line,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain, timestamp_key="time"),
        ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ExtraAdder(),
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            _add_time_and_process,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _add_time_and_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    record = cast("logging.LogRecord", event["_record"])
    event["time"] = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    event["pid"] = record.process
    for name in _NOT_FOR_US:
        event.pop(name, None)
    return event


def _ordered(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    first = {name: event.pop(name) for name in _FIRST if name in event}
    return {**first, **event}


def _one_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """What a client sent may be part of an event; it must not look like a line of its own."""
    event["event"] = printable(str(event["event"]))
    return event
