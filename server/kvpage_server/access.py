"""Who may do what: decided from the connection, the `Host` header and the bearer token, before a body is read.

On the Unix socket the kernel says who the caller is; allowed users may do everything. Over TCP nobody is known:
without a token only reads and planning are served, and only under a name this server is bound to, so that a web page
on the same machine cannot reach it by rebinding its own name to 127.0.0.1.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage.errors import KvpageError, PermissionDenied, SpecInvalid, Unauthorized, shorten
from kvpage.token_file import read_token
from kvpage.wire.credentials import Peer
from kvpage_server.problems import problem_response, request_id_of

MIN_TOKEN_CHARS = 16
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_BEARER = "bearer "
_OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/errors", "/openapi.json", "/v1/plans", "/v1/devices"})
_OPEN_PREFIX = "/v1/plans/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The peer of a Unix-socket connection."""

    peer: Peer
    groups: frozenset[int]
    """Supplementary group ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """What is decided once, when the server starts."""

    server_uid: int
    group_gid: int | None = None
    """Members of this group may use the Unix socket."""
    token: bytes | None = None
    """The bearer token; None when there is no token file."""

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise `PermissionDenied` or `Unauthorized` unless the request may be served."""
        caller = scope.get("state", {}).get("caller")
        if caller is not None:
            self._check_caller(caller)
            return
        if self._has_token(scope):
            return
        _check_host(scope)
        if not _is_open(scope["path"]):
            raise self._refusal(scope["path"])

    def _check_caller(self, caller: Caller) -> None:
        peer = caller.peer
        if peer.uid in (0, self.server_uid):
            return
        if self.group_gid is not None and self.group_gid in caller.groups | {peer.gid}:
            return
        group = (
            "; start it with --group to let a group in" if self.group_gid is None else f" and group {self.group_gid}"
        )
        raise PermissionDenied(
            f"uid {peer.uid} may not use this server, only uid {self.server_uid}, root{group}",
            details={"uid": peer.uid},
        )

    def _has_token(self, scope: Mapping[str, Any]) -> bool:
        """Whether the right token is there. Raises `Unauthorized` for a wrong one, wherever it is sent."""
        sent = _header(scope, b"authorization")
        if sent is None:
            return False
        given = sent[len(_BEARER) :].strip() if sent[: len(_BEARER)].lower() == _BEARER else ""
        if self.token is not None and hmac.compare_digest(given.encode("latin-1"), self.token):
            return True
        raise Unauthorized("the Authorization header does not carry a token of this server")

    def _refusal(self, path: str) -> KvpageError:
        what = f"{shorten(path)} is not served over TCP without a token"
        if self.token is None:
            return PermissionDenied(f"{what}; use the Unix socket, or start the server with --token-file")
        return Unauthorized(f"{what}; send Authorization: Bearer <token>, or use the Unix socket")


class AccessMiddleware:
    def __init__(self, app: ASGIApp, *, policy: AccessPolicy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.policy.check(scope)
            except KvpageError as error:
                await problem_response(error, request_id_of(scope))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def secret_token(path: Path) -> bytes:
    """The token in a file, which must be long enough and not be there for everybody to read."""
    token = read_token(path).encode()
    if len(token) < MIN_TOKEN_CHARS:
        raise SpecInvalid(
            f"the token in {path} has {len(token)} characters; at least {MIN_TOKEN_CHARS} are needed. "
            f"`openssl rand -hex 32` makes one"
        )
    if path.stat().st_mode & 0o007:
        raise SpecInvalid(f"the token file {path} can be read by everybody; chmod o-rwx it")
    return token


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def own_uid() -> int:
    return os.geteuid()


def _check_host(scope: Mapping[str, Any]) -> None:
    host = (_header(scope, b"host") or "").lower()
    bound_host, port = scope["server"]
    names = {_bracketed(bound_host)}
    if is_loopback(bound_host):
        names |= set(LOOPBACK_NAMES)
    allowed = {f"{name}:{port}" for name in names} | (names if port == 80 else set())
    if host not in allowed:
        raise PermissionDenied(
            f"Host {shorten(repr(host))} is not a name of this server; use one of {', '.join(sorted(allowed))}"
        )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)


def _header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """The only value of a header; None when it is absent. Two different values count as no valid one."""
    values = {value for key, value in scope["headers"] if key == name}
    if not values:
        return None
    return values.pop().decode("latin-1") if len(values) == 1 else ""
