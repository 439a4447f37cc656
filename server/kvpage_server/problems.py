"""Errors as RFC 9457 problems: the one place where an exception becomes an HTTP answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvpage.errors import (
    FieldError,
    InternalError,
    KvpageError,
    MethodNotAllowed,
    NotFound,
    SpecInvalid,
    Unauthorized,
    shorten,
)
from kvpage_server.error_guide import GUIDES

PROBLEM_JSON = "application/problem+json"
MAX_DETAIL_CHARS = 2000
MAX_ERRORS = 64
RETRY_AFTER_S = 1


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every answer with a status of 400 or more. `errors` holds at most `MAX_ERRORS` entries."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    retryable: bool
    request_id: str
    errors: list[dict[str, str]] = []
    details: dict[str, Any] = {}


def problem_of(error: KvpageError, request_id: str) -> Problem:
    return Problem(
        type=f"/errors#{error.code}",
        title=GUIDES[error.code].title,
        status=error.http_status,
        code=error.code,
        detail=_text(error.message, MAX_DETAIL_CHARS),
        retryable=error.retryable,
        request_id=request_id,
        errors=_fields(error.errors),
        details={_text(key): _json_value(value) for key, value in error.details.items()},
    )


class _ProblemResponse(Response):
    """Leaves its code with the request, for those who count answers."""

    code = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error_code"] = self.code
        await super().__call__(scope, receive, send)


def problem_response(error: KvpageError, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    response = _ProblemResponse(
        msgspec.json.encode(problem_of(error, request_id)),
        status_code=error.http_status,
        media_type=PROBLEM_JSON,
        headers={"Cache-Control": "no-store", **(headers or {})},
    )
    response.code = error.code
    if error.retryable:
        response.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def internal_error() -> InternalError:
    """For a mistake of kvpage's, of which the caller learns nothing more."""
    return InternalError("kvpage made a mistake; the server's log has the cause under this request_id")


def request_id_of(scope: Mapping[str, Any]) -> str:
    return str(scope.get("state", {}).get("request_id", "-"))


def error_code_of(scope: Mapping[str, Any]) -> str | None:
    """Of a request that was answered with a problem."""
    code = scope.get("state", {}).get("error_code")
    return None if code is None else str(code)


def install_handlers(app: FastAPI) -> None:
    """Answer every exception a route may raise; what is raised elsewhere is answered by the request-id middleware."""

    async def from_kvpage(request: Request, error: Exception) -> Response:
        assert isinstance(error, KvpageError)
        return problem_response(error, request_id_of(request.scope))

    async def from_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _http_problem(app, request, error)

    async def from_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(_validation_error(error), request_id_of(request.scope))

    async def from_bug(request: Request, error: Exception) -> Response:
        return problem_response(internal_error(), request_id_of(request.scope))

    app.add_exception_handler(KvpageError, from_kvpage)
    app.add_exception_handler(HTTPException, from_http)
    app.add_exception_handler(RequestValidationError, from_validation)
    app.add_exception_handler(Exception, from_bug)  # the framework then raises it again, to be logged


def _http_problem(app: FastAPI, request: Request, error: HTTPException) -> Response:
    request_id, path = request_id_of(request.scope), shorten(request.url.path)
    if error.status_code == 404:
        return problem_response(NotFound(f"there is nothing at {path}; see /openapi.json"), request_id)
    if error.status_code == 405:
        allowed = _methods_at(app, request.url.path)
        refusal = MethodNotAllowed(f"{path} takes {allowed}, not {shorten(request.method)}")
        return problem_response(refusal, request_id, {"Allow": allowed})
    return problem_response(InternalError(f"the framework answered {error.status_code}"), request_id)


def _methods_at(app: FastAPI, path: str) -> str:
    """All methods of a path, for `Allow`: the framework names only those of the first route that has the path."""
    methods: set[str] = set()
    for route in app.routes:
        pattern = getattr(route, "path_regex", None)
        if pattern is not None and pattern.match(path):
            methods |= getattr(route, "methods", None) or set()
    return ", ".join(sorted(methods))


def _validation_error(error: RequestValidationError) -> SpecInvalid:
    fields = [
        FieldError("/" + "/".join(str(part) for part in fault["loc"]), str(fault["msg"])) for fault in error.errors()
    ]
    return SpecInvalid("the request's parameters are not valid", errors=fields)


def _fields(errors: tuple[FieldError, ...]) -> list[dict[str, str]]:
    shown = [
        {"pointer": _text(field.pointer), "detail": _text(field.detail, MAX_DETAIL_CHARS)}
        for field in errors[:MAX_ERRORS]
    ]
    if len(errors) > MAX_ERRORS:
        shown.append({"pointer": "", "detail": f"and {len(errors) - MAX_ERRORS} more"})
    return shown


def _json_value(value: Any) -> Any:
    """`value` with every string printable and short, and anything JSON does not know as text."""
    if isinstance(value, Mapping):
        return {_text(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json_value(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _text(value)


def _text(value: object, max_chars: int | None = None) -> str:
    """`value` as text that encodes to UTF-8 and has at most `max_chars` characters (default: those of `shorten`)."""
    if max_chars is None:
        return shorten(value)
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
