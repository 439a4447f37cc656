"""Very many who plan at once all get their plans."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from support.many_planners import many_planners
from support.planner_program import Planner


def test_a_hundred_planners_at_once_all_get_the_right_plan(no_leaks: None) -> None:
    many_planners(100).tally.require_nothing_lost()


@pytest.mark.long
def test_where_places_are_few_planners_get_their_plans_in_the_end(no_leaks: None) -> None:
    tally = many_planners(24, limits={"max_connections": 16}).tally
    tally.require_nothing_lost()


def _answer(status: int, body: object, headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


_BUSY = _answer(429, {"code": "rate-limited", "retryable": True}, "Retry-After: 0\r\n")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answers", "loss"),
    [
        ([_answer(200, {"plan_id": "right"})], ""),
        ([_BUSY, _BUSY, _answer(201, {"plan_id": "right"})], ""),
        ([_answer(200, {"plan_id": "wrong"})], "another plan"),
        ([_answer(500, {"code": "internal"})], "refused for good"),
        ([_answer(429, {"code": "rate-limited", "retryable": True})], "refused for good"),
        ([b""], "no answer"),
        ([_answer(200, {"plan_id": "right"})[:-3]], "no answer"),
    ],
)
async def test_the_check_fires_for_every_other_answer(answers: Sequence[bytes], loss: str) -> None:
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        planner = Planner({"host": "x", "address": server.sockets[0].getsockname()}, "{}", "right")
        await planner.connect()
        assert (await planner.plan()).partition(":")[0] == loss
