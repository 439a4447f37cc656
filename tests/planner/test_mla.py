"""MLA rows: one row per token, pages rounded up to an alignment, alone and beside other layers."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify
from planner import build, comparison

# block size, head size, dtype, alignment, bytes of the rows, page
ALIGNED = [
    (64, 584, "uint8", 576, 37_376, 37_440),
    (64, 584, "uint8", None, 37_376, 37_376),
    (1, 584, "uint8", 576, 584, 1152),
    (2, 584, "uint8", 576, 1168, 1728),
    (256, 584, "uint8", 576, 149_504, 149_760),
    (64, 656, "uint8", 1, 41_984, 41_984),
    (64, 656, "uint8", 576, 41_984, 42_048),
    (64, 656, "uint8", 1024, 41_984, 41_984),
    (64, 656, "uint8", 4096, 41_984, 45_056),
    (64, 132, "uint8", 576, 8448, 8640),
    (64, 132, "uint8", 8448, 8448, 8448),
    (64, 132, "uint8", 8449, 8448, 8449),
    (16, 576, "bfloat16", 576, 18_432, 18_432),
    (16, 576, "bfloat16", 1024, 18_432, 18_432),
    (16, 576, "bfloat16", 4096, 18_432, 20_480),
    (16, 576, "bfloat16", 73_728, 18_432, 73_728),
    (16, 576, "bfloat16", 18_434, 18_432, 18_434),
    (32, 512, "float16", 32_768, 32_768, 32_768),
    (32, 512, "float16", 65_536, 32_768, 65_536),
    (32, 512, "float32", 4096, 65_536, 65_536),
    (16, 320, "float8_e4m3fn", 512, 5120, 5120),
    (16, 320, "float8_e4m3fn", 12, 5120, 5124),
    (16, 320, "bfloat16", 3, 10_240, 10_242),
    (8, 132, "int8", 512, 1056, 1536),
]


@pytest.mark.parametrize(("block_size", "head_size", "dtype", "alignment", "data", "page"), ALIGNED)
def test_an_mla_page_is_rounded_up_to_its_alignment(
    block_size: int, head_size: int, dtype: str, alignment: int | None, data: int, page: int
) -> None:
    layer = build.mla(size=head_size, dtype=dtype, block_size=block_size)
    if alignment is not None:
        layer["page_alignment_bytes"] = alignment
    request = build.request(layer, num_blocks=8, max_model_len=block_size)
    plan = kvpage.plan(request)
    got = plan.layers["mla"]
    assert (got.real_page_size_bytes, got.page_size_bytes, got.page_size_padded) == (data, page, None)
    (view,) = got.tensors
    assert view.shape == (8, block_size, head_size)
    assert view.strides_bytes == (page, data // block_size, data // block_size // head_size)
    assert plan.bytes_per_block == page
    comparison.compare(request)


def aligned_beside(full: dict[str, Any], **mla: Any) -> dict[str, Any]:
    return build.request(build.full(**full), build.mla(dtype="uint8", **mla))


def test_an_aligned_page_is_scaled_when_the_scaled_page_aligns_to_the_largest() -> None:
    """2 x 37,440 = 74,880 = 130 x 576, and 128 rows of 584 bytes are 74,752: aligned, exactly the largest page."""
    request = aligned_beside({"heads": 5, "size": 234}, size=584, block_size=64, page_alignment_bytes=576)
    got = kvpage.plan(request).layers["mla"]
    assert (got.decision, got.block_size, got.page_size_bytes, got.page_size_padded) == ("scale", 128, 74_880, None)
    assert got.real_page_size_bytes == 74_752
    comparison.compare(request)


def test_an_aligned_page_that_shrinks_when_scaled_is_padded_as_well() -> None:
    """Two pages of 1,728 bytes hold four rows of 584, which would align to 2,880: padded to 3,456."""
    request = aligned_beside(
        {"heads": 1, "size": 216, "block_size": 4}, size=584, block_size=2, page_alignment_bytes=576
    )
    got = kvpage.plan(request).layers["mla"]
    assert (got.decision, got.block_size, got.page_size_bytes, got.page_size_padded) == ("scale_pad", 4, 3456, 3456)
    comparison.compare(request)


def test_an_aligned_page_is_padded_to_a_multiple_of_its_alignment() -> None:
    """The largest page of 57,600 bytes is 100 x 576."""
    request = aligned_beside({"heads": 5, "size": 180}, size=584, block_size=64, page_alignment_bytes=576)
    got = kvpage.plan(request).layers["mla"]
    assert (got.decision, got.block_size, got.page_size_bytes) == ("pad", 64, 57_600)
    comparison.compare(request)


def test_an_aligned_page_is_not_padded_to_anything_else() -> None:
    """65,536 is not a multiple of 576, so the next page would break the alignment that was asked for."""
    request = aligned_beside({}, size=584, block_size=64, page_alignment_bytes=576)
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(request)
    assert caught.value.details["layer"] == "mla"
    assert caught.value.details["page_size_bytes"] == 37_440


# What vLLM 0.24.0 merges and should not: MLA layers that differ in rows, block size or dtype.
# first, second, bytes per block, page of each
UNLIKE_MLA: list[tuple[dict[str, Any], dict[str, Any], int, tuple[int, int]]] = [
    ({"size": 656, "dtype": "uint8"}, {"size": 132, "dtype": "uint8"}, 12_608, (10_496, 2112)),
    ({"size": 132, "dtype": "uint8"}, {"size": 656, "dtype": "uint8"}, 12_608, (2112, 10_496)),
    ({"size": 576}, {"size": 512}, 34_816, (18_432, 16_384)),
    ({"size": 576}, {"size": 576, "dtype": "float8_e4m3fn"}, 27_648, (18_432, 9216)),
    ({"size": 576}, {"size": 576, "dtype": "float16"}, 36_864, (18_432, 18_432)),
    ({"size": 576}, {"size": 576, "page_alignment_bytes": 4096}, 38_912, (18_432, 20_480)),
    ({"size": 576}, {"size": 576, "page_size_padded": 18_464}, 36_896, (18_432, 18_464)),
    # blocks of different size are never of one type: they are unified, and may then be equal and share a group
    ({"size": 576, "block_size": 32}, {"size": 576, "block_size": 64}, 2 * 73_728, (73_728, 73_728)),
    ({"size": 512, "block_size": 64}, {"size": 512, "block_size": 32}, 2 * 65_536, (65_536, 65_536)),
    ({"size": 576, "block_size": 32}, {"size": 512, "block_size": 64}, 65_536, (65_536, 65_536)),
]


@pytest.mark.parametrize(("first", "second", "per_block", "pages"), UNLIKE_MLA)
def test_unlike_mla_layers_are_not_merged(
    first: dict[str, Any], second: dict[str, Any], per_block: int, pages: tuple[int, int]
) -> None:
    request = build.request(build.mla("a", **first), build.mla("b", **second))
    plan = kvpage.plan(request)
    assert tuple(layer.page_size_bytes for layer in plan.layers.values()) == pages
    assert plan.bytes_per_block == per_block
    comparison.compare(request)


def test_rows_and_indexer_rows_are_one_group_without_padding() -> None:
    """DeepSeek-V3.2, fp8: 61 x (656 + 132) bytes a token, 64 tokens a block."""
    rows = build.mla("rows.{i}", size=656, dtype="uint8", block_size=64, count=61)
    indexer = build.mla("indexer.{i}", size=132, dtype="uint8", block_size=64, count=61)
    plan = kvpage.plan(build.request(rows, indexer, memory_bytes=42_949_672_960, max_model_len=16_384))
    assert len(plan.groups) == 1
    assert plan.bytes_per_block == 3_076_352 == 64 * 61 * (656 + 132)
    assert plan.num_blocks == 13_961
    assert plan.capacity.request_bytes == 787_546_112
    assert plan.capacity.max_concurrency == pytest.approx(54.535, abs=1e-3)
    assert plan.waste.padding_bytes == 0
