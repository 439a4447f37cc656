"""Padding that the request asks for: `page_size_padded` of a layer, alone and together with unification."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported, SpecInvalid
from planner import build, comparison

INT8 = {"dtype": "int8", "kv_quant": "int8_per_token_head", "backend": "triton_attn"}
KV_FIRST = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}

# layer, real page in bytes, paddings that are fine, paddings that are not
LAYERS: dict[str, tuple[dict[str, Any], int, list[int], list[int]]] = {
    "full bf16": (build.full(), 65_536, [65_536, 65_538, 66_048, 98_304, 131_072], [1, 65_534, 65_535, 65_537]),
    "full f32": (build.full(dtype="float32"), 131_072, [131_072, 131_076, 200_000], [131_068, 131_073, 131_074]),
    "full fp8": (build.full(dtype="float8_e4m3fn"), 32_768, [32_769, 32_771], [32_767]),
    "K and V of two widths": (build.full(size=192, head_size_v=128), 81_920, [98_304], [81_918, 81_921]),
    "sliding": (build.sliding(), 65_536, [65_536, 98_304], [65_535, 98_303]),
    "chunked": (build.chunked(), 65_536, [65_536, 98_304], [65_535, 98_303]),
    "int8 rows with scales": (build.full(size=256, **INT8), 66_560, [66_560, 66_561, 69_632], [65_536, 66_559]),
    "MLA": (build.mla(), 18_432, [18_432, 18_434, 20_480], [18_430, 18_431, 18_433]),
    "MLA bytes": (build.mla(size=656, dtype="uint8"), 10_496, [10_496, 10_497], [10_495]),
    "aligned MLA": (build.mla(page_alignment_bytes=4096), 18_432, [20_480, 24_576], [18_432, 20_482, 16_384]),
    "state": (build.state("s", [[4], [4]], ["bfloat16", "float32"]), 24, [24, 28, 1024], [20, 23, 25, 26]),
    "state of bytes": (build.state("s", [[7]], ["int8"]), 7, [7, 8, 11], [6]),
}
FINE = [(key, padded) for key, (_, _, fine, _) in LAYERS.items() for padded in fine]
WRONG = [(key, padded) for key, (_, _, _, wrong) in LAYERS.items() for padded in wrong]


@pytest.mark.parametrize(("key", "padded"), FINE)
def test_a_padded_page_is_the_stride_from_block_to_block(key: str, padded: int) -> None:
    layer, real = LAYERS[key][:2]
    request = build.request(layer | {"page_size_padded": padded}, num_blocks=7, max_model_len=16)
    plan = kvpage.plan(request)
    (got,) = plan.layers.values()
    assert (got.real_page_size_bytes, got.page_size_bytes, got.page_size_padded) == (real, padded, padded)
    assert {view.strides_bytes[0] for view in got.tensors} == {padded}
    assert plan.bytes_per_block == padded
    assert plan.buffer_size_bytes == 7 * padded
    assert plan.capacity.request_bytes == padded * sum(plan.capacity.blocks_per_request or ())
    comparison.compare(request)


@pytest.mark.parametrize(("key", "padded"), WRONG)
def test_a_padded_page_must_hold_the_data_and_keep_strides_whole(key: str, padded: int) -> None:
    other = build.full("other")
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(other, LAYERS[key][0] | {"page_size_padded": padded}))
    assert type(caught.value) is SpecInvalid
    assert caught.value.errors[0].pointer.startswith("/layers/1")


# padded page of a layer of 24,576 real bytes, page of the largest layer, what becomes of the first
UNIFIED: list[tuple[int, int, str, int, int]] = [
    # padded, largest, decision, block size, real bytes of the new block
    (24_576, 65_536, "pad", 16, 24_576),
    (32_768, 65_536, "scale_pad", 32, 49_152),
    (65_536, 65_536, "keep", 16, 24_576),
    (32_768, 98_304, "scale_pad", 48, 73_728),
    (49_152, 98_304, "scale_pad", 32, 49_152),
    (24_576, 98_304, "scale", 64, 98_304),
    (65_536, 131_072, "scale_pad", 32, 49_152),
    (32_768, 131_072, "scale_pad", 64, 98_304),
    (26_624, 65_536, "pad", 16, 24_576),
    (40_960, 65_536, "pad", 16, 24_576),
    (64_000, 65_536, "pad", 16, 24_576),
    (24_578, 65_536, "pad", 16, 24_576),
]


@pytest.mark.parametrize("kind", [build.full, build.sliding, build.chunked])
@pytest.mark.parametrize(("padded", "largest", "decision", "block_size", "real"), UNIFIED)
def test_a_padded_page_is_unified_as_a_page_of_that_size(
    kind: Any, padded: int, largest: int, decision: str, block_size: int, real: int
) -> None:
    large = build.state("large", [[largest]], ["int8"])
    request = build.request(kind("layer", size=48, page_size_padded=padded), large)
    got = kvpage.plan(request).layers["layer"]
    assert (got.decision, got.block_size, got.page_size_bytes) == (decision, block_size, largest)
    assert got.real_page_size_bytes == real
    assert got.page_size_padded == (None if decision == "scale" else largest)
    comparison.compare(request)


@pytest.mark.parametrize(("padded", "largest"), [(32_768, 65_536), (32_768, 98_304), (65_536, 131_072)])
def test_a_backend_that_cannot_be_padded_keeps_the_padding_it_was_given(padded: int, largest: int) -> None:
    """Scaling needs nothing of the backend; the block axis is outermost, so the padding asked for can be shown."""
    layer = build.full("layer", size=48, page_size_padded=padded, backend=build.dense(build.ROW_SHAPE))
    request = build.request(layer, build.state("large", [[largest]], ["int8"]))
    assert kvpage.plan(request).layers["layer"].decision == "scale_pad"
    comparison.compare(request)


@pytest.mark.parametrize("padded", [24_576, 26_624, 40_960])
def test_a_padded_page_that_does_not_divide_needs_a_backend_that_reads_strides(padded: int) -> None:
    layer = build.full("layer", size=48, page_size_padded=padded, backend=build.dense(build.ROW_SHAPE))
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(build.request(layer, build.state("large", [[65_536]], ["int8"])))
    assert caught.value.details["page_size_bytes"] == padded


@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_a_layout_with_k_before_the_blocks_is_never_padded(num_blocks: int) -> None:
    """vLLM 0.24.0 lets it through when there are two blocks, because it looks for the extent, not for the axis."""
    layer = build.full(backend=KV_FIRST)
    dense = build.request(layer | {"page_size_padded": 65_536}, num_blocks=num_blocks, max_model_len=16)
    assert kvpage.plan(dense).layers["full"].tensors[0].shape == (2, num_blocks, 16, 8, 128)
    padded = build.request(layer | {"page_size_padded": 98_304}, num_blocks=num_blocks, max_model_len=16)
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(padded)


def test_padding_to_an_odd_page_is_refused_for_wider_items() -> None:
    """The largest page is 65,537 bytes; a bf16 layer cannot step by it, a layer of bytes can."""
    odd = build.state("odd", [[65_537]], ["int8"])
    with pytest.raises(CannotUnify):
        kvpage.plan(build.request(odd, build.full("words")))
    plan = kvpage.plan(build.request(odd, build.full("bytes", dtype="int8")))
    assert plan.layers["bytes"].tensors[0].strides_bytes[0] == 65_537


def test_padding_differs_so_specs_differ() -> None:
    """Full attention layers merge only when they agree in padding: here they are one type, with a buffer each."""
    request = build.request(build.full("a"), build.full("b", page_size_padded=98_304), build.full("c"))
    plan = kvpage.plan(request)
    assert [group.page_size_bytes for group in plan.groups] == [65_536 + 98_304 + 65_536]
    comparison.compare(request)
