"""Plans of the searches seen from outside: what they say of themselves, every byte, and tensors written and read."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpage
from kvpage.errors import InternalError, KvpageError
from planner import build, comparison, rows, search_oracle, view_oracle
from planner.search_requests import any_layers, few_bytes

Json = dict[str, Any]

# (strategy, align_hybrid): all that auto may choose from, where it may align.
STRATEGIES = (
    ("unify", False),
    ("unify", True),
    ("scale_then_pad", False),
    ("scale_then_pad", True),
    ("slab", False),
    ("nested", False),
)
TORCH_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
NUMPY_DTYPES: dict[Any, Any] = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}
MOST_BYTES = 1 << 20  # of a buffer whose every byte is listed


def planned(request: Json, strategy: str, align_hybrid: bool = False) -> Any:
    """None where the request is refused. A plan that does not pass its check is a fault, not a refusal."""
    try:
        return kvpage.plan(request | {"strategy": strategy, "align_hybrid": align_hybrid})
    except InternalError:
        raise
    except KvpageError:
        return None


def outcome(request: Json) -> str:
    """Plan `request` in every way and compare; the strategy that auto took."""
    costs = []
    for strategy, align_hybrid in STRATEGIES:
        plan = planned(request, strategy, align_hybrid)
        if plan is None or not plan.groups:
            continue
        cost = search_oracle.held_over_live(plan, request, request["workload"])
        assert plan.efficiency.held_over_live == pytest.approx(cost, rel=1e-9), strategy
        assert plan.efficiency.floor_over_live <= cost * (1 + 1e-9)
        is_bounded = strategy in ("slab", "nested")
        assert not is_bounded or len(plan.groups) <= request["max_groups"]
        if len(plan.groups) <= request["max_groups"] and common_multiple_is_allowed(plan, request):
            costs.append(cost)
    plan = planned(request, "auto")
    if plan is None:
        assert not costs
        return "refused"
    if not plan.groups:
        return "no cache"
    cost = search_oracle.held_over_live(plan, request, request["workload"])
    assert plan.efficiency.held_over_live == pytest.approx(cost, rel=1e-9)
    assert costs, "auto has a plan of no strategy"
    assert cost <= min(costs) * (1 + 1e-8)
    assert {one.strategy for one in plan.rejected}.isdisjoint({plan.strategy})
    assert kvpage.Plan.from_json(plan.to_json()) == plan
    return str(plan.strategy)


def common_multiple_is_allowed(plan: Any, request: Json) -> bool:
    return bool(plan.efficiency.block_lcm_tokens <= request.get("max_block_lcm", plan.efficiency.block_lcm_tokens))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(120))
def test_auto_is_no_worse_than_any_other(seed: int) -> None:
    outcome(any_layers(random.Random(seed)))


@pytest.mark.long
@settings(max_examples=500)
@given(st.randoms(use_true_random=False))
def test_auto_is_no_worse_than_any_other_that_hypothesis_finds(rng: random.Random) -> None:
    outcome(any_layers(rng))


def test_random_requests_reach_every_strategy() -> None:
    """What auto takes, over many models: each strategy is worth having, and the comparison above sees them all."""
    wanted = Counter(unify=5, scale_then_pad=1, slab=5, nested=5)
    found: Counter[str | None] = Counter()
    for seed in (116, *range(120)):  # the first is one that scales and pads, which is rare
        found[planned_by_auto(any_layers(random.Random(seed)))] += 1
        if found >= wanted:
            return
    raise AssertionError(found)


def planned_by_auto(request: Json) -> str | None:
    plan = planned(request, "auto")
    return None if plan is None else str(plan.strategy)


# --- every byte -----------------------------------------------------------------------------------


def small_plan(rng: random.Random) -> tuple[Json, Any] | None:
    request = few_bytes(rng)
    plan = planned(request, request["strategy"])
    return None if plan is None or plan.buffer_size_bytes > MOST_BYTES else (request, plan)


@given(st.randoms(use_true_random=False))
def test_every_byte_belongs_to_one_block_of_one_slab(rng: random.Random) -> None:
    found = small_plan(rng)
    if found is not None:
        request, plan = found
        assert view_oracle.faults(plan, comparison.block_axes(request)) == set()


@given(st.randoms(use_true_random=False), st.integers(0, 2**32 - 1))
def test_groups_in_different_slabs_never_disturb_each_other(rng: random.Random, seed: int) -> None:
    """Deal slabs out to groups, write all blocks of each through torch, read everything back."""
    found = small_plan(rng)
    if found is None:
        return
    _, plan = found
    values = np.random.default_rng(seed)
    raw = torch.full((plan.buffer_size_bytes + -plan.buffer_size_bytes % 4,), 0xEE, dtype=torch.uint8)
    owner = values.integers(len(plan.groups) + 1, size=plan.num_blocks)  # the last owner is nobody
    written = []
    for layer in plan.layers.values():
        for view in layer.tensors if layer.kv_sharing_target is None else ():
            blocks = blocks_of(plan.groups[layer.group].blocks_per_slab, owner == layer.group, view)
            tensor = as_tensor(view, raw).movedim(view.block_axis, 0)
            dtype = NUMPY_DTYPES[tensor.dtype]
            data = torch.from_numpy(values.integers(np.iinfo(dtype).max, size=tensor[blocks].shape, dtype=dtype))
            tensor[blocks] = data
            written.append((tensor, blocks, data))
    for tensor, blocks, data in written:
        assert torch.equal(tensor[blocks], data)
    payload = sum(data.numel() * data.element_size() for _, _, data in written)
    assert int((raw != 0xEE).sum()) <= payload  # padding, and slabs of nobody, stayed as they were


def blocks_of(blocks_per_slab: int, slabs: Any, view: Any) -> torch.Tensor:
    """Places along the block axis that belong to the marked slabs: block id = slab × blocks_per_slab + index."""
    marked = np.repeat(slabs, blocks_per_slab * view.kernel_blocks_per_block)
    assert marked.size == view.shape[view.block_axis]
    return torch.from_numpy(np.flatnonzero(marked))


def as_tensor(view: Any, raw: torch.Tensor) -> torch.Tensor:
    item = rows.ITEM_SIZE_BYTES[view.dtype]
    typed = raw.view(TORCH_DTYPES[item])
    return torch.as_strided(
        typed, view.shape, [stride // item for stride in view.strides_bytes], view.offset_bytes // item
    )


def test_small_plans_have_slabs_of_several_blocks() -> None:
    """The two tests above see every strategy, slabs of one block and of several, and layers side by side."""
    seen: Counter[str] = Counter()
    wanted = ("slab", "nested", "unify", "cut", "side by side", "several groups")
    for seed in range(250):
        if all(seen[what] >= 10 for what in wanted):
            return
        found = small_plan(random.Random(seed))
        if found is None:
            continue
        _, plan = found
        seen[plan.strategy] += 1
        seen["cut"] += any(group.blocks_per_slab > 1 for group in plan.groups)
        seen["side by side"] += any(len(group.layers) > 1 for group in plan.groups)
        seen["several groups"] += len(plan.groups) > 1
    raise AssertionError(seen)


# --- backends that keep blocks in pieces ----------------------------------------------------------

KV_FIRST = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}
STRIDED_KV_FIRST = KV_FIRST | {"stride_order": [0, 1, 2, 3, 4], "layered_stride_order": [1, 2, 0, 3, 4, 5]}


@pytest.mark.parametrize("backend", [KV_FIRST, STRIDED_KV_FIRST, "rocm_attn"])
@pytest.mark.parametrize("strategy", ["slab", "nested"])
def test_blocks_in_pieces_cannot_lie_in_slabs(strategy: str, backend: str | Json) -> None:
    """K of all blocks before V of all blocks: the block of a slab would be two pieces, one of them in another slab."""
    layers = [build.full(heads=2, size=64, backend=backend), build.state("state", [[4096]], ["bfloat16"])]
    with pytest.raises(KvpageError) as caught:
        kvpage.plan(build.request(*layers, strategy=strategy))
    assert caught.value.code == "layout-unsupported"
    assert "num_blocks" in caught.value.message
    assert [fault.pointer for fault in caught.value.errors] == ["/layers/0/backend"]


def test_auto_leaves_blocks_in_pieces_to_the_rule() -> None:
    """Full and windowed layers of equal pages may share memory, K before V in both."""
    layers = [build.full(heads=2, size=64, backend=KV_FIRST), build.sliding(heads=2, size=64, backend=KV_FIRST)]
    plan = kvpage.plan(build.request(*layers, strategy="auto", allocator="slabs"))
    assert plan.strategy == "unify"
    assert {one.strategy: "num_blocks" in one.reason for one in plan.rejected if one.cost is None} == {
        "slab": True,
        "nested": True,
    }


def test_more_dense_layers_than_groups() -> None:
    """A layer whose pages must follow each other is a group of its own: with five of them, three groups are too few."""
    layers = [
        build.full("f.{i}", count=5, heads=2, size=64, backend=build.dense(build.ROW_SHAPE)),
        build.sliding("w", heads=2, size=64),
    ]
    for strategy in ("slab", "nested"):
        with pytest.raises(KvpageError) as caught:
            kvpage.plan(build.request(*layers, strategy=strategy, max_groups=3))
        assert caught.value.code == "cannot-unify-page-size"
        assert len(kvpage.plan(build.request(*layers, strategy=strategy, max_groups=6)).groups) == 6
