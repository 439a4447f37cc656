"""Plans that are in the cache are answered before the framework looks at the request.

Routing and the framework's calls cost more than twice what the rest of such an answer does. Whatever is not an
ordinary request for a plan that is there goes on to its route, which gives the same answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage_server.bodies import accepts_gzip
from kvpage_server.plan_cache import Representation
from kvpage_server.plan_response import PlanResponse
from kvpage_server.planning import PlanService

_PATH = "/v1/plans"
_PREFIX = _PATH + "/"


class CachedPlans:
    def __init__(self, app: ASGIApp, *, plans: Callable[[], PlanService]) -> None:
        self.app = app
        self._plans = plans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        if scope["type"] == "http" and scope["path"].startswith(_PATH) and not scope["query_string"]:
            headers = dict(scope["headers"])
            if len(headers) < len(scope["headers"]):
                pass  # a repeated header is for the route to judge
            elif scope["method"] == "GET" and b"if-none-match" not in headers:
                response = _to_get(self._plans(), scope["path"].removeprefix(_PREFIX), headers)
            elif scope["method"] == "POST" and scope["path"] == _PATH and _is_ordinary(headers):
                receive = replayed = _Replayed(await _whole_body(receive), receive)
                response = _to_post(self._plans(), replayed.body, headers)
        await (response or self.app)(scope, receive, send)


def _to_get(plans: PlanService, plan_id: str, headers: Mapping[bytes, bytes]) -> PlanResponse | None:
    answer = plans.ready_answer(_wanted(Representation(plan_id), headers))
    return None if answer is None else PlanResponse(answer, 200)


def _to_post(plans: PlanService, body: bytes, headers: Mapping[bytes, bytes]) -> PlanResponse | None:
    asked = plans.led_to(body)
    answer = None if asked is None else plans.ready_answer(_wanted(asked, headers))
    return None if answer is None else PlanResponse(answer, 200, is_location_new=True)


def _wanted(plain: Representation, headers: Mapping[bytes, bytes]) -> Representation:
    accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
    return plain._replace(encoding="gzip") if accepts_gzip(accepted) else plain


def _is_ordinary(headers: Mapping[bytes, bytes]) -> bool:
    """Plain JSON of a declared length: nothing to refuse before the body is read."""
    is_json = headers.get(b"content-type") == b"application/json" and b"content-encoding" not in headers
    return is_json and b"content-length" in headers


async def _whole_body(receive: Receive) -> list[Message]:
    """All messages up to the end of the body or of the connection. The protocol bounds them."""
    messages: list[Message] = []
    is_more = True
    while is_more:
        message = await receive()
        messages.append(message)
        is_more = message.get("more_body", False)
    return messages


class _Replayed:
    """A `Receive` that gives again what was received, and then goes on."""

    def __init__(self, messages: list[Message], receive: Receive) -> None:
        self._messages = deque(messages)
        self._receive = receive

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages)

    async def __call__(self) -> Message:
        return self._messages.popleft() if self._messages else await self._receive()
