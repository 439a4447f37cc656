"""What every request passes before its body is read: who asks, whether they may, how often, and the record of it."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage.errors import KvpageError, RateLimited
from kvpage_server.access import AccessPolicy, Identity
from kvpage_server.operations import Operation, Operations
from kvpage_server.problems import problem_response, request_id_of
from kvpage_server.rate_limit import ChangeLimit


class Guard:
    def __init__(
        self, app: ASGIApp, *, policy: AccessPolicy, limit: ChangeLimit, operations: Callable[[], Operations]
    ) -> None:
        """`operations`: known when the application has all its routes."""
        self.app = app
        self._policy = policy
        self._limit = limit
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        operation = self._operations().find(scope["method"], scope["path"])
        try:
            identity = self._admitted(scope, operation)
        except KvpageError as error:
            await problem_response(error, request_id_of(scope))(scope, receive, send)
            return
        wait_s = self._wait_s(identity, operation)
        if wait_s > 0:
            error = RateLimited(
                f"the token '{identity.token_name}' changes things over {self._limit.per_s:g} times a second; wait"
                f" {wait_s:.3f} s, use the Unix socket, or start the server with a higher --rate-limit",
                details={"limit_per_s": self._limit.per_s, "wait_s": round(wait_s, 3)},
            )
            response = problem_response(error, request_id_of(scope), self._limit.headers(wait_s))
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admitted(self, scope: Scope, operation: Operation) -> Identity:
        identity = self._policy.identify(scope)
        self._policy.authorize(identity, operation, scope)
        state = scope.setdefault("state", {})
        state["identity"] = identity
        return identity

    def _wait_s(self, identity: Identity, operation: Operation) -> float:
        """0 for who need not wait. Whatever changes something needs a token over TCP, so every bucket has a name."""
        if identity.token_name is None or not operation.rule.is_change:
            return 0.0
        return self._limit.wait_s(identity.token_name)
