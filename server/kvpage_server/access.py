"""Who may do what: decided from the connection, the `Host` header and the bearer token, before a body is read.

On the Unix socket the kernel says who the caller is; allowed users may do everything. Over TCP nobody is known:
without a token only reads and planning are served, and only under a name this server is bound to, so that a web page
on the same machine cannot reach it by rebinding its own name to 127.0.0.1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpage.errors import KvpageError, PermissionDenied, Unauthorized, shorten
from kvpage.wire.credentials import Peer
from kvpage_server.exposure import is_loopback
from kvpage_server.operations import Operation
from kvpage_server.roles import RULES, Role
from kvpage_server.tokens import Token, TokenFile

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_BEARER = "bearer "
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The peer of a Unix-socket connection."""

    peer: Peer
    groups: frozenset[int]
    """Supplementary group ids."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is, once it is admitted."""

    role: Role | None
    """None: over TCP, without a token."""
    token_name: str | None = None
    """None: without a token."""


_PEER = Identity(Role.ADMIN)
_NOBODY = Identity(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """What is decided once, when the server starts."""

    server_uid: int
    group_gid: int | None = None
    """Members of this group may use the Unix socket."""
    tokens: TokenFile | None = None

    def identify(self, scope: Mapping[str, Any]) -> Identity:
        """Raises `PermissionDenied` for a process that may not use the socket, `Unauthorized` for a wrong token."""
        caller = scope.get("state", {}).get("caller")
        if caller is not None:
            self._check_caller(caller)
            return _PEER
        token = self._token(scope)
        return _NOBODY if token is None else Identity(token.role, token.name)

    def authorize(self, identity: Identity, operation: Operation, scope: Mapping[str, Any]) -> None:
        """Raises `PermissionDenied` or `Unauthorized` unless the operation may be done."""
        if identity is _PEER:
            return
        rule = operation.rule
        if identity.role is None or (identity.role < rule.role and rule.is_open):
            check_host(scope)  # a token takes nothing away that everybody may do
        elif identity.role < rule.role:
            raise _too_little(identity, operation.name)
        if identity.role is None and not rule.is_open:
            raise self._refusal(scope["path"])
        if rule.is_secret and not _is_confidential(scope):
            raise PermissionDenied(
                f"{operation.name} answers with what opens the memory, which is not sent to another machine in the"
                " clear; serve TLS, or ask from this machine"
            )

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

    def _token(self, scope: Mapping[str, Any]) -> Token | None:
        """None without one. Raises `Unauthorized` for a wrong one, wherever it is sent."""
        sent = _header(scope, b"authorization")
        if sent is None:
            return None
        given = sent[len(_BEARER) :].strip() if sent[: len(_BEARER)].lower() == _BEARER else ""
        found = None if self.tokens is None else self.tokens.find(given.encode("latin-1"))
        if found is None:
            raise Unauthorized("the Authorization header does not carry a token of this server")
        return found

    def _refusal(self, path: str) -> KvpageError:
        what = f"{shorten(path)} is not served over TCP without a token"
        if self.tokens is None:
            return PermissionDenied(f"{what}; use the Unix socket, or start the server with --token-file")
        return Unauthorized(
            f"{what}; give one (--token-file, in Python token=, else the header Authorization: Bearer <token>), or use"
            " the Unix socket"
        )


def require_role(scope: Mapping[str, Any], name: str) -> None:
    """For what only the route can tell from the operation that was asked for. Raises `PermissionDenied`."""
    identity: Identity = scope["state"]["identity"]
    if identity.role is None or identity.role < RULES[name].role:
        raise _too_little(identity, name)


def _too_little(identity: Identity, name: str) -> PermissionDenied:
    role = identity.role
    needed, has = RULES[name].role.label, "none" if role is None else role.label
    return PermissionDenied(
        f"{name} needs the role {needed}, and the token '{identity.token_name}' has the role {has}",
        details={"needed_role": needed, "role": has},
    )


def own_uid() -> int:
    return os.geteuid()


def check_host(scope: Mapping[str, Any]) -> None:
    """Raises `PermissionDenied` when the request was sent to a name this server is not bound to."""
    host = (_header(scope, b"host") or "").lower()
    bound_host, port = scope["server"]
    names = {_bracketed(bound_host)}
    if is_loopback(bound_host):
        names |= set(LOOPBACK_NAMES)
    is_default = port == _DEFAULT_PORTS.get(scope.get("scheme", "http"))
    allowed = {f"{name}:{port}" for name in names} | (names if is_default else set())
    if host not in allowed:
        raise PermissionDenied(
            f"Host {shorten(repr(host))} is not a name of this server; use one of {', '.join(sorted(allowed))}"
        )


def _is_confidential(scope: Mapping[str, Any]) -> bool:
    """Whether nobody between the two ends can read along."""
    client = scope.get("client")
    return scope.get("scheme") == "https" or (client is not None and is_loopback(client[0]))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """The only value of a header; None when it is absent. Two different values count as no valid one."""
    values = {value for key, value in scope["headers"] if key == name}
    if not values:
        return None
    return values.pop().decode("latin-1") if len(values) == 1 else ""
