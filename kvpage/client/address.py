"""Where an API process is: its Unix socket or a URL, and what to say when nobody answers there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import httpcore
import httpx

from kvpage.client.calls import Request
from kvpage.errors import DeviceUnavailable, KvpageError, PermissionDenied, SpecInvalid, shorten
from kvpage.run_directory import RunDirectory

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
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise SpecInvalid(f"url {shorten(url)!r} does not begin with http:// or https://")
            return cls(place=url, url=url, socket_path=None, headers=headers, timeout_s=timeout_s)
        path = str(RunDirectory.default(run_dir).api_socket)
        headers["Accept-Encoding"] = "identity"  # compressing costs more than a local socket saves
        return cls(place=path, url="http://kvpage", socket_path=path, headers=headers, timeout_s=timeout_s)

    def __repr__(self) -> str:  # without the token
        return f"<Address {self.place}>"

    def timeout(self, request: Request) -> httpx.Timeout:
        return httpx.Timeout(self.timeout_s, read=self.timeout_s + request.wait_s)

    def unreachable(self, error: httpx.TransportError) -> KvpageError:
        """What a failure to exchange a request means to the caller."""
        if _is_permission_denied(error):
            return PermissionDenied(f"this user may not connect to {self.place}")
        details = {"address": self.place}
        if isinstance(error, httpx.ConnectError):
            return DeviceUnavailable(
                f"no kvpage server answers at {self.place}; start one with `kvpage serve`, or name its folder with "
                f"run_dir= or KVPAGE_RUN_DIR",
                details=details,
            )
        if isinstance(error, httpx.TimeoutException):
            return DeviceUnavailable(
                f"the kvpage server at {self.place} did not answer within {self.timeout_s:g} s", details=details
            )
        return DeviceUnavailable(
            f"the kvpage server at {self.place} ended the connection before it answered; see its log", details=details
        )


def _is_permission_denied(error: httpx.TransportError) -> bool:
    reason = error.__cause__
    if isinstance(reason, httpcore.ConnectError) and reason.args:
        reason = reason.args[0]  # its pool has taken the cause off
    return isinstance(reason, PermissionError)
