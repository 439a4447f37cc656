"""Where an API process is: its Unix socket or a URL, and what to say when nobody answers there."""

from __future__ import annotations

import errno
import os
import ssl
from dataclasses import dataclass
from typing import Self

import httpcore
import httpx

from kvpage.client.arguments import checked_seconds, checked_text
from kvpage.client.calls import Request
from kvpage.client.finding import closed_system_directory, find_run_directory
from kvpage.client.trust import TLS_HINT, not_secured
from kvpage.errors import (
    DeviceUnavailable,
    KvpageError,
    PermissionDenied,
    ProtocolError,
    SpecInvalid,
    StaleHandle,
    shorten,
    without_password,
)
from kvpage.token_file import is_token
from kvpage.wire.connecting import system_error

DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    place: str
    """For people."""
    url: str
    socket_path: str | None
    """None for a server reached by its URL."""
    headers: dict[str, str]
    """Of every request."""
    timeout_s: float

    @classmethod
    def of(cls, url: str | None, run_dir: str | None, token: str | None, timeout_s: float) -> Self:
        """Raises `SpecInvalid` for arguments that cannot be, `TooLarge` for too long a path."""
        timeout_s = checked_seconds("timeout_s", timeout_s)
        _check_token(token)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if url is not None:
            if not checked_text("url", url).startswith(("http://", "https://")):
                raise SpecInvalid(
                    f"url {shorten(without_password(url))!r} does not begin with http:// or https://; a"
                    " Unix socket is named by its folder, with run_dir="
                )
            _check_url(url)
            return cls(place=without_password(url), url=url, socket_path=None, headers=headers, timeout_s=timeout_s)
        path = str(find_run_directory(run_dir).api_socket)
        headers["Accept-Encoding"] = "identity"  # compressing costs more than a local socket saves
        return cls(place=path, url="http://kvpage", socket_path=path, headers=headers, timeout_s=timeout_s)

    def __repr__(self) -> str:  # without the token
        return f"<Address {self.place}>"

    def timeout(self, request: Request) -> httpx.Timeout:
        return httpx.Timeout(self.timeout_s, read=self.timeout_s + request.wait_s)

    def unreachable(self, error: httpx.RequestError) -> KvpageError:
        """What a failure to exchange a request means to the caller."""
        reason = _reason(error)
        if isinstance(reason, PermissionError):
            return PermissionDenied(f"uid {os.geteuid()} may not connect to {self.place}")
        if isinstance(reason, OSError) and reason.errno in (errno.EMFILE, errno.ENFILE):
            return system_error(f"connecting to {self.place}", reason)
        details = {"address": self.place}
        if isinstance(reason, BlockingIOError):
            return DeviceUnavailable(
                f"the kvpage server at {self.place} took no connection within {self.timeout_s:g} s: its queue is full;"
                " is it stopped, or do very many processes connect at once?",
                details=details,
            )
        if isinstance(reason, ssl.SSLError):
            return PermissionDenied(not_secured(self.place, reason), details=details)  # trying again heals nothing
        if isinstance(error, httpx.ConnectError):
            return DeviceUnavailable(f"no kvpage server answers at {self.place}; {self._where_else()}", details=details)
        if isinstance(error, httpx.TimeoutException):
            return DeviceUnavailable(
                f"the kvpage server at {self.place} did not answer within {self.timeout_s:g} s", details=details
            )
        if isinstance(error, httpx.DecodingError):
            return ProtocolError(
                f"the answer of {self.place} is not compressed as it says: {shorten(str(error))}", details=details
            )
        hint = TLS_HINT if self.url.startswith("http://") and self.socket_path is None else ""
        return DeviceUnavailable(
            f"the kvpage server at {self.place} ended the connection before it answered; see its log{hint}",
            details=details,
        )

    def _where_else(self) -> str:
        if self.socket_path is None:
            return (
                "start one there with `kvpage serve --port`, or name another with --url (url= in Python) or KVPAGE_URL"
            )
        return (
            "start one with `kvpage serve`, or name its folder with --run-dir (run_dir= in Python) or KVPAGE_RUN_DIR"
            f"{closed_system_directory()}"
        )


def _check_token(token: object) -> None:
    """Never says what it is."""
    if token is None or (isinstance(token, str) and token and token.isascii() and is_token(token.encode())):
        return
    raise SpecInvalid("the token is no text that an HTTP header can carry: one or more printable ASCII characters")


def _check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
        is_whole = bool(parsed.host.strip()) and (parsed.port is None or parsed.port < 1 << 16) and " " not in url
    except httpx.InvalidURL as error:
        shown, reason = without_password(url), "" if "@" in url else f": {shorten(str(error))}"
        raise SpecInvalid(f"url {shorten(shown)!r} is not one{reason}") from None
    if not is_whole:
        raise SpecInvalid(
            f"url {shorten(without_password(url))!r} names no host, or a port over 65535; use http://HOST:PORT"
        )


def _reason(error: httpx.RequestError) -> BaseException | None:
    reason = error.__cause__
    if isinstance(reason, httpcore.ConnectError) and reason.args and isinstance(reason.args[0], OSError):
        return reason.args[0]  # its pool has taken the cause off
    return reason


def check_usable(pid: int, *, closed: bool) -> None:
    """Raises `StaleHandle` for a client that was closed, or made by another process: its connections are not ours."""
    if closed:
        raise StaleHandle("the client is closed; make another")
    if pid != os.getpid():
        raise StaleHandle("the client was made before a fork; make another in the child")
