"""Public reports of wasteful or broken layouts, as the searches and `scale_then_pad` answer them.

Numbers are from the reports or from arithmetic; P and a number labels a report. `test_cases` has the rule's answers.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
import pytest

import kvpage
from kvpage.errors import CannotUnify, SpecInvalid
from planner import build, comparison, search_oracle, view_oracle

Json = dict[str, Any]
KERNELS: Json = {"kernel_block_sizes": [{"multiple_of": 16}]}
SLABS = ("slab", "nested")


def rows(name: str, token_bytes: int, **more: Any) -> Json:
    """Layers of so many bytes a token, in one byte each."""
    return build.full(name, heads=1, size=token_bytes // 2, dtype="int8", **(KERNELS | more))


# --- P01: inline scales break the ratio of two ----------------------------------------------------

SCALED: Json = {"dtype": "float8_e4m3fn", "backend": "triton_attn", "kv_quant": "fp8_per_token_head"}
GEMMA = [
    build.sliding("window.{i}", count=25, heads=8, size=256, window=1024, **SCALED),
    build.full("full.{i}", count=5, heads=2, size=512, **SCALED),
]
LONG: Json = {"max_model_len": 32_768, "max_num_batched_tokens": 8192}


def test_p01_scaling_before_padding() -> None:
    """Blocks of 32 tokens and 512 bytes of padding: 410,559 tokens where padding alone leaves 325,335."""
    plan = kvpage.plan(build.request(*GEMMA, strategy="scale_then_pad", num_blocks=48_977, **LONG))
    full = plan.layers["full.0"]
    assert (full.block_size, full.real_page_size_bytes, full.page_size_bytes) == (32, 66_048, 66_560)
    assert [len(group.layers) for group in plan.groups] == [5] * 6
    assert sum(plan.capacity.blocks_per_request or ()) == 3909
    assert plan.capacity.max_concurrency == pytest.approx(12.53, abs=0.005)
    assert int((plan.capacity.max_concurrency or 0) * 32_768) == 410_559


@pytest.mark.parametrize("strategy", [*SLABS, "auto"])
def test_p01_searches_hold_no_more(strategy: str) -> None:
    requests = [
        build.request(*GEMMA, strategy=name, num_blocks=48_977, max_model_len=1, workload=[{"tokens": 32_768}])
        for name in ("scale_then_pad", strategy)
    ]
    workload = [{"tokens": 32_768, "weight": 1.0}]
    scaled, searched = (search_oracle.held_over_live(kvpage.plan(one), one, workload) for one in requests)
    assert searched <= scaled * 1.001


@pytest.mark.parametrize("strategy", ["scale_then_pad", *SLABS])
def test_p01_a_backend_that_cannot_skip_padding_is_refused(strategy: str) -> None:
    shape = ["num_blocks", "block_size", "num_kv_heads", "row_size + row_size_v"]
    layers = [layer | {"backend": build.dense(shape)} for layer in GEMMA]
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(build.request(*layers, strategy=strategy))
    assert caught.value.errors[0].pointer.startswith("/layers/")


# --- P02, P39: the largest block that fits --------------------------------------------------------


def test_p02_a_draft_beside_a_large_page() -> None:
    """432 of 436 tokens that would fit are a legal block; 18,432 bytes of 1,787,904 are padding.

    With the bound on the common multiple that is assumed elsewhere: lcm(432, 1552) would be 41,904.
    """
    layers = [
        build.state("state.{i}", [[1_777_664]], ["int8"], count=48),
        rows("full.{i}", 1152, count=16, block_size=1552),
        rows("draft.{i}", 4096, count=5) | {"kind": "sliding_window", "sliding_window": 4096, "draft": True},
    ]
    request = build.request(*layers, strategy="scale_then_pad", align_hybrid=True, max_block_lcm=41_904)
    draft = kvpage.plan(request | {"memory_bytes": 1 << 36}).layers["draft.0"]
    assert (draft.block_size, draft.real_page_size_bytes, draft.page_size_bytes) == (432, 1_769_472, 1_787_904)
    assert draft.decision == "scale_pad"


def test_p39_the_tail_of_a_page_is_no_legal_block() -> None:
    """1,148 tokens fit, 1,088 are whole kernel blocks of 64: 5.23 % padding."""
    layers = [
        build.mla("latent", size=656, dtype="uint8", block_size=3584),
        rows("draft", 2048, kernel_block_sizes=[{"multiple_of": 64}], block_size=64)
        | {"kind": "sliding_window", "sliding_window": 512},
    ]
    request = build.request(*layers, strategy="scale_then_pad", max_block_lcm=10**9)
    draft = kvpage.plan(request).layers["draft"]
    assert (draft.block_size, draft.real_page_size_bytes, draft.page_size_bytes) == (1088, 2_228_224, 2_351_104)


# --- P03: common multiples ------------------------------------------------------------------------


@pytest.mark.parametrize(("token_bytes", "exact", "padding"), [(1024, 1728, 196_608), (512, 3456, 983_040)])
def test_p03_padding_rather_than_a_common_multiple_of_13824(token_bytes: int, exact: int, padding: int) -> None:
    latent = build.mla("latent", size=576, block_size=1536, kernel_block_sizes=[{"multiple_of": 16}])
    draft = rows("draft", token_bytes) | {"kind": "sliding_window", "sliding_window": 512}
    scaled = kvpage.plan(build.request(latent, draft, strategy="scale_then_pad")).layers["draft"]
    assert (scaled.block_size, scaled.page_size_bytes) == (1536, 1_769_472)
    assert scaled.page_size_bytes - scaled.real_page_size_bytes == padding
    assert lcm(1536, exact) == 13_824
    loose = kvpage.plan(build.request(latent, draft, strategy="scale_then_pad", max_block_lcm=13_824)).layers["draft"]
    assert (loose.block_size, loose.page_size_padded) == (exact, None)


@pytest.mark.parametrize("strategy", [*SLABS, "auto"])
def test_p03_searches_keep_the_common_multiple_low(strategy: str) -> None:
    latent = build.mla("latent", size=576, kernel_block_sizes=[{"multiple_of": 16}])
    draft = rows("draft", 1024) | {"kind": "sliding_window", "sliding_window": 512}
    plan = kvpage.plan(build.request(latent, draft, strategy=strategy))
    assert lcm(*(group.block_size for group in plan.groups)) <= 1024


# --- P13, P15: groups -----------------------------------------------------------------------------


def of_counts(*counts: int) -> list[Json]:
    """Windows of several lengths: buckets of so many layers, all pages alike."""
    return [
        build.sliding(f"w{number}." + "{i}", count=count, heads=1, size=64, window=1024 * (number + 1))
        for number, count in enumerate(counts)
    ]


@pytest.mark.parametrize("strategy", ["scale_then_pad", "slab", "nested", "auto"])
def test_p13_one_odd_layer_does_not_make_46_groups(strategy: str) -> None:
    """Buckets of 30, 10, 5 and 1 layers: by the smallest bucket 46 groups, at width 5 ten. Groups of one layer would
    hold a little less, and cost an engine time in every step: 16 are the most without being asked for."""
    plan = kvpage.plan(build.request(*of_counts(30, 10, 5, 1), strategy=strategy))
    assert len(plan.groups) <= 16
    assert len(kvpage.plan(build.request(*of_counts(30, 10, 5, 1))).groups) == 46


def test_p13_auto_says_why_it_did_not_take_46_groups_and_takes_them_when_told() -> None:
    request = build.request(*of_counts(30, 10, 5, 1), strategy="auto")
    (unify,) = (other for other in kvpage.plan(request).rejected if other.strategy == "unify")
    assert "needs 46 groups" in unify.reason
    told = kvpage.plan(request | {"max_groups": 46})
    assert told.efficiency is not None
    assert unify.cost is not None
    assert told.efficiency.held_over_live <= unify.cost + 1e-9


def test_p13_at_ten_groups() -> None:
    plan = kvpage.plan(build.request(*of_counts(30, 10, 5, 1), strategy="scale_then_pad", max_groups=10))
    assert len(plan.groups) <= 10
    assert max(len(group.layers) for group in plan.groups) >= 5


@pytest.mark.parametrize("strategy", ["scale_then_pad", "slab", "auto"])
def test_p15_a_growing_bucket_is_split_only_where_that_holds_less(strategy: str) -> None:
    """Eleven full layers, five of a draft's windows and 34 states of the same page: width 5 makes eleven groups, width
    11 six. The one of fewer bytes is taken."""
    page = 16 * 2 * 64 * 2
    layers = [
        build.full("full.{i}", count=11, heads=1, size=64),
        build.sliding("draft.{i}", count=5, heads=1, size=64, window=1024),
        build.state("state.{i}", [[page]], ["int8"], count=34),
    ]
    workload = [{"tokens": 100_000, "weight": 1.0}]
    request = build.request(*layers, num_blocks=1_000_000, max_model_len=1, workload=workload, max_groups=11)
    plan = kvpage.plan(request | {"strategy": strategy})
    held = search_oracle.held_over_live(plan, request, workload)
    live = search_oracle.live_bytes(search_oracle.owners(request), request, 100_000)
    for width in (5, 11):
        groups = [-(-count // width) for count in (11, 5, 34)]
        blocks = [6250, -(-1023 // 16) + 1, 1]
        by_width = width * page * sum(n * each for n, each in zip(groups, blocks, strict=True)) / live
        assert held <= by_width * (1 + 1e-9)


# --- P10, P26, P47, P52, P54 ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SLABS)
def test_p10_kernels_that_count_rows_step_by_whole_rows(strategy: str) -> None:
    """Rows of 584 bytes in pages of whole 576: a stride is a multiple of lcm(584, 576) = 42,048 or there is no plan."""
    latent = {"kv_quant": "fp8_ds_mla", "size": 512, "dtype": "uint8", "page_alignment_bytes": 576}
    layers = [
        build.mla("latent.{i}", count=4, block_size=64, backend="BLHNC", **latent),
        build.sliding("window.{i}", count=2, heads=1, size=64, backend="BLHNC", window=128),
    ]
    plan = kvpage.plan(build.request(*layers, strategy=strategy))
    for name, layer in plan.layers.items():
        for view in layer.tensors:
            step = view.strides_bytes[view.block_axis]
            assert step % (42_048 if name.startswith("latent") else 2) == 0


@pytest.mark.parametrize("strategy", SLABS)
def test_p10_kernels_without_strides_are_not_packed(strategy: str) -> None:
    """Pages follow each other without a gap: each layer a group of its own, in slabs that are its pages."""
    dense = build.mla("latent.{i}", count=4, size=584, dtype="uint8", backend=build.dense(build.MLA_SHAPE))
    plan = kvpage.plan(build.request(dense, build.sliding("window", heads=1, size=64), strategy=strategy))
    for number in range(4):
        layer = plan.layers[f"latent.{number}"]
        assert [view.strides_bytes[0] for view in layer.tensors] == [layer.real_page_size_bytes]


def test_p10_a_slab_that_is_no_page_of_such_kernels_is_refused() -> None:
    dense = build.mla("latent", size=584, dtype="uint8", backend=build.dense(build.MLA_SHAPE))
    request = build.request(dense, build.state("state", [[20_000]], ["int8"]), strategy="slab", max_block_size=32)
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(request)
    assert "layer 'latent'" in caught.value.message


BUDGETS = [
    (26.46, 1_308_672, 21_709),
    (26.46, 1_228_800, 23_120),
    (26.09, 1_473_408, 19_015),
    (26.09, 1_315_008, 21_306),
]


@pytest.mark.parametrize(("gib", "slab", "blocks"), BUDGETS)
def test_p26_blocks_of_a_budget(gib: float, slab: int, blocks: int) -> None:
    """Two lives that fill one slab: blocks are the budget over the slab, which is the widest group's bytes."""
    layers = [
        build.state("one.{i}", [[slab // 4]], ["int8"], count=4),
        build.state("two.{i}", [[slab // 8]], ["int8"], count=8, num_speculative_blocks=1),
    ]
    plan = kvpage.plan(build.request(*layers, strategy="slab", memory_bytes=int(gib * 2**30), max_groups=2))
    assert plan.slab_bytes == -(-slab // 128) * 128  # what loads ask for; the report's block was a multiple of 64
    assert abs(plan.num_blocks - blocks) <= 5


@pytest.mark.parametrize("strategy", SLABS)
def test_p26_groups_are_dense_and_disjoint(strategy: str) -> None:
    layers = [
        build.mla("a.{i}", count=2, size=68, dtype="uint8", kernel_block_sizes=[16]),
        build.mla("b.{i}", count=1, size=132, dtype="uint8", kernel_block_sizes=[16]),
        build.sliding("w.{i}", count=3, heads=1, size=16, dtype="int8", window=8, kernel_block_sizes=[16]),
    ]
    request = build.request(*layers, strategy=strategy, num_blocks=4, workload=[{"tokens": 100}])
    del request["max_model_len"]
    plan = kvpage.plan(request)
    assert view_oracle.faults(plan, comparison.block_axes(request)) == set()
    for group in plan.groups:
        ends = [plan.layers[name].tensors[0].offset_bytes + plan.layers[name].page_size_bytes for name in group.layers]
        assert max(ends) == sum(plan.layers[name].page_size_bytes for name in group.layers)


@pytest.mark.parametrize("strategy", ["slab", "nested", "scale_then_pad", "auto"])
def test_p47_narrow_kernels_reach_the_end_of_the_last_block(strategy: str) -> None:
    """Block id times stride, in elements, and what lies in the block, stay below 2^31."""
    narrow = build.full("narrow.{i}", count=6, heads=4, size=128, index_bits=32, **KERNELS)
    layers = [narrow, build.state("state.{i}", [[1_000_001]], ["bfloat16"], count=6)]
    plan = kvpage.plan(build.request(*layers, strategy=strategy, memory_bytes=1 << 42))
    for number in range(6):
        (view,) = plan.layers[f"narrow.{number}"].tensors
        places = zip(view.shape, view.strides_bytes, strict=True)
        assert sum((extent - 1) * stride // 2 for extent, stride in places) < 2**31
    assert plan.buffer_size_bytes <= 1 << 42


@pytest.mark.parametrize("strategy", ["slab", "nested"])
def test_p52_kernels_that_pack_rows_take_whole_packs(strategy: str) -> None:
    """A block of one bf16 row would be two inside the kernel: blocks are what kernels take, whatever was asked."""
    layer = build.mla("latent", size=64, block_size=2, kernel_block_sizes=[{"multiple_of": 2}])
    plan = kvpage.plan(build.request(layer, build.sliding("w", heads=1, size=64), strategy=strategy))
    assert plan.layers["latent"].block_size % 2 == 0
    with pytest.raises(SpecInvalid):
        kvpage.plan(build.request(layer | {"block_size": 1}, strategy="unify"))


@pytest.mark.parametrize("strategy", ["unify", "slab", "nested", "auto"])
def test_p54_scales_of_a_part_of_a_vector_are_refused(strategy: str) -> None:
    """514 values are 32 vectors of 16 and two values: 33 scales a token, never 64 x 514 / 16 over the block."""
    layer = build.full("full", heads=1, size=514, dtype="uint8", kv_quant="nvfp4", backend="flashinfer")
    with pytest.raises(SpecInvalid):
        kvpage.plan(build.request(layer, strategy=strategy, kv_cache_layout="HND"))


def test_bytes_of_a_bf16_state_are_not_read_as_rows() -> None:
    """A slab that changes hands keeps its bytes: what a group wrote lies in the other group's blocks of that slab."""
    layers = [rows("full.{i}", 64, count=2), build.state("state.{i}", [[700]], ["bfloat16"], count=2)]
    request = build.request(*layers, strategy="nested", num_blocks=4, workload=[{"tokens": 100}])
    del request["max_model_len"]
    plan = kvpage.plan(request)
    raw = np.zeros(plan.buffer_size_bytes, dtype=np.uint8)
    state = view_oracle.as_array(plan.layers["state.0"].tensors[0], raw)
    owner = plan.groups[plan.layers["state.0"].group or 0]
    state[2 * owner.blocks_per_slab] = 0x4321
    touched = np.flatnonzero(raw)
    assert touched.min() >= 2 * plan.slab_bytes
    assert touched.max() < 3 * plan.slab_bytes
