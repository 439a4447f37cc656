"""What a connection is told that breaks a bound."""

from __future__ import annotations

from kvpage.errors import RequestTimeout, TooLarge, TooManyClients


def framing_too_large(stage: str, limit: int) -> TooLarge:
    what = "request line and headers" if stage == "head" else "chunk extensions and trailers"
    return TooLarge(
        f"the {what} have more than {limit} bytes; send fewer or shorter ones", details={"limit_bytes": limit}
    )


def body_too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body has more than {limit} bytes; no more are read. Write repeated layers once with `count`.",
        details={"limit_bytes": limit},
    )


def not_in_time(stage: str, limit_s: float) -> RequestTimeout:
    return RequestTimeout(
        f"the request's {stage} was not complete within {limit_s:g} s; send it faster", details={"limit_s": limit_s}
    )


def displaced() -> TooManyClients:
    return TooManyClients("others needed this connection while its request was not complete; send it again, and whole")
