"""Preferences, waits and codings are read as their RFCs have them, and bounded."""

from __future__ import annotations

import pytest
from fastapi import Request

from kvpage_server.bodies import accepts_gzip, preferred_wait_s
from kvpage_server.queries import MAX_WAIT_S


def request(*headers: tuple[str, str]) -> Request:
    named = [(name.lower().encode(), value.encode()) for name, value in headers]
    return Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": named})


@pytest.mark.parametrize(
    ("values", "wait_s"),
    [
        ([], 0),
        (["wait=5"], 5),
        (["wait=0"], 0),
        (["respond-async, wait=7"], 7),
        (["respond-async", "Wait = 7"], 7),
        (['wait="8"'], 8),
        (["wait=31"], MAX_WAIT_S),
        (["wait=999999999"], MAX_WAIT_S),
        (["wait=-1"], 0),
        (["wait=1.5"], 0),
        (["wait=x"], 0),
        (["wait"], 0),
        (["await=5"], 0),
        (["wait=" + "9" * 5000], 0),
    ],
)
def test_a_preferred_wait(values: list[str], wait_s: float) -> None:
    assert preferred_wait_s(request(*(("Prefer", value) for value in values))) == wait_s


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("br, deflate , gzip;q=0.1", True),
        ("*", True),
        ("*;q=0", False),
        ("*, gzip;q=0", False),
        ("gzip, *;q=0", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("x-gzip", False),
    ],
)
def test_whether_gzip_is_accepted(value: str, accepted: bool) -> None:
    assert accepts_gzip(value) is accepted
