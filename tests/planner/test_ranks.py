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
from planner import build, comparison, ranks_oracle, view_oracle
from planner.random_requests import random_request, small_request
from planner.rows import is_latent

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


# --- strategies that search --------------------------------------------------------------------------


def searched(
    rng: random.Random, request: Json, strategy: str
) -> tuple[kvpage.Plan, RankedPlan, list[list[str]]] | None:
    """The whole model's plan and those of ranks; None where there is no plan."""
    request = request | {"strategy": strategy} | ({"allocator": "slabs"} if strategy in ("nested", "auto") else {})
    request.pop("layered", None)
    try:
        whole = kvpage.plan(request)
    except KvpageError:
        return None
    kept = split(rng, whole)
    memory = {key: request[key] for key in ("num_blocks",) if key in request}
    asked = request if memory else request | {"memory_bytes": request["memory_bytes"] * 8}
    return whole, ranked(asked, *({"layers": names} for names in kept)), kept


def in_slabs(plan: kvpage.Plan, request: Json) -> bool:
    """Whether its slabs are just as long as its layers need: no rows or alignment of their own ask for more."""
    others = any(is_latent(entry) for entry in request["layers"])
    return plan.strategy in ("slab", "nested") and len(plan.groups) > 1 and not others


@pytest.mark.parametrize("num_seeds", [20, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", ["scale_then_pad", "slab", "nested", "auto"])
def test_whatever_the_strategy_ranks_have_the_same_groups_and_blocks(strategy: str, num_seeds: int) -> None:
    num_planned = num_slabs = 0
    for seed in range(num_seeds):
        request = random_request(random.Random(seed))
        found = searched(random.Random(seed), request, strategy)
        if found is None:
            continue
        num_planned += 1
        whole, plans, kept = found
        first = plans.ranks[0]
        members = [set[str]().union(*(plan.groups[i].layers for plan in plans.ranks)) for i in range(len(first.groups))]
        assert set().union(*members) == {name for name, layer in whole.layers.items() if layer.group is not None}
        for names, plan in zip(kept, plans.ranks, strict=True):
            assert list(plan.layers) == names
            assert [set(group.layers) for group in plan.groups] == [of & set(names) for of in members]
            assert [looks(group) for group in plan.groups] == [looks(group) for group in first.groups]
            assert (plan.strategy, plan.num_blocks) == (first.strategy, plans.num_blocks)
            if in_slabs(plan, request) and len(names) < len(whole.layers):
                num_slabs += 1
                assert plan.slab_bytes == ranks_oracle.least_slab_bytes(plan)
    assert num_planned > num_seeds // 4
    assert (num_slabs > 0) == (strategy != "scale_then_pad")


def looks(group: Any) -> tuple[int, int]:
    return group.block_size, group.blocks_per_slab


@pytest.mark.parametrize("strategy", ["scale_then_pad", "slab", "nested"])
@given(st.randoms(use_true_random=False))
def test_every_byte_of_a_small_rank_has_one_owner_whatever_the_strategy(strategy: str, rng: random.Random) -> None:
    request = small_request(rng)
    found = searched(rng, request, strategy)
    for plan in () if found is None else found[1].ranks:
        assert view_oracle.faults(plan, comparison.block_axes(request)) == set()


def test_the_slab_of_a_rank_holds_its_layers_and_no_more() -> None:
    """Four full layers of 98,304 bytes fill the model's slab; six windows of 65,536 just as well."""
    layers = [build.full("full.{i}", size=192, count=4), build.sliding("window.{i}", count=6)]
    ranks: list[Json] = [{"layers": names} for names in (["full.2"], ["window.{i}"], ["full.0", "window.5"], [])]
    request = build.request(*layers, memory_bytes=1 << 34) | {"strategy": "slab"}
    plans = ranked(request, *ranks, {"layers": ["full.{i}", "window.0"]}, {})
    assert [plan.slab_bytes for plan in plans.ranks] == [98_304, 393_216, 98_304, 0, 393_216, 393_216]
    assert [[len(group.layers) for group in plan.groups] for plan in plans.ranks] == [
        [1, 0], [0, 6], [1, 1], [0, 0], [4, 1], [4, 6],
    ]  # fmt: skip
    assert [plan.num_blocks for plan in plans.ranks] == [(1 << 34) // 393_216] * 6
    whole = kvpage.plan(request)
    assert plans.efficiency == plans.ranks[5].efficiency == whole.efficiency
    assert [plan.efficiency for plan in plans.ranks[:5]] == [None] * 5  # what is true of the whole is not of a part
    assert plans.ranks[5] == whole


def test_a_model_that_fits_on_no_rank_is_planned_on_all_of_them() -> None:
    """What a search weighs is the memory of all stages: one alone could not hold two slabs of the model."""
    layers = [build.full("full.{i}", count=64), build.sliding("window.{i}", size=64, count=64)]
    stages = [{"layers": [f"{name}.{i}" for i in range(4 * stage, 4 * stage + 4) for name in ("full", "window")]}
              for stage in range(16)]  # fmt: skip
    request = build.request(*layers, memory_bytes=6 * 4 * 65_536, max_model_len=64, max_groups=2)
    for strategy in ("unify", "scale_then_pad", "slab", "nested", "auto"):
        plans = ranked(request | {"strategy": strategy}, *stages)
        assert plans.num_blocks >= 2
