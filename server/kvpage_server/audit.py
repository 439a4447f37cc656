"""What the audit log says: who asked for what, which of it was refused, and what came of the rest.

Two lines for each change, `begin` before it is done and `end` after; one line, `refused`, for what was not begun:
because it was not allowed, or because the request was faulty.
Whoever has neither a token nor a right can cause lines only so fast: they must not fill the disk.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

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
CHANGE = "audit_change"
"""Where the scope's state has it."""
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

    def change(self, scope: Mapping[str, Any], identity: Identity, operation: Operation) -> Change:
        facts = {
            "id": f"{self._run}-{next(self._numbers)}",  # ours: request ids are the caller's choice
            **_asked(scope, operation),
            **_asker(scope, identity),
        }
        return Change(self._log, facts)

    def refused(
        self, scope: Mapping[str, Any], identity: Identity | None, operation: Operation, error: KvpageError
    ) -> None:
        """`identity`: None where it is not known who asks."""
        if self._refusals.take("all") > 0:
            self._num_left_out += 1
            return
        facts = {
            **_asked(scope, operation),
            **_asker(scope, identity),
            "status": error.http_status,
            "code": error.code,
            "num_left_out_before": self._num_left_out,
        }
        self._num_left_out = 0
        self._log.add(_line("refused", facts), is_owed=False)


class Change:
    """One request that changes something: its line before and its line after. Lives in the request's scope."""

    def __init__(self, log: AuditLog, facts: Facts) -> None:
        self._log = log
        self._facts = dict(facts)
        self._is_begun = False
        self._is_ended = False

    def know(self, **resources: Any) -> None:
        """What only the route can tell: names in the body, ids of what was made. Lines from now on have it."""
        known = {name: _fact(name, value) for name, value in resources.items() if value is not None}
        self._facts["resources"] = {**self._facts["resources"], **known}

    async def begin(self) -> None:
        """Raises `AuditUnavailable` where nothing may be done."""
        try:
            self._log.check_moving()
        except KvpageError:
            self._is_ended = True
            raise
        try:
            await self._log.intend(_line("begin", self._facts))
        except KvpageError as error:
            self._is_ended = True  # the first line may have come to the disk too late
            outcome = {"status": error.http_status, "code": error.code}
            self._log.add(_line("end", {**self._facts, **outcome}), is_owed=False, follows_intent=True)
            raise
        self._is_begun = True

    def end(self, status: int | None, code: str | None) -> None:
        """`status`: None when the client left before there was one."""
        if self._is_ended:
            return
        self._is_ended = True
        event = "end" if self._is_begun else "refused"  # such as for a fault in the body: nothing was begun
        self._log.add(_line(event, {**self._facts, "status": status, "code": code}), is_owed=self._is_begun)


def record(request: Request, **resources: Any) -> None:
    """Let the audit log say what only the route knows, when the request is recorded."""
    change = _change_of(request)
    if change is not None:
        change.know(**resources)


async def begin(request: Request, **resources: Any) -> None:
    """Put the line before the change on the disk: for operations whose rule says `begins_in_route`, which know only
    then what they change. Raises `AuditUnavailable` where nothing may be done.
    """
    change = _change_of(request)
    if change is not None:
        change.know(**resources)
        await change.begin()


def _change_of(request: Request) -> Change | None:
    """None where nothing is recorded."""
    return cast("Change | None", request.scope["state"].get(CHANGE))


def _asked(scope: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    return {
        "request_id": request_id_of(scope),
        "operation": operation.name,
        "request": _request_line(scope, operation),
        "resources": {name: _fact(name, value) for name, value in operation.resources.items()},
    }


def _asker(scope: Mapping[str, Any], identity: Identity | None) -> dict[str, Any]:
    role = None if identity is None else identity.role
    return {"role": None if role is None else role.label, "who": _who(scope, identity)}


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
