"""What a client asks of the API process and how it reads the answers, without sending anything.

Each function here is one method of both clients. It yields requests, is sent the answers, and returns what the
method returns; so waiting loops and decoding exist once, and a client only carries requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from kvpage.client.arguments import checked_optional, checked_seconds, checked_text
from kvpage.client.problem import beginning, error_of
from kvpage.client.resources import Device, DeviceList, ForgottenPool, Health, Pool, PoolList, PoolTensors
from kvpage.errors import (
    Conflict,
    FieldError,
    KvpageError,
    PoolNotFound,
    ProtocolError,
    SpecInvalid,
    error_from_code,
    shorten,
)
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan
from kvpage.strict_json import MAX_DEPTH, pointer

MAX_WAIT_S = 30.0
"""The longest wait the server grants in one request."""

MAX_ANSWER_BYTES = 64 << 20
"""Several times the largest answer there is: a plan of 4,096 layers."""

MAX_IDENTIFIER_BYTES = 256

_UNWRITABLE = (TypeError, ValueError, RecursionError)  # ValueError: half of a surrogate pair, among others

_Result = TypeVar("_Result")
_Plans = TypeVar("_Plans", Plan, RankedPlan)
_Resource = TypeVar("_Resource", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None
    """JSON."""
    query: Mapping[str, str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    """How much longer than usual the answer may take."""

    @property
    def all_headers(self) -> dict[str, str]:
        return {**self.headers, **({} if self.body is None else {"Content-Type": "application/json"})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for a `Request`, read whole."""

    status: int
    content: bytes

    def checked(self, *, expected: tuple[int, ...] = ()) -> bytes:
        """The content. Raises the error a problem names, unless its status is `expected` to carry an answer."""
        if not 200 <= self.status < 300 and self.status not in expected:
            raise error_of(self.status, self.content)
        return self.content


class Collected:
    """The parts of an answer as they come. Bounded: whoever answers may be no kvpage server."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        """Raises `ProtocolError` over `MAX_ANSWER_BYTES`."""
        self._parts.append(part)
        self._num_bytes += len(part)
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise ProtocolError(
                f"the server answers with more than {MAX_ANSWER_BYTES} bytes, which no answer of kvpage has",
                details={"limit_bytes": MAX_ANSWER_BYTES},
            )

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)


Call: TypeAlias = Generator[Request, Answer, _Result]


# --- plans -----------------------------------------------------------------------------------------------------------


def plan(request: object) -> Call[Plan]:
    if isinstance(request, Mapping) and request.get("ranks") is not None:
        detail = "this request is of several ranks: plan_ranks plans them"
        raise SpecInvalid(f"/ranks: {detail}", errors=[FieldError("/ranks", detail)])
    return _proven(Plan, (yield Request(method="POST", path="/v1/plans", body=request_json(request))))


def plan_ranks(request: object) -> Call[RankedPlan]:
    return _proven(RankedPlan, (yield Request(method="POST", path="/v1/plans", body=_ranked_json(request))))


def get_plan(plan_id: str) -> Call[Plan]:
    return _proven(Plan, (yield Request(method="GET", path=f"/v1/plans/{segment('plan_id', plan_id)}")))


def layout_svg(plan_id: str) -> Call[str]:
    answer = yield Request(method="GET", path=f"/v1/plans/{segment('plan_id', plan_id)}/layout.svg")
    content = answer.checked()
    try:
        svg = content.decode()
    except UnicodeDecodeError:
        svg = ""
    if not svg.startswith("<svg "):
        raise ProtocolError(f"the server's answer is no SVG document; it begins with {beginning(content)}")
    return svg


# --- pools -----------------------------------------------------------------------------------------------------------


def create_pool(
    request: object,
    *,
    name: str,
    device: str,
    rank: int | None,
    plan_id: str | None,
    handle_kind: str | None,
    wait_s: float,
) -> Call[Pool]:
    checked_text("name", name)
    checked_text("device", device)
    checked_optional("plan_id", plan_id)
    deadline_s = time.monotonic() + checked_seconds("wait_s", wait_s)
    checked_optional("handle_kind", handle_kind)
    optional = {"rank": rank, "plan_id": plan_id, "handle_kind": handle_kind}
    asked = {"name": name, "device": device, "request": msgspec.Raw(request_json(request))} | {
        key: value for key, value in optional.items() if value is not None
    }
    granted_s = _granted(wait_s)
    headers = {"Prefer": f"wait={math.ceil(granted_s)}"}
    pool = yield from get(
        Request(method="POST", path="/v1/pools", body=encode(asked), headers=headers, wait_s=granted_s), Pool
    )
    while pool.state == "creating" and (left_s := deadline_s - time.monotonic()) > 0:
        pool = yield from get_pool(pool.id, wait_s=left_s)
    if pool.error is not None:
        raise error_from_code(pool.error.code, pool.error.message, details=pool.error.details)
    return pool


def pools() -> Call[list[Pool]]:
    return (yield from get(Request(method="GET", path="/v1/pools"), PoolList)).pools


def get_pool(pool_id: str, *, wait_s: float) -> Call[Pool]:
    return (yield from get(_waiting("GET", pool_id, checked_seconds("wait_s", wait_s)), Pool))


def find_pool(name: str, device: str | None) -> Call[Pool]:
    query = {"name": checked_text("name", name)} | (
        {} if device is None else {"device": checked_text("device", device)}
    )
    found = (yield from get(Request(method="GET", path="/v1/pools", query=query), PoolList)).pools
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


def delete_pool(pool_id: str, *, wait_s: float, force: bool) -> Call[ForgottenPool | None]:
    deadline_s = time.monotonic() + checked_seconds("wait_s", wait_s)
    while True:
        left_s = deadline_s - time.monotonic()
        is_last = left_s <= MAX_WAIT_S
        answer = yield _waiting("DELETE", pool_id, left_s, **({"force": "true"} if force and is_last else {}))
        try:
            content = answer.checked()
            return decode(content, ForgottenPool) if content else None
        except Conflict:
            if time.monotonic() >= deadline_s:
                raise


def pool_tensors(pool_id: str) -> Call[PoolTensors]:
    return (yield from get(Request(method="GET", path=f"/v1/pools/{segment('pool_id', pool_id)}/tensors"), PoolTensors))


# --- the server ------------------------------------------------------------------------------------------------------


def devices() -> Call[list[Device]]:
    return (yield from get(Request(method="GET", path="/v1/devices"), DeviceList)).devices


def health() -> Call[Health]:
    answer = yield Request(method="GET", path="/readyz", query={"verbose": ""})
    return decode(answer.checked(expected=(503,)), Health)


# --- parts -----------------------------------------------------------------------------------------------------------


def get(request: Request, kind: type[_Resource]) -> Call[_Resource]:
    """What the answer says."""
    answer = yield request
    return decode(answer.checked(), kind)


def _waiting(method: str, pool_id: str, wait_s: float, **query: str) -> Request:
    granted_s = _granted(wait_s)
    if granted_s:
        query["wait"] = f"{granted_s:.3f}"
    path = f"/v1/pools/{segment('pool_id', pool_id)}"
    return Request(method=method, path=path, query=query or None, wait_s=granted_s)


def request_json(request: object) -> bytes:
    """A plan request as JSON. A `PlanRequest` is sent without its defaults, as it was written."""
    if isinstance(request, Mapping):
        return encode(request)
    dump = getattr(request, "model_dump", None)  # pydantic is imported by those who use its models, not here
    if dump is None:
        raise SpecInvalid(f"a plan request is a mapping or a PlanRequest, not {type(request).__name__}")
    return encode(dump(mode="json", exclude_unset=True))


def _ranked_json(request: object) -> bytes:
    """All ranks of a model are asked for where the request does not name its ranks, as `kvpage.plan_ranks` reads it."""
    if isinstance(request, Mapping) and request.get("ranks") is None:
        return encode({**request, "ranks": "all"})
    return request_json(request)


def encode(value: Any) -> bytes:
    """As JSON. Raises `SpecInvalid`, with the place, for what cannot be written so."""
    try:
        return msgspec.json.encode(value)
    except _UNWRITABLE as error:
        where, reason = pointer(*_place(value)), shorten(str(error))
        text = f"{where or 'the request'}: this cannot be written as JSON: {reason}"
        raise SpecInvalid(text, errors=[FieldError(where, reason)]) from error


def _place(value: object) -> list[str | int]:
    """Of the innermost value in `value`, which cannot be written, that cannot be written either."""
    place: list[str | int] = []
    while len(place) < MAX_DEPTH:  # a value may be inside itself
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        found = next(((key, inner) for key, inner in items if not _is_writable({str(key): inner})), None)
        if found is None:
            break
        place.append(found[0] if isinstance(found[0], int) else str(found[0]))
        value = found[1]
    return place


def _is_writable(value: object) -> bool:
    try:
        msgspec.json.encode(value)
    except _UNWRITABLE:
        return False
    return True


def decode(content: bytes, kind: type[_Resource]) -> _Resource:
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, and so is an int too long
        raise ProtocolError(
            f"the server's answer is not a {kind.__name__}: {shorten(str(error))}; it begins with {beginning(content)}"
        ) from error


def _proven(kind: type[_Plans], answer: Answer) -> _Plans:
    content = answer.checked()
    try:
        return kind.from_json(content)
    except KvpageError as error:
        raise ProtocolError(
            f"the server's answer is not a {kind.__name__}: {shorten(error.message)}; it begins with "
            f"{beginning(content)}"
        ) from error


def _granted(wait_s: float) -> float:
    return max(0.0, min(wait_s, MAX_WAIT_S))


def segment(field: str, identifier: str) -> str:
    """`identifier` as one segment of a path. Raises `SpecInvalid`."""
    return quote(checked_text(field, identifier, max_bytes=MAX_IDENTIFIER_BYTES), safe=":")
