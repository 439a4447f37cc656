"""What a row holds: K and V of different width, and quantised rows with their scales inside."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import SpecInvalid
from planner import build, comparison

DIFFKV, CPU, FLASH, TRITON, FLASHINFER = "flash_attn_diffkv", "cpu_attn", "flash_attn", "triton_attn", "flashinfer"

# --- K and V of different width -------------------------------------------------------------------

# heads, K, V, dtype, block size -> page
WIDTHS = [
    (8, 192, 128, "bfloat16", 16, 81_920),
    (8, 192, 192, "bfloat16", 16, 98_304),
    (4, 192, 128, "bfloat16", 16, 40_960),
    (8, 192, 128, "float8_e4m3fn", 16, 40_960),
    (8, 192, 128, "float32", 16, 163_840),
    (1, 192, 128, "bfloat16", 16, 10_240),
    (5, 192, 128, "bfloat16", 16, 51_200),
    (8, 128, 192, "bfloat16", 16, 81_920),
    (8, 128, 64, "bfloat16", 16, 49_152),
    (8, 64, 128, "bfloat16", 16, 49_152),
    (16, 256, 128, "float16", 16, 196_608),
    (16, 256, 128, "float16", 32, 393_216),
    (16, 256, 128, "float16", 64, 786_432),
    (2, 576, 512, "bfloat16", 16, 69_632),
    (1, 576, 512, "float8_e4m3fn", 64, 69_632),
    (2, 96, 80, "float32", 16, 22_528),
    (2, 80, 96, "float32", 16, 22_528),
    (4, 64, 1, "bfloat16", 16, 8320),
    (4, 1, 64, "int8", 16, 4160),
    (3, 7, 5, "float32", 16, 2304),
    (8, 192, 128, "bfloat16", 1, 5120),
    (8, 192, 128, "bfloat16", 7, 35_840),
]


@pytest.mark.parametrize("kind", [build.full, build.sliding])
@pytest.mark.parametrize(("heads", "k", "v", "dtype", "block_size", "page"), WIDTHS)
def test_a_page_holds_k_and_v_of_their_own_width(
    kind: Any, heads: int, k: int, v: int, dtype: str, block_size: int, page: int
) -> None:
    layer = kind("layer", heads=heads, size=k, head_size_v=v, dtype=dtype, block_size=block_size)
    request = build.request(layer, num_blocks=1000, max_model_len=64)
    plan = kvpage.plan(request)
    got = plan.layers["layer"]
    assert (got.real_page_size_bytes, got.page_size_bytes, got.block_size) == (page, page, block_size)
    assert got.tensors[0].shape == (1000, block_size, heads, k + v)
    comparison.compare(request)


def test_layers_whose_v_differs_are_not_merged() -> None:
    """vLLM 0.24.0 forgets V's width, merges the two and gives the second pages that are too small."""
    layers = [build.full("a", size=192, head_size_v=128), build.full("b", size=192, head_size_v=192)]
    plan = kvpage.plan(build.request(*layers))
    assert [layer.page_size_bytes for layer in plan.layers.values()] == [81_920, 98_304]
    assert plan.bytes_per_block == 180_224
    assert len(plan.groups) == 1
    assert [layer.tensors[0].offset_bytes for layer in plan.layers.values()] == [0, 81_920 * plan.num_blocks]


def test_naming_the_width_of_v_changes_nothing_when_it_is_that_of_k() -> None:
    layers = [
        build.full("a"),
        build.full("b", head_size_v=128),
        build.sliding("c"),
        build.sliding("d", head_size_v=128),
    ]
    assert [group.layers for group in kvpage.plan(build.request(*layers)).groups] == [("a", "b"), ("c", "d")]
    both = kvpage.plan(build.request(build.full("a"), build.full("b", head_size_v=128)))
    assert both.groups[0].page_size_bytes == 65_536  # one spec, not one type


def test_the_backends_for_two_widths_keep_k_and_v_in_one_row() -> None:
    layer = build.full(size=192, head_size_v=128)
    shapes = {DIFFKV: (9, 16, 8, 320), "triton_attn_diffkv": (9, 16, 8, 320), CPU: (9, 8, 16, 320)}
    for backend, shape in shapes.items():
        plan = kvpage.plan(build.request(layer | {"backend": backend}, num_blocks=9, max_model_len=16))
        assert plan.layers["full"].tensors[0].shape == shape


@pytest.mark.parametrize("backend", [FLASH, TRITON, FLASHINFER, "flex_attention", "rocm_attn"])
def test_a_backend_for_one_width_refuses_two(backend: str) -> None:
    layer = build.full(size=192, head_size_v=128, backend=backend)
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(layer))
    assert caught.value.errors[0].pointer.startswith("/layers/0")


# --- quantised rows -------------------------------------------------------------------------------

INT8 = {"kv_quant": "int8_per_token_head", "dtype": "int8", "backend": TRITON}
FP8 = {"kv_quant": "fp8_per_token_head", "dtype": "float8_e4m3fn", "backend": TRITON}
NVFP4 = {"kv_quant": "nvfp4", "dtype": "uint8", "backend": FLASHINFER}

# rows, heads, head size, block size -> bytes of a stored row, page
QUANTISED: list[tuple[dict[str, Any], int, int, int, int, int]] = [
    (INT8, 8, 256, 16, 260, 66_560),
    (INT8, 2, 512, 16, 516, 33_024),
    (INT8, 1, 64, 16, 68, 2176),
    (INT8, 8, 128, 16, 132, 33_792),
    (INT8, 8, 128, 32, 132, 67_584),
    (INT8, 4, 80, 64, 84, 43_008),
    (INT8, 5, 96, 16, 100, 16_000),
    (INT8, 4, 192, 48, 196, 75_264),
    (FP8, 8, 256, 16, 260, 66_560),
    (FP8, 2, 512, 16, 516, 33_024),
    (FP8, 1, 128, 16, 132, 4224),
    (FP8, 8, 64, 32, 68, 34_816),
    (FP8, 16, 128, 16, 132, 67_584),
    (FP8, 4, 256, 16, 260, 33_280),
    (NVFP4, 4, 256, 16, 144, 18_432),
    (NVFP4, 8, 64, 16, 36, 9216),
    (NVFP4, 8, 128, 16, 72, 18_432),
    (NVFP4, 8, 128, 32, 72, 36_864),
    (NVFP4, 8, 128, 64, 72, 73_728),
    (NVFP4, 1, 512, 16, 288, 9216),
    (NVFP4, 2, 256, 16, 144, 9216),
    (NVFP4, 16, 64, 32, 36, 36_864),
]


@pytest.mark.parametrize("kind", [build.full, build.sliding, build.chunked])
@pytest.mark.parametrize(("rows", "heads", "size", "block_size", "row", "page"), QUANTISED)
def test_scales_lie_inside_the_row(
    kind: Any, rows: dict[str, Any], heads: int, size: int, block_size: int, row: int, page: int
) -> None:
    layer = kind("layer", heads=heads, size=size, block_size=block_size) | rows
    request = build.request(layer, num_blocks=1000, max_model_len=64, kv_cache_layout="HND")
    plan = kvpage.plan(request)
    got = plan.layers["layer"]
    assert (got.real_page_size_bytes, got.page_size_bytes) == (page, page)
    (view,) = got.tensors
    assert view.shape == (1000, 2, block_size, heads, row)
    assert view.strides_bytes == (page, page // 2, row, block_size * row, 1)
    assert view.dtype == rows["dtype"]
    comparison.compare(request)


def test_scales_break_the_ratio_of_two() -> None:
    """66,560 and 33,024 bytes (vLLM issue 40388): without scales 2:1 and scaled, with them padded, or refused."""
    small = build.full("full.{i}", heads=2, size=512, count=5)
    large = build.sliding("sliding.{i}", heads=8, size=256, count=25)
    plain = kvpage.plan(build.request(*(layer | {"dtype": "int8", "backend": TRITON} for layer in (small, large))))
    assert (plain.layers["full.0"].decision, plain.layers["full.0"].block_size) == ("scale", 32)
    assert plain.bytes_per_block == 5 * 65_536
    scaled = kvpage.plan(build.request(small | INT8, large | INT8))
    assert (scaled.layers["full.0"].decision, scaled.layers["full.0"].block_size) == ("pad", 16)
    assert scaled.layers["full.0"].real_page_size_bytes == 33_024
    assert scaled.bytes_per_block == 5 * 66_560


@pytest.mark.parametrize(("dtype", "quant"), [("bfloat16", "nvfp4"), ("float32", "int8_per_token_head")])
def test_quantised_rows_are_bytes(dtype: str, quant: str) -> None:
    with pytest.raises(SpecInvalid):
        kvpage.plan(build.request(build.full(dtype=dtype, kv_quant=quant, backend=TRITON)))


@pytest.mark.parametrize("size", [8, 24, 514, 100])
def test_nvfp4_needs_whole_scales(size: int) -> None:
    """One scale for 16 values; bytes must never be rounded down."""
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(build.full(size=size, **NVFP4), kv_cache_layout="HND"))
    assert caught.value.errors[0].pointer.startswith("/layers/0")


def test_layers_quantised_otherwise_are_not_merged() -> None:
    layers = [build.full("a", **INT8), build.full("b", dtype="int8", backend=TRITON), build.full("c", **INT8)]
    plan = kvpage.plan(build.request(*layers))
    assert plan.bytes_per_block == 33_792 + 32_768 + 33_792
    assert len(plan.groups) == 1
