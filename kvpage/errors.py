"""Every error kvpage raises, in one tree with stable codes.

    KvpageError
    ├── HttpInvalid            http-invalid              400
    ├── JsonInvalid            json-invalid              400
    ├── Unauthorized           unauthorized              401
    ├── PermissionDenied       permission-denied         403
    ├── NotFound               not-found                 404
    │   ├── PlanNotFound       plan-not-found            404
    │   └── PoolNotFound       pool-not-found            404
    ├── MethodNotAllowed       method-not-allowed        405
    ├── RequestTimeout         request-timeout           408
    ├── Conflict               conflict                  409
    ├── NotEnoughMemory        not-enough-memory         409
    ├── OutOfBlocks            out-of-blocks             409
    ├── StaleHandle            stale-handle              410
    ├── TooLarge               too-large                 413
    ├── UnsupportedMediaType   unsupported-media-type    415
    ├── SpecInvalid            spec-invalid              422   (also a ValueError)
    │   ├── CannotUnify        cannot-unify-page-size    422
    │   ├── LayoutUnsupported  layout-unsupported        422
    │   └── NotSupported       not-supported             422
    ├── RateLimited            rate-limited              429
    ├── InternalError          internal                  500
    ├── ProtocolError          protocol-error            502
    ├── WorkerLost             worker-lost               503
    ├── DeviceUnavailable      device-unavailable        503
    ├── Draining               draining                  503
    ├── AuditUnavailable       audit-unavailable         503
    └── TooManyClients         too-many-clients          503

`code` is what programs branch on; the message is for people and may change. A message says what is wrong, the
value, the limit and what to change. `details` carries the same facts as JSON values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

MAX_ECHO_CHARS = 200  # no error repeats more of the input than this


class FieldError(NamedTuple):
    """One fault in a request: `pointer` is an RFC 6901 JSON pointer into the request as it was sent."""

    pointer: str
    detail: str


class KvpageError(Exception):
    """Root of the tree.

    `details`: JSON-encodable facts (byte counts, names). `errors`: faults by position in the request.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, details: Mapping[str, Any] | None = None, errors: Sequence[FieldError] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.errors: tuple[FieldError, ...] = tuple(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details, self.errors)


def _rebuild(
    kind: type[KvpageError], message: str, details: dict[str, Any], errors: tuple[FieldError, ...]
) -> KvpageError:
    return kind(message, details=details, errors=errors)


class HttpInvalid(KvpageError):
    """Bytes that are no HTTP request."""

    code, http_status = "http-invalid", 400


class JsonInvalid(KvpageError):
    code, http_status = "json-invalid", 400


class Unauthorized(KvpageError):
    code, http_status = "unauthorized", 401


class PermissionDenied(KvpageError):
    code, http_status = "permission-denied", 403


class NotFound(KvpageError):
    code, http_status = "not-found", 404


class PlanNotFound(NotFound):
    code = "plan-not-found"


class PoolNotFound(NotFound):
    code = "pool-not-found"


class MethodNotAllowed(KvpageError):
    code, http_status = "method-not-allowed", 405


class RequestTimeout(KvpageError):
    """A request that began and did not arrive whole in time."""

    code, http_status, retryable = "request-timeout", 408, True


class Conflict(KvpageError):
    code, http_status = "conflict", 409


class NotEnoughMemory(KvpageError):
    code, http_status = "not-enough-memory", 409


class OutOfBlocks(KvpageError):
    code, http_status, retryable = "out-of-blocks", 409, True


class StaleHandle(KvpageError):
    code, http_status = "stale-handle", 410


class TooLarge(KvpageError):
    code, http_status = "too-large", 413


class UnsupportedMediaType(KvpageError):
    code, http_status = "unsupported-media-type", 415


class SpecInvalid(KvpageError, ValueError):
    """A request that can never be planned as it stands."""

    code, http_status = "spec-invalid", 422


class CannotUnify(SpecInvalid):
    code = "cannot-unify-page-size"


class LayoutUnsupported(SpecInvalid):
    code = "layout-unsupported"


class NotSupported(SpecInvalid):
    """Well formed, but kvpage does not do it yet."""

    code = "not-supported"


class RateLimited(KvpageError):
    code, http_status, retryable = "rate-limited", 429, True


class InternalError(KvpageError):
    code = "internal"


class ProtocolError(KvpageError):
    """A peer broke the worker protocol; the connection is closed."""

    code, http_status = "protocol-error", 502


class WorkerLost(KvpageError):
    code, http_status, retryable = "worker-lost", 503, True


class DeviceUnavailable(KvpageError):
    code, http_status, retryable = "device-unavailable", 503, True


class Draining(KvpageError):
    code, http_status, retryable = "draining", 503, True


class AuditUnavailable(KvpageError):
    """What changes something is not done while there can be no record of it."""

    code, http_status, retryable = "audit-unavailable", 503, True


class TooManyClients(KvpageError):
    code, http_status, retryable = "too-many-clients", 503, True


def _tree(kind: type[KvpageError]) -> Iterator[type[KvpageError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


ERRORS_BY_CODE: dict[str, type[KvpageError]] = {
    kind.code: kind for kind in _tree(KvpageError) if kind is not KvpageError
}


def error_from_code(
    code: str, message: str, *, details: Mapping[str, Any] | None = None, errors: Sequence[FieldError] = ()
) -> KvpageError:
    """The error a peer reported by `code`; an unknown code becomes `InternalError` and keeps the code in its text."""
    kind = ERRORS_BY_CODE.get(code)
    if kind is None:
        return InternalError(f"{message} (unknown error code {shorten(code)})", details=details, errors=errors)
    return kind(message, details=details, errors=errors)


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal might obey, or that cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def how_to_install(extra: str) -> str:
    """Never by the bare name: kvpage is on no package index, and whoever took the name there would be installed."""
    return f"in a checkout of kvpage, pip install '.[{extra}]'; of a wheel, pip install 'FILE.whl[{extra}]'"


def nearest(text: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean …?" when one of `known` is like it, else nothing."""
    from difflib import get_close_matches  # needed by mistakes only

    names = {name.lower(): name for name in known}
    asked = text[:MAX_ECHO_CHARS].strip().lower().replace("-", "_")
    begun = [name for name in names if len(asked) > 2 and name.startswith(asked)]
    found = begun or get_close_matches(asked, names, n=1)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def shorten(value: object) -> str:
    """`value` as printable text of at most `MAX_ECHO_CHARS` characters, for use in messages."""
    text = value if isinstance(value, str) else repr(value)
    text = printable(text[: MAX_ECHO_CHARS + 1])  # before it is cut: what is escaped grows
    return text if len(text) <= MAX_ECHO_CHARS else text[: MAX_ECHO_CHARS - 1] + "…"


def without_password(url: str) -> str:
    """`url` for people: without what stands before its @, which may hold a password."""
    before, at, after = url.rpartition("@")
    scheme, colon, _ = before.rpartition("://")
    return f"{scheme}{colon}***@{after}" if at else url
