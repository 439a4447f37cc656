"""An application that writes to a client who has just left is told so, and fails in nothing."""

from __future__ import annotations

import pytest
from starlette.types import Message

from kvpage_server.lost_client import dropping, ending

pytestmark = pytest.mark.anyio


async def _receive() -> Message:
    raise RuntimeError("the handler is closed")


async def _send(message: Message) -> None:
    raise RuntimeError("the handler is closed")


async def test_a_client_that_has_left_is_told_as_such() -> None:
    assert await ending(_receive, lambda: True)() == {"type": "http.disconnect"}
    await dropping(_send, lambda: True)({"type": "http.response.body"})


async def test_with_a_client_that_is_there_it_is_a_failure() -> None:
    with pytest.raises(RuntimeError):
        await ending(_receive, lambda: False)()
    with pytest.raises(RuntimeError):
        await dropping(_send, lambda: False)({"type": "http.response.body"})
