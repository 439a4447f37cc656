"""The outermost middleware: gives every request an id and turns whatever escaped into a problem."""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage.errors import InternalError
from kvpage_server.problems import problem_response

logger = logging.getLogger("kvpage.api")

_ACCEPTED_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestIdMiddleware:
    """Takes the caller's `X-Request-ID` when it is harmless, else makes one; repeats it in the answer.

    An exception no handler knows is logged with the id and answered as `internal`, without a word about its cause.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.info("request %s: the client left before its body was complete", request_id)
        except Exception:  # the last resort: a bug must neither end the server nor reach the client
            logger.exception("request %s failed", request_id)
            if not started:
                error = InternalError("kvpage made a mistake; the server's log has the cause under this request_id")
                await problem_response(error, request_id)(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ACCEPTED_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)
