"""How a command ends: its exit status, and its error as JSON. The same for every `kvpage …`."""

from __future__ import annotations

import json

from kvpage.errors import KvpageError, SpecInvalid

DONE, FAILED, WRONG_INPUT = 0, 1, 2
TRY_AGAIN = 75
"""EX_TEMPFAIL of <sysexits.h>: what a script may try again without anybody changing anything."""
INTERRUPTED, TERMINATED = 130, 143
"""128 and the number of the signal, as shells have it."""

MEANINGS = {
    DONE: "It is done.",
    FAILED: "It was refused or went wrong; or, without a word, nobody reads the output any more (`| head`).",
    WRONG_INPUT: "The command line, a file or a request is wrong, or needs what is not installed. Nothing was changed.",
    TRY_AGAIN: "Not now: no service answers there, it has no room, or the time to wait is over. Try again later.",
    INTERRUPTED: "Ctrl-C (SIGINT). Commands that go on until then, such as `kvpage events`, end so too.",
    TERMINATED: "SIGTERM; 129 is SIGHUP, a terminal that was closed.",
}
_BAD_REQUEST = (400, 413)


def status_of(error: KvpageError) -> int:
    """What a command ends with after `error`."""
    if error.retryable:
        return TRY_AGAIN
    return WRONG_INPUT if isinstance(error, SpecInvalid) or error.http_status in _BAD_REQUEST else FAILED


def error_json(error: KvpageError) -> str:
    """One line, with what the message says as values too; `errors` where the request has faults."""
    told = {"code": error.code, "message": error.message, "details": error.details, "retryable": error.retryable}
    faults = [{"pointer": fault.pointer, "detail": fault.detail} for fault in error.errors]
    return json.dumps(told | ({"errors": faults} if faults else {}), default=str)
