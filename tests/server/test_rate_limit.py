"""Buckets that fill at a steady rate, of which there are never more than so many; and what they let through."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kvpage_server.app import create_app
from kvpage_server.rate_limit import Buckets, ChangeLimit
from support.api_in_process import in_process, settings_without_worker
from support.problems import assert_problem
from support.token_files import token_of, with_every_role


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_gives_its_burst_at_once_and_then_at_its_rate() -> None:
    clock = Clock()
    buckets = Buckets(10, burst=3, max_names=4, clock_s=clock)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") == pytest.approx(0.1)
    clock.now_s += 0.1
    assert buckets.take("a") == 0
    assert buckets.take("a") == pytest.approx(0.1)
    clock.now_s += 1000
    assert [buckets.take("a") for _ in range(4)][:3] == [0, 0, 0]


def test_who_is_refused_does_not_wait_the_longer_for_it() -> None:
    clock = Clock()
    buckets = Buckets(1, burst=1, max_names=4, clock_s=clock)
    buckets.take("a")
    assert [buckets.take("a") for _ in range(100)] == [pytest.approx(1.0)] * 100


def test_over_a_long_time_no_more_is_given_than_the_rate() -> None:
    clock = Clock()
    buckets = Buckets(7, burst=5, max_names=4, clock_s=clock)
    given = 0
    for _ in range(10_000):
        given += buckets.take("a") == 0
        clock.now_s += 0.01
    assert given == pytest.approx(7 * 100 + 5, abs=1)


def test_one_bucket_does_not_empty_another() -> None:
    buckets = Buckets(1, burst=1, max_names=4, clock_s=Clock())
    assert buckets.take("a") == 0
    assert buckets.take("b") == 0
    assert buckets.take("a") > 0


def test_there_are_never_more_buckets_than_may_be() -> None:
    clock = Clock()
    buckets = Buckets(1, burst=1, max_names=10, clock_s=clock)
    for number in range(1000):
        buckets.take(str(number))
        assert len(buckets) <= 10
        clock.now_s += 0.01


def test_full_buckets_are_forgotten_before_empty_ones() -> None:
    clock = Clock()
    buckets = Buckets(1, burst=1, max_names=3, clock_s=clock)
    buckets.take("old")
    clock.now_s += 2
    buckets.take("a")
    buckets.take("b")
    buckets.take("c")
    assert buckets.take("a") > 0
    assert len(buckets) == 3


@pytest.mark.parametrize(
    ("per_s", "policy"), [(100, '"changes";q=100;w=1'), (2.5, '"changes";q=2;w=1'), (0.1, '"changes";q=1;w=10')]
)
def test_the_headers_tell_the_rate_and_when_to_come_again(per_s: float, policy: str) -> None:
    headers = ChangeLimit(per_s, max_tokens=1).headers(0.25)
    assert headers == {"Retry-After": "1", "RateLimit-Policy": policy, "RateLimit": '"changes";r=0;t=1'}


def test_a_rate_under_one_a_second_still_lets_one_through() -> None:
    limit = ChangeLimit(0.1, max_tokens=2, clock_s=Clock())
    assert limit.wait_s("a") == 0
    assert limit.wait_s("a") == pytest.approx(10)


# --- over HTTP --------------------------------------------------------------------------------------------------------

RENEW = "/v1/pools/pool-0123456789abcdef/leases/x/renew"


async def change(api: httpx.AsyncClient, role: str | None) -> httpx.Response:
    """Of a pool whose worker is not there, so nothing comes of it."""
    headers = {} if role is None else {"Authorization": f"Bearer {token_of(role)}"}
    return await api.post(RENEW, headers=headers)


@pytest.mark.anyio
async def test_each_token_may_change_things_so_often_and_look_as_often_as_it_likes(run_dir: Path) -> None:
    settings = settings_without_worker(run_dir, token_file=with_every_role(run_dir), rate_limit_per_s=0.001)
    async with in_process(create_app(settings), caller=None) as api:
        assert (await change(api, "allocate")).status_code != 429
        refused = await change(api, "allocate")
        assert_problem(refused, "rate-limited")
        wait_s = int(refused.headers["retry-after"])
        assert 990 <= wait_s <= 1000
        assert refused.headers["ratelimit"] == f'"changes";r=0;t={wait_s}'
        assert refused.headers["ratelimit-policy"] == '"changes";q=1;w=1000'
        assert (await change(api, "admin")).status_code != 429  # another's bucket
        assert_problem(await change(api, "read"), "permission-denied")  # who may not takes nothing from anybody
        for _ in range(3):
            looked = await api.get("/v1/pools", headers={"Authorization": f"Bearer {token_of('allocate')}"})
            assert looked.status_code == 200


@pytest.mark.anyio
async def test_the_unix_socket_is_not_limited(run_dir: Path) -> None:
    settings = settings_without_worker(run_dir, token_file=with_every_role(run_dir), rate_limit_per_s=0.001)
    async with in_process(create_app(settings)) as api:
        answers = await asyncio.gather(*(change(api, None) for _ in range(5)))
    assert 429 not in {answer.status_code for answer in answers}
