"""One line for a request: at `debug` for each, at `info` for slow ones, at `warning` for those that went wrong here.

It has no value of a header, nothing of a body and no query: secrets are sent in those.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.types import Scope

from kvpage.errors import shorten
from kvpage_server.access import Caller

logger = logging.getLogger("kvpage.request")

SLOW_S = 1.0
_WRONG_HERE = 500


def log_request(scope: Scope, status: int | None, duration_s: float) -> None:
    """`status`: None when the client left before it was answered. `duration_s`: until the answer began."""
    level = _level(scope, status, duration_s)
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra=_fields(scope, status, duration_s))


def _level(scope: Scope, status: int | None, duration_s: float) -> int:
    if status is not None and status >= _WRONG_HERE:
        return logging.WARNING
    return logging.INFO if duration_s > SLOW_S and not _asked_to_wait(scope) else logging.DEBUG


def _asked_to_wait(scope: Scope) -> bool:
    """Whether the request may take long because its sender wants it to."""
    is_named = b"wait" in scope["query_string"] or any(name == b"prefer" for name, _ in scope["headers"])
    return is_named or "/leases" in scope["path"]


def _fields(scope: Scope, status: int | None, duration_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "method": shorten(scope["method"]),
        "path": shorten(scope["path"]),
        "status": status,
        "duration_s": round(duration_s, 6),
    }
    caller = scope.get("state", {}).get("caller")
    if isinstance(caller, Caller):
        return {**fields, "peer_uid": caller.peer.uid, "peer_pid": caller.peer.pid}
    client = scope.get("client")
    return fields if client is None else {**fields, "peer_address": client[0]}
