"""The API process from Python: plans, pools, devices and health over its Unix socket or a URL."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpcore
import httpx
import msgspec

from kvpage.client.problem import error_of
from kvpage.client.resources import Device, DeviceList, Health, Pool, PoolList, PoolTensors
from kvpage.errors import (
    Conflict,
    DeviceUnavailable,
    KvpageError,
    PermissionDenied,
    PoolNotFound,
    ProtocolError,
    error_from_code,
    shorten,
)
from kvpage.plans import Plan
from kvpage.run_directory import RunDirectory

DEFAULT_TIMEOUT_S = 30.0
MAX_WAIT_S = 30.0
"""The longest wait the server grants in one request."""

_Resource = TypeVar("_Resource", bound=msgspec.Struct)


class Client:
    """A connection to a kvpage server; methods may be called from several threads. `close()` it, or use `with`.

    Every problem the server reports is raised as the `KvpageError` it names, with its `details` and `errors`. When no
    server answers, `DeviceUnavailable` says how to start one.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        run_dir: str | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url`: such as `http://127.0.0.1:8080`; default the socket in the run directory, see `RunDirectory.default`.

        `token`: a bearer token, for a URL. `timeout_s`: for connecting and for each answer, waiting not counted.
        `transport`: what carries requests, for tests and for TLS of one's own.
        """
        self._timeout_s = timeout_s
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if url is None:
            socket_path = RunDirectory.default(run_dir).api_socket
            self._place = f"{socket_path}"
            url, transport = "http://kvpage", transport or _UnixTransport(str(socket_path))
            headers["Accept-Encoding"] = "identity"  # compressing costs more than a local socket saves
        else:
            self._place = url
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def __repr__(self) -> str:
        return f"<kvpage.Client {self._place} {'closed' if self.closed else 'open'}>"

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        self._http.close()

    # --- plans -------------------------------------------------------------------------------------------------------

    def plan(self, request: object) -> Plan:
        """The server's plan for `request`, a mapping or a `PlanRequest`. Raises `SpecInvalid` with pointers into it."""
        response = self._send("POST", "/v1/plans", body=_request_json(request))
        return Plan.from_json(response.content)

    def get_plan(self, plan_id: str) -> Plan:
        """Raises `PlanNotFound` when the server has forgotten it; `plan` its request again then."""
        return Plan.from_json(self._send("GET", f"/v1/plans/{_segment(plan_id)}").content)

    # --- pools -------------------------------------------------------------------------------------------------------

    def create_pool(
        self, request: object, *, name: str, device: str = "host", plan_id: str | None = None, wait_s: float = 30.0
    ) -> Pool:
        """Make a pool of the plan for `request`, or find the one of this name and plan.

        Waits up to `wait_s` for its memory; after that the pool's `state` is still `creating`, and `get_pool` tells
        more. `plan_id`: refuse any other plan. Raises `Conflict` (another plan under this name or than expected),
        `NotEnoughMemory`, `SpecInvalid`, `DeviceUnavailable`.
        """
        deadline_s = time.monotonic() + wait_s
        expected = {} if plan_id is None else {"plan_id": plan_id}
        asked = {"name": name, "device": device, "request": msgspec.Raw(_request_json(request)), **expected}
        granted_s = _granted(wait_s)
        response = self._send(
            "POST",
            "/v1/pools",
            body=_encode(asked),
            headers={"Prefer": f"wait={math.ceil(granted_s)}"},
            wait_s=granted_s,
        )
        pool = _decode(response, Pool)
        while pool.state == "creating" and (left_s := deadline_s - time.monotonic()) > 0:
            pool = self.get_pool(pool.id, wait_s=left_s)
        if pool.error is not None:
            raise error_from_code(pool.error.code, pool.error.message, details=pool.error.details)
        return pool

    def pools(self) -> list[Pool]:
        return _decode(self._send("GET", "/v1/pools"), PoolList).pools

    def get_pool(self, pool_id: str, *, wait_s: float = 0.0) -> Pool:
        """Waits up to `wait_s` (at most `MAX_WAIT_S`) while the pool is creating or deleting. Raises `PoolNotFound`."""
        granted_s = _granted(wait_s)
        query = {"wait": f"{granted_s:.3f}"} if granted_s else {}
        return _decode(self._send("GET", f"/v1/pools/{_segment(pool_id)}", query=query, wait_s=granted_s), Pool)

    def find_pool(self, name: str, device: str | None = None) -> Pool:
        """The pool of that name. Raises `PoolNotFound`, or `Conflict` when several devices have one."""
        query = {"name": name} if device is None else {"name": name, "device": device}
        found = _decode(self._send("GET", "/v1/pools", query=query), PoolList).pools
        if not found:
            where = "" if device is None else f" on {device}"
            raise PoolNotFound(f"there is no pool named {shorten(repr(name))}{where}", details={"name": name})
        if len(found) > 1:
            devices = [pool.device for pool in found]
            raise Conflict(
                f"{', '.join(devices)} each have a pool named {shorten(repr(name))}; name the device",
                details={"devices": devices},
            )
        return found[0]

    def delete_pool(self, pool_id: str) -> None:
        """Give the memory back. Raises `Conflict` naming the holders, `PoolNotFound`."""
        self._send("DELETE", f"/v1/pools/{_segment(pool_id)}")

    def pool_tensors(self, pool_id: str) -> PoolTensors:
        """Shape, byte strides and offset of every tensor in the pool's buffer."""
        return _decode(self._send("GET", f"/v1/pools/{_segment(pool_id)}/tensors"), PoolTensors)

    # --- the server --------------------------------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        return _decode(self._send("GET", "/v1/devices"), DeviceList).devices

    def health(self) -> Health:
        """Named checks and the status they add up to. A server that is not ready is an answer, not an error."""
        return _decode(self._send("GET", "/readyz", query={"verbose": ""}, expected=(503,)), Health)

    # --- one request -------------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        expected: tuple[int, ...] = (),
    ) -> httpx.Response:
        """The answer, unless it is a problem. `expected`: statuses over 400 that are answers here."""
        all_headers = dict(headers or {})
        if body is not None:
            all_headers["Content-Type"] = "application/json"
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + wait_s)
        try:
            response = self._http.request(
                method, path, content=body, params=query, headers=all_headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400 and response.status_code not in expected:
            raise error_of(response.status_code, response.content)
        return response

    def _unreachable(self, error: httpx.TransportError) -> KvpageError:
        if isinstance(error.__cause__, PermissionError):
            return PermissionDenied(f"this user may not connect to {self._place}")
        if isinstance(error, httpx.ConnectError):
            return DeviceUnavailable(
                f"no kvpage server answers at {self._place}; start one with `kvpage serve`, or name its folder with "
                f"run_dir= or KVPAGE_RUN_DIR",
                details={"address": self._place},
            )
        if isinstance(error, httpx.TimeoutException):
            return DeviceUnavailable(
                f"the kvpage server at {self._place} did not answer within {self._timeout_s:g} s",
                details={"address": self._place},
            )
        return DeviceUnavailable(
            f"the kvpage server at {self._place} ended the connection before it answered; see its log",
            details={"address": self._place},
        )


def _request_json(request: object) -> bytes:
    """A plan request as JSON. A `PlanRequest` is sent without its defaults, as it was written."""
    if isinstance(request, Mapping):
        return _encode(request)
    dump = getattr(request, "model_dump", None)  # pydantic is imported by those who use its models, not here
    if dump is None:
        raise TypeError(f"a plan request is a mapping or a PlanRequest, not {type(request).__name__}")
    return _encode(dump(mode="json", exclude_unset=True))


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _decode(response: httpx.Response, kind: type[_Resource]) -> _Resource:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the server's answer is not a {kind.__name__}: {shorten(str(error))}") from error


def _granted(wait_s: float) -> float:
    return max(0.0, min(wait_s, MAX_WAIT_S))


def _segment(identifier: str) -> str:
    """`identifier` as one segment of a path."""
    return quote(identifier, safe=":")


class _UnixTransport(httpx.BaseTransport):
    """HTTP over a Unix socket; unlike httpx's own it loads no certificates, which takes 30 ms."""

    def __init__(self, path: str) -> None:
        self._pool = httpcore.ConnectionPool(
            uds=path, network_backend=_UnixBackend(), max_connections=100, keepalive_expiry=5.0
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        sent = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.read(),
            extensions=request.extensions,
        )
        with _as_httpx_errors():
            answer = self._pool.handle_request(sent)
            content = answer.read()
        return httpx.Response(answer.status, headers=answer.headers, content=content, extensions=answer.extensions)

    def close(self) -> None:
        self._pool.close()


class _UnixBackend(httpcore.SyncBackend):
    """Asks whether anybody listens before its parent connects, which leaves its socket open when nobody does."""

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(path)
            except OSError as error:
                raise httpcore.ConnectError(error) from error
        return super().connect_unix_socket(path, timeout, socket_options)


@contextlib.contextmanager
def _as_httpx_errors() -> Iterator[None]:
    try:
        yield
    except httpcore.ConnectError as error:
        reason = error.args[0] if error.args else None  # the pool has taken the cause off
        raise httpx.ConnectError(str(error)) from (reason if isinstance(reason, OSError) else error)
    except httpcore.TimeoutException as error:
        raise httpx.ReadTimeout(str(error)) from error
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise httpx.ReadError(str(error)) from error
