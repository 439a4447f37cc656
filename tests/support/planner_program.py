"""Run as a program: many who plan at once, each over a connection of its own. `planner_program.py FILE`

FILE: JSON with `socket` (a path) or `address` (host and port), `host`, and `asked`: pairs of a body and the id of its
plan. It says `ready` when all are connected, begins at a line of standard input, and writes what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MAX_ATTEMPTS = 60


class Planner:
    """Tries again as an answer says, as clients do."""

    def __init__(self, place: dict[str, Any], body: str, plan_id: str) -> None:
        self._place, self._plan_id, data = place, plan_id, body.encode()
        head = f"POST /v1/plans HTTP/1.1\r\nHost: {place['host']}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self.outcomes: Counter[str] = Counter()

    async def connect(self) -> None:
        if "socket" in self._place:
            self._in, self._out = await asyncio.open_unix_connection(self._place["socket"], limit=1 << 20)
        else:
            self._in, self._out = await asyncio.open_connection(*self._place["address"], limit=1 << 20)

    async def _disconnect(self) -> None:
        self._out.close()
        with contextlib.suppress(OSError):
            await self._out.wait_closed()

    async def plan(self) -> str:
        """Why it is lost, or nothing."""
        for _ in range(MAX_ATTEMPTS):
            try:
                self._out.write(self._request)
                status, headers, body = await self._answer()
            except (OSError, EOFError) as error:
                return f"no answer: {type(error).__name__}"
            finally:
                await self._disconnect()
            answer = json.loads(body)
            if status in (200, 201):
                return "" if answer["plan_id"] == self._plan_id else f"another plan: {answer['plan_id']}"
            if not answer.get("retryable") or "retry-after" not in headers:
                return f"refused for good: {status} {body[:200]!r}"
            self.outcomes[answer["code"]] += 1
            await asyncio.sleep(float(headers["retry-after"]))
            await self.connect()
        return f"refused {MAX_ATTEMPTS} times"

    async def _answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self._in.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return int(first.split()[1]), headers, await self._in.readexactly(int(headers["content-length"]))


async def run(place: dict[str, Any], asked: list[tuple[str, str]]) -> dict[str, Any]:
    planners = [Planner(place, body, plan_id) for body, plan_id in asked]
    for planner in planners:
        await planner.connect()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    losses = [loss for loss in await asyncio.gather(*(planner.plan() for planner in planners)) if loss]
    outcomes: Counter[str] = sum((planner.outcomes for planner in planners), Counter())
    return {"losses": losses, "outcomes": outcomes}


if __name__ == "__main__":
    _place = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(json.dumps(asyncio.run(run(_place, _place.pop("asked")))))
