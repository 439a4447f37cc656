"""The searches against trying every layout: every slab size, every way to deal layers out, every block size."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported
from planner import build, search_oracle
from planner.search_requests import FEW_LAYERS_SLAB_BYTES, few_layers

Json = dict[str, Any]

NESTED_TOLERANCE = 1e-3
"""`nested` tries slabs that hold a whole number of some group's blocks, and not all slabs: it may miss so much."""
BOUNDS: tuple[Json, ...] = ({}, {"max_one_token_bytes": 1000}, {"max_one_token_bytes": 4000})
REFUSALS = (CannotUnify, LayoutUnsupported)


def planned(request: Json) -> Any:
    try:
        return kvpage.plan(request)
    except REFUSALS:
        return None


def has_one_life(request: Json) -> bool:
    """Then there is no search."""
    return len(next(search_oracle.bucketings(search_oracle.owners(request)))) == 1


def agrees_on_slab(request: Json) -> str:
    if has_one_life(request):
        return "one life"
    best, plan = search_oracle.best_slab(request, FEW_LAYERS_SLAB_BYTES), planned(request)
    assert (plan is None) == (best is None), (plan, best)
    if plan is None or best is None:
        return "refused"
    assert plan.efficiency.held_over_live == pytest.approx(best.cost, rel=1e-7), best
    return "planned"


def agrees_on_nested(request: Json) -> str:
    if has_one_life(request):
        return "one life"
    request = request | {"strategy": "nested"}
    best, plan = search_oracle.best_nested(request, FEW_LAYERS_SLAB_BYTES), planned(request)
    if plan is None or best is None:
        assert plan is best, (plan, best)
        return "refused"
    cost = plan.efficiency.held_over_live + search_oracle.GROUP_PRICE * len(plan.groups)
    assert cost <= best.cost * (1 + NESTED_TOLERANCE), best
    return "planned"


@pytest.mark.parametrize("seed", range(16))
def test_slab_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    agrees_on_slab(few_layers(rng) | rng.choice(BOUNDS))


@pytest.mark.parametrize("seed", range(16))
def test_nested_is_nearly_the_best_of_all(seed: int) -> None:
    agrees_on_nested(few_layers(random.Random(seed)))


@pytest.mark.long
@settings(max_examples=500)
@given(st.randoms(use_true_random=False))
def test_slab_is_the_best_of_all_that_hypothesis_finds(rng: random.Random) -> None:
    agrees_on_slab(few_layers(rng) | rng.choice(BOUNDS))


@pytest.mark.long
@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_nested_is_nearly_the_best_of_all_that_hypothesis_finds(rng: random.Random) -> None:
    agrees_on_nested(few_layers(rng))


def test_random_models_reach_every_outcome() -> None:
    """The comparison is worth something only if layouts of every sort are found and refused."""
    requests = [few_layers(random.Random(seed)) for seed in range(150)]
    plans = [planned(request) for request in requests if not has_one_life(request)]
    found = [plan for plan in plans if plan is not None]
    assert 10 < len(plans) - len(found) < 40
    assert sum(len(plan.groups) > 2 for plan in found) > 30
    assert sum(len({group.block_size for group in plan.groups}) > 1 for plan in found) > 30
    assert sum(layer.decision == "co_group" for plan in found for layer in plan.layers.values()) > 10


def test_slab_in_a_pool_of_few_slabs() -> None:
    """The null slab and what is left over count where there are few, so another slab is best than in a large pool."""
    kernels: Json = {"kernel_block_sizes": [{"multiple_of": 16}]}
    layers = [
        build.full("f.{i}", count=4, heads=1, size=5, dtype="int8", **kernels),
        build.sliding("w.{i}", count=3, heads=1, size=3, dtype="int8", window=30, **kernels),
    ]
    request = build.request(*layers, strategy="slab", max_groups=3, max_block_size=64, max_block_lcm=64)
    request |= {"workload": [{"min_tokens": 10, "max_tokens": 90, "weight": 1.0}], "max_model_len": 90}
    slabs = []
    for memory in (2_400, 5_000, 20_000, 1 << 30):
        assert agrees_on_slab(request | {"memory_bytes": memory}) == "planned"
        slabs.append(kvpage.plan(request | {"memory_bytes": memory}).slab_bytes)
    assert len(set(slabs)) > 1, slabs
