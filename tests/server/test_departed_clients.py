"""A connection that breaks while it is being ended is no error; everything else that the loop reports is one."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from kvpage_server.departed_clients import ignore_departed_clients

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("context", "is_logged"),
    [
        ({"transport": object(), "exception": OSError(errno.ENOTCONN, "not connected")}, False),
        ({"transport": object(), "exception": BrokenPipeError()}, False),
        ({"transport": object(), "exception": RuntimeError("a bug")}, True),
        ({"exception": OSError(errno.EMFILE, "too many files")}, True),
        ({"message": "Task was destroyed but it is pending!"}, True),
    ],
)
async def test_only_what_befell_a_connection_is_not_logged(
    context: dict[str, object], is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ignore_departed_clients()
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        asyncio.get_running_loop().call_exception_handler({"message": "it happened", **context})
    assert bool(caplog.records) == is_logged
