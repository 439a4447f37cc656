"""What is asked for with a map of blocks, and how old the process of a lease is said to be."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kvpage.wire.leasing import MAX_CELLS
from kvpage_server.blocks_state import age_s
from support.problems import assert_problem


@pytest.mark.anyio
@pytest.mark.parametrize("cells", ["0", "-1", "4097", "1.5", "", "x", "010", "99999999999999999999"])
async def test_a_map_has_a_bounded_number_of_cells(api: httpx.AsyncClient, cells: str) -> None:
    answer = await api.get("/v1/pools/pool-0123456789abcdef/block-map", params={"cells": cells})
    assert str(MAX_CELLS) in assert_problem(answer, "spec-invalid")["detail"]


@pytest.mark.anyio
async def test_a_map_takes_no_other_parameter(api: httpx.AsyncClient) -> None:
    answer = await api.get("/v1/pools/pool-0123456789abcdef/block-map?group=0")
    assert_problem(answer, "spec-invalid")


def began(pid: str) -> int:
    """In clock ticks since boot; proc(5), field 22."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_the_age_of_a_process_is_the_time_since_it_began() -> None:
    mine, first = age_s(began("self")), age_s(began("1"))
    assert mine is not None
    assert first is not None
    up_s = float(Path("/proc/uptime").read_text().split()[0])  # read last
    assert 0 <= mine <= first <= up_s


def test_of_a_process_that_was_not_seen_no_age_is_known() -> None:
    assert age_s(0) is None
