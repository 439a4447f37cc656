"""Whole models: figures that vLLM prints, that public reports print, or that follow from them by hand."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from planner import build, comparison

Json = dict[str, Any]
GIB40 = 40 << 30
FLASH = {"backend": "flash_attn"}
FP8 = {"dtype": "float8_e4m3fn"}
DRAFT = {"draft": True}


def fulls(count: int, heads: int, size: int, **more: Any) -> Json:
    return build.full("full.{i}", count=count, heads=heads, size=size, **FLASH | more)


def slidings(count: int, heads: int, size: int, window: int, **more: Any) -> Json:
    return build.sliding("sliding.{i}", count=count, heads=heads, size=size, window=window, **FLASH | more)


# 40 GiB, 16,384 tokens, 8,192 at once:
# name, layers, bytes per block, blocks, blocks of one request, bytes of one request, concurrency
MODELS: list[tuple[str, list[Json], int, int, int, int, float]] = [
    ("gpt-oss-120b", [fulls(18, 8, 64), slidings(18, 8, 64, 128)], 589_824, 72_817, 1545, 911_278_080, 47.131),
    ("gpt-oss-20b + draft", [fulls(13, 8, 64), slidings(12, 8, 64, 128)], 425_984, 100_824, 1545, 658_145_280, 65.259),
    ("gpt-oss fp8", [fulls(18, 8, 64, **FP8), slidings(18, 8, 64, 128)], 589_824, 72_817, 1033, 609_288_192, 70.492),
    ("gemma-3-27b", [fulls(10, 16, 128), slidings(52, 16, 128, 1024)], 1_310_720, 32_768, 4486, 5_879_889_920, 7.305),
    ("mimo 3:2", [fulls(10, 8, 192), slidings(5, 8, 128, 1024, **DRAFT)], 491_520, 87_381, 2625, 1_290_240_000, 33.288),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "per_block", "num_blocks", "blocks", "request_bytes", "concurrency"),
    [row[1:] for row in MODELS],
    ids=[row[0] for row in MODELS],
)
def test_a_model_is_planned_as_vllm_plans_it(
    layers: list[Json], per_block: int, num_blocks: int, blocks: int, request_bytes: int, concurrency: float
) -> None:
    request = build.request(*layers, memory_bytes=GIB40, max_model_len=16_384, max_num_batched_tokens=8192)
    plan = kvpage.plan(request)
    assert (plan.bytes_per_block, plan.num_blocks) == (per_block, num_blocks)
    assert sum(plan.capacity.blocks_per_request or ()) == blocks
    assert plan.capacity.request_bytes == request_bytes
    assert plan.capacity.max_concurrency == pytest.approx(concurrency, abs=2e-3)
    comparison.compare(request)


def test_jamba_with_aligned_blocks() -> None:
    """4 full layers and 28 states: blocks of 80 tokens, eight groups of four, 205 + 7 blocks a request."""
    states = build.state("s.{i}", [[3, 8192], [8192, 16]], ["bfloat16", "bfloat16"], count=28)
    layers = [fulls(4, 8, 128), states]
    plan = kvpage.plan(build.request(*layers, align_hybrid=True, memory_bytes=GIB40, max_model_len=16_384))
    assert (plan.bytes_per_block, plan.num_blocks) == (1_310_720, 32_768)
    assert list(plan.capacity.blocks_per_request or ()) == [205] + [1] * 7
    assert plan.capacity.request_bytes == 277_872_640
    assert plan.capacity.max_concurrency == pytest.approx(154.566, abs=1e-3)


def test_three_halves() -> None:
    """The case that started it: target heads of 192, draft heads of 128, pages of 98,304 and 65,536 bytes."""
    target, draft = fulls(10, 8, 192), slidings(5, 8, 128, 1024, draft=True)
    plan = kvpage.plan(build.request(target, draft, memory_bytes=67_108_864))
    got = plan.layers["sliding.0"]
    assert (got.decision, got.real_page_size_bytes, got.page_size_padded) == ("pad", 65_536, 98_304)
    assert got.tensors[0].shape == (plan.num_blocks, 2, 16, 8, 128)
    assert got.tensors[0].strides_bytes[0] == 98_304
    assert [group.layers[:2] for group in plan.groups] == [
        ("full.0", "full.2"),
        ("full.1", "full.3"),
        ("sliding.0", "sliding.1"),
    ]
    with pytest.raises(kvpage.KvpageError) as caught:
        kvpage.plan(build.request(target, draft | {"backend": build.dense(build.KV_SHAPE)}))
    assert caught.value.code == "cannot-unify-page-size"
    assert caught.value.details["layer"] == "sliding.0"


def test_a_ratio_of_two_is_scaled() -> None:
    layers = [build.full("bf16", size=64), build.sliding("fp8", size=64, dtype="float8_e4m3fn")]
    plan = kvpage.plan(build.request(*layers))
    assert (plan.layers["fp8"].decision, plan.layers["fp8"].block_size) == ("scale", 32)
    assert plan.groups[0].page_size_bytes == 32_768


@pytest.mark.parametrize(("quantised", "per_block", "blocks"), [(False, 5 * 65_536, 3909), (True, 5 * 66_560, 4933)])
def test_scales_inside_rows_cost_capacity(quantised: bool, per_block: int, blocks: int) -> None:
    """vLLM issue 40388: 577 blocks in each of five groups, and 1,024 or, when padding keeps 16 tokens, 2,048."""
    rows: Json = {"dtype": "int8", "backend": "triton_attn"}
    if quantised:
        rows["kv_quant"] = "int8_per_token_head"
    layers = [slidings(25, 8, 256, 1024, **rows), fulls(5, 2, 512, **rows)]
    request = build.request(*layers, memory_bytes=GIB40, max_model_len=32_768, max_num_batched_tokens=8192)
    plan = kvpage.plan(request)
    assert plan.bytes_per_block == per_block
    assert sum(plan.capacity.blocks_per_request or ()) == blocks
    comparison.compare(request)


# layers of each bucket -> width, groups of each bucket
BUCKETS: list[tuple[list[int], int, list[int]]] = [
    ([30, 10, 5, 1], 1, [30, 10, 5, 1]),
    ([30, 10, 5], 5, [6, 2, 1]),
    ([48, 16, 5], 5, [10, 4, 1]),
    ([12, 13], 13, [1, 1]),
    ([13, 12], 13, [1, 1]),
    ([12, 36], 12, [1, 3]),
    ([9, 39, 5], 5, [2, 8, 1]),
    ([20, 30], 20, [1, 2]),
    ([20, 29], 29, [1, 1]),
    ([11, 5, 34], 5, [3, 1, 7]),
    ([10, 15], 10, [1, 2]),
    ([10, 14], 14, [1, 1]),
    ([2, 3], 2, [1, 2]),
    ([3, 4], 4, [1, 1]),
    ([1, 1, 1], 1, [1, 1, 1]),
    ([1, 2], 1, [1, 2]),
    ([7, 7, 7], 7, [1, 1, 1]),
    ([5, 6, 7], 7, [1, 1, 1]),
    ([5, 6, 8], 5, [1, 2, 2]),
    ([4, 5, 6], 4, [1, 2, 2]),
    ([10, 52], 10, [1, 6]),
]


@pytest.mark.parametrize(("buckets", "width", "groups"), BUCKETS)
def test_buckets_are_cut_to_one_width_and_dealt_out_in_turn(buckets: list[int], width: int, groups: list[int]) -> None:
    layers = [build.sliding(f"b{i}.{{i}}", window=16 * (i + 1), count=count) for i, count in enumerate(buckets)]
    plan = kvpage.plan(build.request(*layers, memory_bytes=GIB40))
    expected = [
        tuple(f"b{i}.{layer}" for layer in range(first, count, number))
        for i, (count, number) in enumerate(zip(buckets, groups, strict=True))
        for first in range(number)
    ]
    assert [group.layers for group in plan.groups] == expected
    assert max(len(group.layers) for group in plan.groups) <= width
    assert plan.bytes_per_block == width * 65_536 or len(plan.groups[0].layers) < width
    assert plan.bytes_per_block == max(len(group.layers) for group in plan.groups) * 65_536
