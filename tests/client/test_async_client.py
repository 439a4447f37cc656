"""`AsyncClient` has what `Client` has, and lets its loop go on while it waits."""

from __future__ import annotations

import asyncio
import inspect

import httpx
import pytest

import kvpage
from kvpage.errors import Conflict

pytestmark = pytest.mark.anyio

POOL = {
    "id": "pool-1", "name": "mimo", "device": "host", "state": "ready", "plan_id": "sha256:00", "epoch": "00",
    "buffer_size_bytes": 1, "committed_bytes": 1, "num_holders": 0, "holders": [],
}  # fmt: skip


def signatures(kind: type) -> dict[str, str]:
    """Every public method with its parameters, in text."""
    return {
        name: str(inspect.signature(member))
        for name, member in vars(kind).items()
        if not name.startswith("_") and inspect.isfunction(member)
    }


# Leases are of two kinds, of which one cannot clear memory in the middle of an await; and events come one by one.
OF_ITS_OWN_KIND = {"create_lease", "adopt_lease", "events"}


def test_both_clients_have_the_same_methods_with_the_same_parameters() -> None:
    of_async, of_sync = signatures(kvpage.AsyncClient), signatures(kvpage.Client)
    assert of_async.keys() == of_sync.keys()
    assert {name for name in of_sync if of_async[name] != of_sync[name]} == OF_ITS_OWN_KIND
    assert len(signatures(kvpage.Client)) > 8


def test_every_method_of_the_one_is_awaited() -> None:
    for name in signatures(kvpage.AsyncClient):
        member = getattr(kvpage.AsyncClient, name)
        assert inspect.iscoroutinefunction(member) or (name == "events" and inspect.isasyncgenfunction(member)), name


def test_the_comparison_sees_a_difference() -> None:
    class Other:
        def pools(self, name: str) -> None: ...

        def _private(self) -> None: ...

    assert signatures(Other) == {"pools": "(self, name: 'str') -> 'None'"}


async def test_the_loop_goes_on_while_a_pool_is_waited_for() -> None:
    asked, finish = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.set()
        await finish.wait()
        return httpx.Response(200, json=POOL)

    async with kvpage.AsyncClient("http://test", transport=httpx.MockTransport(answer)) as client:
        waiting = asyncio.ensure_future(client.get_pool("pool-1", wait_s=30))
        await asked.wait()
        assert not waiting.done()
        finish.set()
        assert (await waiting).name == "mimo"
    assert client.closed


async def test_what_is_cancelled_leaves_the_client_usable() -> None:
    asked = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/pools":
            return httpx.Response(409, json={"code": "conflict", "detail": "no"})
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with kvpage.AsyncClient("http://test", transport=httpx.MockTransport(answer)) as client:
        waiting = asyncio.ensure_future(client.get_pool("pool-1"))
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(Conflict):
            await client.pools()
