"""Lists of regions against torch: every byte that a tensor's strides reach, block by block."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.client.views import BufferViews, PlannedViews
from kvpage.errors import KvpageError, LayoutUnsupported, NotFound, SpecInvalid
from kvpage.regions import BufferRegions, Region, merged
from planner import build
from planner.random_requests import small_request
from support.checkout import ROOT

Json = dict[str, Any]


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """The address of every byte of every element, by the strides that torch has."""
    places = np.zeros(1, dtype=np.int64)
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + np.arange(extent) * stride).ravel()
    first = tensor.data_ptr() + places * tensor.element_size()
    return set((first[:, None] + np.arange(tensor.element_size())).ravel().tolist())


def spread(regions: Any) -> list[int]:
    return [byte for region in regions for byte in range(region.start, region.end)]


def check(plan: Any) -> None:
    """Layer by layer and block by block, and a few blocks of each group together."""
    buffer = BufferViews(torch.zeros(plan.buffer_size_bytes, dtype=torch.uint8))
    views = PlannedViews(plan).by_layer
    regions = BufferRegions(plan, base=buffer.base.data_ptr())
    assert set(regions.layers) == {name for name, layer in plan.layers.items() if layer.tensors}
    of_group: dict[int, set[int]] = {}
    for name, layer in regions.layers.items():
        assert layer.num_blocks == plan.num_blocks * plan.groups[layer.group].blocks_per_slab
        for block, listed in enumerate(layer):
            parts = [
                buffer.tensor(view).narrow(
                    view.block_axis, block * view.kernel_blocks_per_block, view.kernel_blocks_per_block
                )
                for view in views[name]
            ]
            reached = set().union(*map(bytes_of, parts))
            found = spread(listed)
            assert len(found) == len(set(found))
            assert set(found) == reached
            assert min(found) >= regions.whole.start
            assert max(found) < regions.whole.end
            if block in (1, 2, 5):
                of_group.setdefault(layer.group, set()).update(found)
    for group, reached in of_group.items():
        together = regions.of_blocks(group, [5, 1, 2])
        assert set(spread(together)) == reached
        assert all(left.end < right.start for left, right in pairwise(together))


def small(*layers: Json, **more: Any) -> Json:
    return build.request(*layers, **{"num_blocks": 6, "max_model_len": 1} | more)


HEADS = {"heads": 2, "size": 4, "block_size": 4}
STATES = build.state("s.{i}", [[3, 4], [2, 4, 2]], ["bfloat16", "float32"], count=2)
PLANS = {
    "padded 3:2": small(
        build.full("a.{i}", count=2, heads=2, size=12), build.sliding("b.{i}", count=2, heads=2, size=8)
    ),
    "kernel blocks": small(build.full("a", block_size=32, heads=2, size=4, kernel_block_sizes=[16])),
    "K and V apart": small(build.full("a.{i}", count=2, heads=2, size=4, block_size=16, backend="rocm_attn")),
    "HND": small(build.full("a", heads=2, size=4, block_size=16, backend="flash_attn"), kv_cache_layout="HND"),
    "states": small(STATES),
    "latent rows": small(build.mla("m", size=8), build.mla("n", size=12)),
    **{
        name: small(build.full("a.{i}", count=3, backend=name, **HEADS))
        for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
}
SEARCHED = [
    build.full("a.{i}", count=2, heads=2, size=12, block_size=16),
    build.state("s.{i}", [[3, 4], [8, 16, 8]], ["bfloat16", "float32"], count=2),
]


@pytest.mark.parametrize("name", PLANS)
def test_the_regions_of_a_block_are_the_bytes_that_its_tensors_reach(name: str) -> None:
    check(kvpage.plan(PLANS[name]))


@pytest.mark.parametrize("strategy", ["slab", "nested", "scale_then_pad"])
def test_so_they_are_where_layers_lie_side_by_side_in_slabs(strategy: str) -> None:
    request = build.request(*SEARCHED, memory_bytes=1 << 17, max_model_len=64)
    plan = kvpage.plan(request | {"strategy": strategy} | ({"allocator": "slabs"} if strategy == "nested" else {}))
    assert (max(group.blocks_per_slab for group in plan.groups) > 1) == (strategy == "nested")
    check(plan)


@given(st.randoms(use_true_random=False))
def test_so_they_are_in_random_plans(rng: random.Random) -> None:
    try:
        plan = kvpage.plan(small_request(rng))
    except KvpageError:
        return
    check(plan)


def test_a_region_is_as_long_as_the_layout_allows() -> None:
    """Padding is left out; a state's tensors are one; heads outside of layers are apart."""
    plan = kvpage.plan(json.loads((ROOT / "examples/mimo.json").read_text()))
    regions = BufferRegions(plan)
    (run,) = regions.layers["draft.0"].runs
    assert (run.stride_bytes, run.length_bytes) == (98304, 65536)
    assert regions.whole == Region(0, plan.buffer_size_bytes)
    assert len(BufferRegions(kvpage.plan(PLANS["states"])).layers["s.0"].runs) == 1
    assert len(BufferRegions(kvpage.plan(PLANS["BHLNC"])).layers["a.0"].runs) == 2
    packed = kvpage.plan(PLANS["BLHNC"])
    assert BufferRegions(packed).of_blocks(0, [2, 3]) == (
        Region(2 * packed.bytes_per_block, 2 * packed.bytes_per_block),
    )


def test_regions_that_touch_become_one() -> None:
    assert merged([Region(8, 2), Region(0, 4), Region(4, 4), Region(20, 0), Region(12, 3), Region(13, 1)]) == (
        Region(0, 10),
        Region(12, 3),
    )


def test_what_there_is_not_is_refused() -> None:
    plan = kvpage.plan(PLANS["padded 3:2"])
    regions = BufferRegions(plan)
    for block in (-1, 6, 1.0, True, "1"):
        with pytest.raises(SpecInvalid):
            regions.layer("a.0").of_block(block)  # type: ignore[arg-type]
    for group, ids in ((2, [1]), (-1, [1]), (0, [6]), (0, [-1]), (0, [1.5])):
        with pytest.raises(SpecInvalid):
            regions.of_blocks(group, ids)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        regions.layer("nobody")
    with pytest.raises(SpecInvalid, match="base"):
        BufferRegions(plan, base=-1)


def test_a_plan_that_reaches_out_of_its_buffer_is_refused() -> None:
    plan = kvpage.plan(PLANS["padded 3:2"])
    with pytest.raises(SpecInvalid, match="reaches from byte"):
        BufferRegions(msgspec.structs.replace(plan, buffer_size_bytes=plan.buffer_size_bytes - 1))


def test_a_layout_that_tears_blocks_to_pieces_is_refused() -> None:
    inside_out = {
        "shape": ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"],
        "stride_order": [1, 2, 3, 4, 0],
    }
    plan = kvpage.plan(small(build.full("a", heads=8, size=128, block_size=16, backend=inside_out)))
    with pytest.raises(LayoutUnsupported, match="32768 pieces"):
        BufferRegions(plan)
