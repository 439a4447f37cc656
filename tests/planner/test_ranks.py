"""All ranks of a model: groups made once, parts of them on each rank, blocks of the smallest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.errors import KvpageError
from kvpage.ranked_plan import RankedPlan
from planner import comparison, ranks_oracle, view_oracle
from planner.random_requests import random_request, small_request

Json = dict[str, Any]


def ranked(request: Json, *ranks: Json) -> RankedPlan:
    plans = kvpage.plan_ranks(request | {"ranks": list(ranks)})
    plans.check()
    return plans


def split(rng: random.Random, whole: kvpage.Plan) -> list[list[str]]:
    """Every layer on one rank or on two; those that share a cache on one with its owner. Some ranks have none."""
    kept: list[set[str]] = [set() for _ in range(rng.randint(1, 5))]
    for name, layer in whole.layers.items():
        owner = layer.kv_sharing_target or name
        for rank in rng.choices(kept, k=rng.choice((1, 1, 2))):
            rank |= {owner, name}
    return [[name for name in whole.layers if name in rank] for rank in kept]


def compare(rng: random.Random, request: Json) -> bool:
    """Whether there is a plan; all of it as the oracle says."""
    try:
        whole = kvpage.plan(request)
    except KvpageError:
        return False
    kept = split(rng, whole)
    memories = [request["memory_bytes"] * rng.choice((1, 1, 2, 3)) for _ in kept]
    told = [{"layers": names, "memory_bytes": own} for names, own in zip(kept, memories, strict=True)]
    plans = ranked(request, *told)
    for names, plan in zip(kept, plans.ranks, strict=True):
        assert [list(group.layers) for group in plan.groups] == ranks_oracle.groups(whole, set(names))
        assert [group.block_size for group in plan.groups] == [group.block_size for group in whole.groups]
        assert list(plan.layers) == names
        assert plan.capacity.blocks_per_request == whole.capacity.blocks_per_request
        assert plan.num_blocks == plans.num_blocks
        assert [group.page_size_bytes for group in plan.groups] == ranks_oracle.group_pages(whole, plan)
        assert plan.capacity.request_bytes == ranks_oracle.request_bytes(plan)
        least = ranks_oracle.least_bytes_per_block(whole, set(names))
        assert least <= plan.bytes_per_block <= whole.bytes_per_block
        assert plan.bytes_per_block == least or ranks_oracle.may_need_more(plan)
    blocks = ranks_oracle.num_blocks(memories, [plan.bytes_per_block for plan in plans.ranks])
    assert plans.num_blocks in (
        (1,) if blocks is None else (blocks, blocks - 1)
    )  # gaps between regions take one at most
    return True


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_any_split_has_the_groups_and_blocks_of_the_whole(first: int) -> None:
    planned = [compare(random.Random(seed), random_request(random.Random(seed))) for seed in range(first, first + 50)]
    assert sum(planned) > 10


@given(st.randoms(use_true_random=False))
def test_any_split_that_hypothesis_finds(rng: random.Random) -> None:
    compare(rng, random_request(rng))


@given(st.randoms(use_true_random=False))
def test_every_byte_of_a_small_rank_has_one_owner(rng: random.Random) -> None:
    request = small_request(rng)
    try:
        whole = kvpage.plan(request)
    except KvpageError:
        return
    plans = ranked(request, *({"layers": names} for names in split(rng, whole)))
    axes = comparison.block_axes(request)
    for plan in plans.ranks:
        assert view_oracle.faults(plan, axes) == set()


@given(st.randoms(use_true_random=False))
def test_one_rank_with_all_layers_is_the_plan_itself(rng: random.Random) -> None:
    request = random_request(rng)
    try:
        whole = kvpage.plan(request)
    except KvpageError as error:
        with pytest.raises(type(error)):
            kvpage.plan_ranks(request | {"ranks": [{}]})
        return
    plans = ranked(request, {}, {})
    assert plans.ranks == (whole, whole)
    assert plans.ranks[0] is plans.ranks[1]
    assert plans.warnings == ()


@given(st.randoms(use_true_random=False))
def test_layers_written_out_by_ranks_are_planned_as_the_requests_own(rng: random.Random) -> None:
    request = random_request(rng)
    try:
        whole = kvpage.plan(request)
    except KvpageError:
        return
    rest = {key: value for key, value in request.items() if key != "layers"}
    assert ranked(rest, {"layers": request["layers"]}, {"layers": request["layers"][::-1]}).ranks == (whole, whole)
