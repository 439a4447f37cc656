"""Named layouts over [layers, blocks, heads, tokens, content], and one buffer over all layers by a layered order."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported
from planner import build, comparison, layouts, oracle, view_oracle
from planner.named_tables import SECOND_LAYER, SIZES

Json = dict[str, Any]
Sizes = tuple[int, int, int, int, int, int, str]


def alike(name: str, size: Sizes, **more: Any) -> Json:
    layers, blocks, heads, tokens, k, v, dtype = size
    layer = build.full("layer.{i}", heads=heads, size=k, head_size_v=v, dtype=dtype, block_size=tokens, backend=name)
    return build.request(layer | {"count": layers}, num_blocks=blocks, max_model_len=1, **more)


CASES = [
    (name, size, offset, strides)
    for name, rows in SECOND_LAYER.items()
    for size, (offset, strides) in zip(SIZES, rows, strict=True)
]


@pytest.mark.parametrize(("name", "size", "offset", "strides"), CASES)
def test_the_second_of_equal_layers(name: str, size: Sizes, offset: int, strides: tuple[int, ...]) -> None:
    request = alike(name, size)
    plan = kvpage.plan(request)
    _, blocks, heads, tokens, k, v, _ = size
    (view,) = plan.layers["layer.1"].tensors
    assert view.shape == (blocks, heads, tokens, k + v)
    assert view.offset_bytes == offset
    assert view.strides_bytes == strides
    assert plan.layers["layer.1"].decision == "keep"
    assert plan.buffer_size_bytes == plan.bytes_per_block * blocks
    comparison.compare(request)


@pytest.mark.parametrize("name", layouts.NAMED)
@pytest.mark.parametrize("size", SIZES[:2] + SIZES[4:8])
def test_all_layers_together_are_one_dense_tensor(name: str, size: Sizes) -> None:
    """Count up through the five axes in the order of the name: each layer's view holds its own numbers, in order."""
    plan = kvpage.plan(alike(name, size))
    layers, blocks, heads, tokens, k, v, dtype = size
    extents = dict(zip("LBHNC", (layers, blocks, heads, tokens, k + v), strict=True))
    item = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[dtype]
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]
    everything = torch.arange(prod(extents.values()), dtype=torch.int64).to(words)
    by_name = everything.view([extents[axis] for axis in name]).permute([name.index(axis) for axis in "LBHNC"])
    for place in range(layers):
        (view,) = plan.layers[f"layer.{place}"].tensors
        steps = [stride // item for stride in view.strides_bytes]
        mine = torch.as_strided(everything, view.shape, steps, view.offset_bytes // item)
        assert torch.equal(mine, by_name[place])


@pytest.mark.parametrize("name", layouts.NAMED)
def test_every_byte_of_a_block_has_one_owner(name: str) -> None:
    request = alike(name, (3, 4, 2, 3, 2, 1, "bfloat16"))
    plan = kvpage.plan(request)
    axes = comparison.block_axes(request)
    owned = np.zeros(plan.buffer_size_bytes, dtype=int)
    for layer in plan.layers.values():
        table = view_oracle.blocks_by_byte(layer.tensors[0], axes[layer.name], 4, plan.buffer_size_bytes)
        owned += table != view_oracle.NOBODY
    assert (owned == 1).all()
    assert view_oracle.faults(plan, axes) == set()


# --- unequal layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC"])
def test_pages_of_one_type_lie_side_by_side(name: str) -> None:
    """65,536 and 40,960 bytes: blocks of 106,496, nothing padded."""
    layers = [build.full("a", backend=name), build.full("b", size=80, backend=name)]
    request = build.request(*layers, num_blocks=7, max_model_len=1)
    plan = kvpage.plan(request)
    assert [plan.layers[n].tensors[0].offset_bytes for n in "ab"] == [0, 65_536]
    assert {plan.layers[n].tensors[0].strides_bytes[0] for n in "ab"} == {106_496}
    assert (plan.bytes_per_block, plan.groups[0].block_stride_bytes) == (106_496, 106_496)
    comparison.compare(request)


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC", "LBHNC", "LBNHC"])
def test_pages_3_to_2_are_padded(name: str) -> None:
    layers = [build.full("a.{i}", count=4, size=192, backend=name), build.sliding("b.{i}", count=2, backend=name)]
    request = build.request(*layers, num_blocks=9, max_model_len=1)
    plan = kvpage.plan(request)
    assert (plan.layers["b.0"].decision, plan.layers["b.0"].page_size_padded) == ("pad", 98_304)
    assert [group.layers for group in plan.groups] == [("a.0", "a.2"), ("a.1", "a.3"), ("b.0", "b.1")]
    packed = name.startswith("B")
    assert plan.layers["b.1"].tensors[0].strides_bytes[0] == (2 * 98_304 if packed else 98_304)
    assert plan.layers["b.1"].tensors[0].offset_bytes == (98_304 if packed else 9 * 98_304)
    comparison.compare(request)


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC"])
def test_pages_in_pieces_are_never_padded(name: str) -> None:
    layers = [build.full("a", size=192, backend=name), build.sliding("b", backend=name)]
    with pytest.raises(CannotUnify if name == "LHBNC" else LayoutUnsupported):
        kvpage.plan(build.request(*layers))
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(build.full(backend=name, page_size_padded=98_304)))


def test_one_head_makes_a_page_one_piece_whatever_the_order() -> None:
    request = build.request(build.full(heads=1, backend="LHBNC", page_size_padded=12_288), num_blocks=5)
    request |= {"max_model_len": 1}
    plan = kvpage.plan(request)
    assert plan.layers["full"].tensors[0].strides_bytes[0] == 12_288
    comparison.compare(request)


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ("LBHNC", "LBNHC", True),
        ("LBNHC", "flash_attn", True),
        ("LHBNC", "LHBNC", True),
        ("LHBNC", "LBHNC", False),
        ("LHBNC", "flash_attn", False),
        ("BLHNC", "BLNHC", True),
        ("BLHNC", "LBHNC", False),
        ("BLNHC", "flash_attn", False),
        ("BHLNC", "BHLNC", False),
        ("BHLNC", "BLHNC", False),
        ("BHLNC", "flash_attn", False),
    ],
)
def test_which_layouts_live_together(first: str, second: str, fits: bool) -> None:
    """A full and a windowed layer of equal pages; BHLNC cannot even hold two kinds, however alike their pages."""
    request = build.request(build.full(backend=first), build.sliding(backend=second), num_blocks=9, max_model_len=1)
    comparison.compare(request)
    if fits:
        assert view_oracle.faults(kvpage.plan(request), comparison.block_axes(request)) == set()
        return
    with pytest.raises(LayoutUnsupported) as caught:
        kvpage.plan(request)
    assert caught.value.errors[0].pointer.startswith("/layers/")


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC"])
def test_packed_blocks_are_not_split_for_kernels(name: str) -> None:
    layer = build.full(block_size=32, backend=name, kernel_block_sizes=[16])
    with pytest.raises(LayoutUnsupported) as caught:
        kvpage.plan(build.request(layer))
    assert "read a block as one" in caught.value.message


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC"])
def test_states_lie_in_packed_blocks_too(name: str) -> None:
    """A state of 1,024 bytes, attention scaled to it; two of each make blocks of 2,048."""
    attention = build.full("a.{i}", count=2, heads=1, size=8, backend=name)
    layers = [attention, build.state("s.{i}", [[64], [192]], ["float32", "float32"], count=2)]
    request = build.request(*layers, num_blocks=9, max_model_len=1)
    plan = kvpage.plan(request)
    assert plan.bytes_per_block == 2048
    assert [view.offset_bytes for view in plan.layers["s.1"].tensors] == [1024, 1024 + 256]
    assert {view.strides_bytes[0] for view in plan.layers["s.1"].tensors} == {2048}
    comparison.compare(request)


def test_a_block_is_rounded_up_to_what_its_items_step_by() -> None:
    """5 bytes and 8 bytes: the second begins at 8, and the next block at 16, so that float32 stays aligned."""
    one = build.full("one", heads=1, size=3, head_size_v=2, dtype="int8", block_size=1, backend="BLNHC")
    two = build.full("two", heads=1, size=1, dtype="float32", block_size=1, backend="BLNHC")
    request = build.request(one, two, num_blocks=9, max_model_len=1)
    plan = kvpage.plan(request)
    assert [plan.layers[name].tensors[0].offset_bytes for name in ("one", "two")] == [0, 8]
    assert plan.bytes_per_block == 16
    comparison.compare(request)


# --- latent rows in named layouts -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize(
    ("page", "decision"), [(36_864, "scale"), (18_432 + 1152, "pad"), (18_432 + 8 * 1152, "pad"), (19_432, None)]
)
def test_latent_pages_are_padded_by_whole_rows_only(name: str, page: int, decision: str | None) -> None:
    """16 rows of 1,152 bytes: a row more is padding that a kernel can count, 1,000 bytes are not."""
    chunked = build.chunked(heads=1, size=page // 4, block_size=1, backend=name)
    request = build.request(chunked, build.mla(backend=name), memory_bytes=1 << 32)
    comparison.compare(request)
    if decision is None:
        with pytest.raises(CannotUnify):
            kvpage.plan(request)
    else:
        assert kvpage.plan(request).layers["mla"].decision == decision


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("more", [{"page_size_padded": 19_432}, {"page_alignment_bytes": 1000}])
def test_latent_pages_asked_for_have_whole_rows_too(name: str, more: Json) -> None:
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(build.mla(backend=name, **more)))
    whole = build.mla(backend=name, page_size_padded=18_432 + 1152)
    assert kvpage.plan(build.request(whole)).layers["mla"].page_size_bytes == 19_584


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC"])
def test_latent_rows_of_a_packed_block_step_by_whole_rows(name: str) -> None:
    """64 rows of 656 and of 132 bytes: 50,432 is no multiple of either, so no row number reaches the next block."""
    layers = [build.mla(f"m{row}", size=row, dtype="uint8", block_size=64, backend=name) for row in (656, 132)]
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(*layers))


@pytest.mark.parametrize("name", layouts.NAMED)
def test_a_latent_row_is_all_the_content_there_is(name: str) -> None:
    request = build.request(build.mla("m.{i}", count=2, size=576, backend=name), num_blocks=9, max_model_len=1)
    (view,) = kvpage.plan(request).layers["m.1"].tensors
    assert view.shape == (9, 1, 16, 576)
    comparison.compare(request)


# --- one cross-layer buffer -----------------------------------------------------------------------

# backend, kv_cache_layout, heads, size -> offset of the second of three layers, block stride; 5 blocks of 16 tokens
LAYERED = [
    ("flash_attn", "NHD", 8, 64, 32_768, 98_304),
    ("flash_attn", "HND", 8, 64, 4096, 98_304),
    ("triton_attn", "NHD", 8, 64, 32_768, 98_304),
    ("triton_attn", "HND", 8, 64, 4096, 98_304),
    ("flex_attention", "NHD", 8, 64, 32_768, 98_304),
    ("flex_attention", "HND", 8, 64, 32_768, 98_304),
    ("flashinfer", "NHD", 8, 64, 32_768, 98_304),
    ("flashinfer", "HND", 8, 64, 2048, 98_304),
    ("flash_attn", "NHD", 1, 128, 8192, 24_576),
    ("flash_attn", "HND", 1, 128, 8192, 24_576),
    ("flashinfer", "HND", 2, 256, 8192, 98_304),
    ("flash_attn_diffkv", "NHD", 8, 64, 32_768, 98_304),
    ("flash_attn_diffkv", "HND", 8, 64, 4096, 98_304),
    ("triton_attn_diffkv", "NHD", 4, 128, 32_768, 98_304),
    ("LBHNC", "NHD", 8, 64, 163_840, 32_768),
    ("LBNHC", "NHD", 8, 64, 163_840, 32_768),
    ("LHBNC", "NHD", 8, 64, 163_840, 4096),
    ("BLHNC", "NHD", 8, 64, 32_768, 98_304),
    ("BLNHC", "NHD", 8, 64, 32_768, 98_304),
    ("BHLNC", "NHD", 8, 64, 4096, 98_304),
]


@pytest.mark.parametrize(("backend", "order", "heads", "size", "offset", "stride"), LAYERED)
def test_one_buffer_by_the_layered_order(
    backend: str, order: str, heads: int, size: int, offset: int, stride: int
) -> None:
    layer = build.full("layer.{i}", count=3, heads=heads, size=size, backend=backend)
    request = build.request(layer, num_blocks=5, max_model_len=1, layered=True, kv_cache_layout=order)
    plan = kvpage.plan(request)
    (view,) = plan.layers["layer.1"].tensors
    assert (view.offset_bytes, view.strides_bytes[view.block_axis]) == (offset, stride)
    assert view_oracle.faults(plan, comparison.block_axes(request)) == set()
    comparison.compare(request)


REFUSED: list[tuple[str, list[Json]]] = [
    ("no layered order", [build.full("a.{i}", count=2, backend="rocm_attn")]),
    ("no order at all", [build.full("a.{i}", count=2, backend=build.dense(build.ROW_SHAPE))]),
    ("two kinds", [build.full(backend="flash_attn"), build.sliding(backend="flash_attn")]),
    ("two sizes", [build.full("a", backend="flash_attn"), build.full("b", size=64, backend="flash_attn")]),
    ("two backends", [build.full("a", backend="flash_attn"), build.full("b", backend="triton_attn")]),
    ("padding", [build.full("a.{i}", count=2, backend="flash_attn", page_size_padded=98_304)]),
    ("alignment", [build.mla("m", backend="triton_mla", page_alignment_bytes=4096)]),
    ("a state", [build.full("a", backend="flash_attn"), build.state("s", [[32_768]], ["bfloat16"])]),
]


@pytest.mark.parametrize(("why", "layers"), REFUSED, ids=[case[0] for case in REFUSED])
def test_one_buffer_needs_layers_that_are_alike(why: str, layers: list[Json]) -> None:
    request = build.request(*layers, layered=True)
    with pytest.raises(LayoutUnsupported) as caught:
        kvpage.plan(request)
    assert caught.value.errors[0].pointer.startswith("/layers/")
    comparison.compare(request)


@pytest.mark.parametrize("more", [{"layered": True}, {}])
def test_layers_without_a_cache_do_not_count_as_unlike(more: Json) -> None:
    backend = "flash_attn" if more else "BHLNC"
    layers = [build.encoder(), build.full("a.{i}", count=2, backend=backend)]
    request = build.request(*layers, num_blocks=512, **more)
    assert kvpage.plan(request).layers["a.1"].tensors[0].strides_bytes[0] == 131_072
    comparison.compare(request)


def test_states_alone_and_nothing_at_all_may_be_layered() -> None:
    for layers in ([build.state("s.{i}", [[4]], ["float32"], count=2)], [build.encoder()]):
        comparison.compare(build.request(*layers, layered=True))


@pytest.mark.parametrize("name", ["BLHNC", "LBNHC"])
def test_rows_may_be_quantised(name: str) -> None:
    for quant, dtype, row in (("int8_per_token_head", "int8", 132), ("int4", "uint8", 64), ("mxfp4", "uint8", 68)):
        layer = build.full("a.{i}", count=2, dtype=dtype, kv_quant=quant, backend=name)
        request = build.request(layer, num_blocks=9, max_model_len=1)
        (view,) = kvpage.plan(request).layers["a.1"].tensors
        assert view.shape == (9, 8, 16, 2 * row)
        comparison.compare(request)


def test_every_pair_of_named_layouts() -> None:
    """For K and V beside latent rows: what is planned is what the oracle says, and so is what is refused."""
    planned = 0
    for first in layouts.NAMED:
        for second in layouts.NAMED:
            request = build.request(build.full(backend=first), build.mla(backend=second), num_blocks=600)
            planned += "refused" not in oracle.answer(request)
            comparison.compare(request)
    assert planned == 3 * 3  # regions with regions; packed blocks are no whole number of rows
