"""What every request passes before its body is read: who asks, whether they may, how often, and the record of it."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage.errors import KvpageError, RateLimited
from kvpage_server.access import AccessPolicy, Identity
from kvpage_server.audit import CHANGE, Audit
from kvpage_server.operations import Operation, Operations
from kvpage_server.problems import error_code_of, problem_response, request_id_of
from kvpage_server.rate_limit import ChangeLimit


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        *,
        policy: AccessPolicy,
        limit: ChangeLimit,
        operations: Callable[[], Operations],
        audit: Callable[[], Audit | None],
    ) -> None:
        """`operations`: known when the application has all its routes; `audit`: when it has started."""
        self.app = app
        self._policy = policy
        self._limit = limit
        self._operations = operations
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        operation = self._operations().find(scope["method"], scope["path"])
        audit = self._audit()
        identity: Identity | None = None
        try:
            identity = self._policy.identify(scope)
            self._policy.authorize(identity, operation, scope)
        except KvpageError as error:
            if audit is not None:
                audit.refused(scope, identity, operation, error)
            await problem_response(error, request_id_of(scope))(scope, receive, send)
            return
        scope["state"]["identity"] = identity
        wait_s = self._wait_s(identity, operation)
        if wait_s > 0:
            await self._refuse_for_now(identity, wait_s, scope, receive, send)
        elif audit is None or not operation.rule.is_recorded:
            await self.app(scope, receive, send)
        else:
            await self._serve_recorded(audit, identity, operation, scope, receive, send)

    def _wait_s(self, identity: Identity, operation: Operation) -> float:
        """0 for who need not wait. Whatever changes something needs a token over TCP, so every bucket has a name."""
        if identity.token_name is None or not operation.rule.is_change:
            return 0.0
        return self._limit.wait_s(identity.token_name)

    async def _refuse_for_now(
        self, identity: Identity, wait_s: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        error = RateLimited(
            f"the token '{identity.token_name}' changes things more than {self._limit.per_s:g} times a second; wait "
            f"{wait_s:.3f} s, use the Unix socket, or start the server with a higher --rate-limit",
            details={"limit_per_s": self._limit.per_s, "wait_s": round(wait_s, 3)},
        )
        response = problem_response(error, request_id_of(scope), self._limit.headers(wait_s))
        await response(scope, receive, send)

    async def _serve_recorded(
        self, audit: Audit, identity: Identity, operation: Operation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        change = audit.change(scope, identity, operation)
        scope["state"][CHANGE] = change
        if not operation.rule.begins_in_route:
            try:
                await change.begin()
            except KvpageError as error:
                await problem_response(error, request_id_of(scope))(scope, receive, send)
                return
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:  # which is answered further out
            status = status or 500
            raise
        finally:
            change.end(status, error_code_of(scope))
