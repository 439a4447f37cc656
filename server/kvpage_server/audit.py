"""What the audit log says: who asked for what, which of it was refused, and what came of the rest.

Two lines for each change, `begin` before it is done and `end` after; one line, `refused`, for whom it was not allowed.
Whoever has neither a token nor a right can cause lines only so fast: they must not fill the disk.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Request

from kvpage.errors import KvpageError, shorten
from kvpage_server.access import Identity
from kvpage_server.audit_log import AuditLog
from kvpage_server.operations import Operation
from kvpage_server.problems import request_id_of
from kvpage_server.rate_limit import Buckets

REFUSALS_PER_S = 1.0
REFUSALS_AT_ONCE = 100.0
_FACTS = "audit_facts"
_SECRET_RESOURCES = frozenset({"lease_id", "reservation_id"})
Facts = Mapping[str, Any]


class Audit:
    """Used from the event loop only."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._refusals = Buckets(REFUSALS_PER_S, burst=REFUSALS_AT_ONCE, max_names=1)
        self._num_left_out = 0

    async def begin(self, scope: Mapping[str, Any], identity: Identity, operation: Operation) -> Facts:
        """What both lines have in common. Raises `AuditUnavailable` where nothing may be done."""
        facts = {
            "id": f"{self._run}-{next(self._numbers)}",  # ours: request ids are the caller's choice
            **_asked(scope, operation),
            "role": None if identity.role is None else identity.role.label,
            "who": _who(scope, identity),
        }
        try:
            await self._log.intend(_line("begin", facts))
        except KvpageError as error:
            self._log.add(_line("end", {**facts, "status": error.http_status, "code": error.code}), is_owed=False)
            raise
        return facts

    def end(self, scope: Mapping[str, Any], begun: Facts, status: int | None, code: str | None) -> None:
        """`status`: None when the client left before there was one."""
        resources = {**begun["resources"], **scope["state"].get(_FACTS, {})}
        facts = {**begun, "resources": resources, "status": status, "code": code}
        self._log.add(_line("end", facts), is_owed=True)

    def refused(self, scope: Mapping[str, Any], operation: Operation, error: KvpageError) -> None:
        if self._refusals.take("all") > 0:
            self._num_left_out += 1
            return
        facts = {
            **_asked(scope, operation),
            "who": _who(scope, None),
            "status": error.http_status,
            "code": error.code,
            "num_left_out_before": self._num_left_out,
        }
        self._num_left_out = 0
        self._log.add(_line("refused", facts), is_owed=False)


def record(request: Request, **facts: Any) -> None:
    """Let the audit log say what only the route knows, when the request is recorded: names, ids of what was made."""
    found = request.scope["state"].setdefault(_FACTS, {})
    for name, value in facts.items():
        found[name] = _fact(name, value)


def _asked(scope: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    return {
        "request_id": request_id_of(scope),
        "operation": operation.name,
        "request": _request_line(scope, operation),
        "resources": {name: _fact(name, value) for name, value in operation.resources.items()},
    }


def _who(scope: Mapping[str, Any], identity: Identity | None) -> dict[str, Any]:
    caller = scope.get("state", {}).get("caller")
    if caller is not None:
        return {"uid": caller.peer.uid, "gid": caller.peer.gid, "pid": caller.peer.pid}
    address = (scope.get("client") or (None,))[0]
    token_name = None if identity is None else identity.token_name
    return {"address": address} if token_name is None else {"token": token_name, "address": address}


def _fact(name: str, value: Any) -> Any:
    """Whoever knows the id of a lease may use it, so its digest stands for it."""
    if name in _SECRET_RESOURCES:
        return "sha256:" + hashlib.sha256(str(value).encode(errors="replace")).hexdigest()[:16]
    return shorten(value) if isinstance(value, str) else value


def _request_line(scope: Mapping[str, Any], operation: Operation) -> str | None:
    """Of what is no operation; of one, its name and resources say it, and the path may hold what is secret."""
    return shorten(f"{scope['method']} {scope['path']}") if operation.name == "none" else None


def _line(event: str, facts: Facts) -> bytes:
    time = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return msgspec.json.encode({"time": time, "event": event, **{k: v for k, v in facts.items() if v is not None}})
