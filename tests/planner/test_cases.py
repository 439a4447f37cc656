"""Public reports of faults in planning KV caches, each as the plan it should have been.

Numbers are from the reports or from arithmetic; P and a number labels a report.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported, NotEnoughMemory, SpecInvalid
from planner import build, view_oracle

Json = dict[str, Any]


# --- P01: inline scales break the ratio of two ----------------------------------------------------


def gemma(scaled: bool, **more: Any) -> list[Json]:
    kind = {"dtype": "float8_e4m3fn", "backend": "triton_attn"} | ({"kv_quant": "fp8_per_token_head"} if scaled else {})
    windows = build.sliding("window.{i}", count=25, heads=8, size=256, window=1024, **(kind | more))
    return [windows, build.full("full.{i}", count=5, heads=2, size=512, **(kind | more))]


LONG: Json = {"max_model_len": 32_768, "max_num_batched_tokens": 8192}


def test_p01_pages_without_scales_divide() -> None:
    plan = kvpage.plan(build.request(*gemma(scaled=False), num_blocks=49_748, **LONG))
    assert (plan.layers["full.0"].block_size, plan.layers["full.0"].page_size_bytes) == (32, 65_536)
    assert [len(group.layers) for group in plan.groups] == [5] * 6
    assert plan.capacity.blocks_per_request == (577,) * 5 + (1024,)
    assert plan.capacity.max_concurrency == pytest.approx(12.73, abs=0.005)
    assert int((plan.capacity.max_concurrency or 0) * 32_768) == 417_022


def test_p01_pages_with_scales_are_padded_by_this_rule() -> None:
    """What the rule gives, and says: 22 % fewer tokens. A later strategy scales first and then pads."""
    plan = kvpage.plan(build.request(*gemma(scaled=True), num_blocks=48_977, **LONG))
    full = plan.layers["full.0"]
    assert (full.decision, full.block_size, full.real_page_size_bytes, full.page_size_bytes) == (
        "pad",
        16,
        33_024,
        66_560,
    )
    assert sum(plan.capacity.blocks_per_request or ()) == 4933
    assert plan.capacity.max_concurrency == pytest.approx(9.93, abs=0.005)
    assert int((plan.capacity.max_concurrency or 0) * 32_768) == 325_335
    assert plan.waste.padding_bytes > 0


def test_p01_a_backend_that_cannot_skip_padding_is_refused_with_both_pages() -> None:
    shape = ["num_blocks", "block_size", "num_kv_heads", "row_size + row_size_v"]
    with pytest.raises(CannotUnify) as caught:
        kvpage.plan(build.request(*gemma(scaled=True, backend=build.dense(shape)), **LONG))
    assert "66560" in caught.value.message
    assert "33024" in caught.value.message


# --- P04, P12, P20: states and attention ----------------------------------------------------------

# tensor parallel, bytes of a state's item, speculative tokens, bytes of a token -> state, block, page
BOOTS = [
    (1, 2, 15, 4096, 1_941_504, 480, 1_966_080),
    (1, 2, 7, 2080, 1_777_664, 864, 1_797_120),
    (1, 2, 7, 4096, 1_777_664, 448, 1_835_008),
    (1, 2, 3, 2048, 1_695_744, 832, 1_703_936),
    (1, 2, 7, 1152, 1_777_664, 1552, 1_787_904),
    (2, 4, 0, 1024, 1_603_584, 1568, 1_605_632),
    (2, 4, 8, 1024, 1_685_504, 1648, 1_687_552),
    (4, 4, 3, 512, 817_152, 1600, 819_200),
    (1, 4, 0, 4096, 3_207_168, 784, 3_211_264),
]


@pytest.mark.parametrize(("tp", "item", "spec", "token", "state", "block", "page"), BOOTS)
def test_p04_nine_starts_of_one_family(
    tp: int, item: int, spec: int, token: int, state: int, block: int, page: int
) -> None:
    """48 / tp heads of 128 x 128, and (2 x 16 x 128 + 48 x 128) / tp channels of 3 + spec values of 2 bytes."""
    shapes = [[3 + spec, 10_240 // tp], [48 // tp, 128, 128]]
    states = build.state("state.{i}", shapes, ["bfloat16", {2: "bfloat16", 4: "float32"}[item]], count=48)
    attention = build.full(
        "full.{i}", count=16, heads=1, size=token // 2, dtype="uint8", kernel_block_sizes=[{"multiple_of": 16}]
    )
    plan = kvpage.plan(build.request(states, attention, align_hybrid=True, memory_bytes=1 << 36))
    got = plan.layers["state.0"]
    assert (got.real_page_size_bytes, got.page_size_bytes) == (state, page)
    assert (plan.layers["full.0"].block_size, plan.layers["full.0"].page_size_bytes) == (block, page)


def test_p12_a_state_is_padded_and_never_scaled() -> None:
    state = build.state("state", [[548_864]], ["bfloat16"], block_size=1072)
    main = build.full("main", heads=1, size=256, block_size=1072)
    draft = build.full("draft", heads=2, size=256, block_size=1072, draft=True)
    plan = kvpage.plan(build.request(state, main, draft))
    assert {layer.page_size_bytes for layer in plan.layers.values()} == {2_195_456}
    blocks = {name: layer.block_size for name, layer in plan.layers.items()}
    assert blocks == {"state": 1072, "main": 2144, "draft": 1072}
    assert plan.layers["state"].page_size_padded == 2_195_456


@pytest.mark.parametrize(("kernel", "block", "page"), [(16, 1056, 540_672), (64, 1088, 557_056)])
def test_p20_alignment_knows_the_kernels(kernel: int, block: int, page: int) -> None:
    state = build.state("state", [[533_504]], ["int8"])
    attention = build.full("full", heads=1, size=128, kernel_block_sizes=[{"multiple_of": kernel}])
    plan = kvpage.plan(build.request(state, attention, align_hybrid=True))
    assert (plan.layers["full"].block_size, plan.layers["state"].page_size_bytes) == (block, page)


def test_p20_a_stale_block_is_refused() -> None:
    """1,056 tokens are 16.5 kernel blocks of 64."""
    layer = build.full("full", heads=1, size=128, block_size=1056, kernel_block_sizes=[{"multiple_of": 64}])
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(layer))


# --- P13, P18, P24, P45, P55: groups --------------------------------------------------------------


def buckets(*sizes: int) -> list[Json]:
    return [build.sliding(f"w{i}.{{i}}", window=2 ** (i + 4), count=size) for i, size in enumerate(sizes)]


def test_p13_one_odd_layer_makes_46_groups_by_this_rule() -> None:
    """The rule takes the smallest bucket for the width. 10 groups of 5 are what a search over widths should find."""
    plan = kvpage.plan(build.request(*buckets(30, 10, 5, 1), memory_bytes=1 << 34))
    assert len(plan.groups) == 46
    assert len(kvpage.plan(build.request(*buckets(30, 10, 5), memory_bytes=1 << 34)).groups) == 9


def test_p18_layers_are_dealt_to_pipeline_stages() -> None:
    names = ["full0", "sw0", "sw1", "full1", "sw2", "sw3"]
    layers = [build.full(name) if name[0] == "f" else build.sliding(name) for name in names]
    plan = kvpage.plan(build.request(*layers))
    assert [group.layers for group in plan.groups] == [("full0", "full1"), ("sw0", "sw2"), ("sw1", "sw3")]


def test_p24_one_type_of_unequal_pages_is_one_group() -> None:
    plan = kvpage.plan(build.request(build.full("t.{i}", count=64), build.full("draft", size=80)))
    assert (len(plan.groups), plan.bytes_per_block, plan.waste.padding_bytes) == (1, 4_235_264, 0)


def test_p45_a_window_exists_if_a_layer_has_it() -> None:
    """A pattern of windows (128, 32,768) over one layer: only the first is ever used."""
    plan = kvpage.plan(build.request(build.sliding(window=128)))
    assert [group.sliding_window for group in plan.groups] == [128]


def test_p55_llama_4() -> None:
    plan = kvpage.plan(build.request(build.full("f.{i}", count=12), build.chunked("c.{i}", count=36)))
    assert [(group.kind, len(group.layers)) for group in plan.groups] == [
        ("full_attention", 12),
        *[("chunked_local_attention", 12)] * 3,
    ]


# --- P07, P08, P29, P30, P32, P33: views ----------------------------------------------------------


def test_p07_kernel_blocks_of_compressed_rows_are_stored_rows() -> None:
    layer = build.mla("m", size=512, block_size=256, dtype="uint8", kv_quant="fp8_ds_mla", compress_ratio=128)
    layer |= {"page_alignment_bytes": 576, "backend": build.pads(["num_blocks", "block_size", "row_size"])}
    plan = kvpage.plan(build.request(layer, memory_bytes=53_255_232))
    (view,) = plan.layers["m"].tensors
    assert (view.shape, view.strides_bytes) == ((30_819, 2, 584), (1728, 584, 1))


@pytest.mark.parametrize("backend", [build.pads(build.KV_SHAPE), "flash_attn", "BLNHC"])
def test_p08_a_padded_page_is_not_split_for_kernels(backend: str | Json) -> None:
    layer = build.full("full", heads=1, size=64, block_size=32, backend=backend, kernel_block_sizes=[16])
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(layer | {"page_size_padded": 12_288}, num_blocks=4, max_model_len=1))


def test_p29_nvfp4_is_laid_out_by_heads() -> None:
    """4 heads of 256 values: rows of 144 bytes. In this order (b, kv, h) is one axis after the other, by tokens not."""
    layer = build.full("full", heads=4, size=256, dtype="uint8", kv_quant="nvfp4", backend="flashinfer")
    for order in ({}, {"kv_cache_layout": "HND"}):
        plan = kvpage.plan(build.request(layer, num_blocks=3, max_model_len=1, **order))
        (view,) = plan.layers["full"].tensors
        assert view.strides_bytes == (18_432, 9216, 144, 2304, 1)
        raw = np.arange(plan.buffer_size_bytes) % 251
        joined = raw.reshape(3, 8, 16, 144)  # blocks, K heads and V heads, tokens, row
        mine = view_oracle.as_array(view, raw.astype(np.uint8))
        assert (mine == joined.reshape(3, 2, 4, 16, 144).transpose(0, 1, 3, 2, 4)).all()
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(layer, kv_cache_layout="NHD"))


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_p30_the_block_axis_is_found_by_name(num_blocks: int) -> None:
    """K and V first in the shape: refused with padding, unless memory is in the order of blocks."""
    shape = [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]
    layer = build.full("full", heads=2, size=8, page_size_padded=1536, backend={"shape": shape})
    request = build.request(layer, num_blocks=num_blocks, max_model_len=1)
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(request)
    layer["backend"] = {"shape": shape, "stride_order": [1, 0, 2, 3, 4], "layered_stride_order": [2, 0, 1, 3, 4, 5]}
    (view,) = kvpage.plan(request).layers["full"].tensors
    assert [stride // 2 for stride in view.strides_bytes] == [256, 768, 16, 8, 1]


def test_p32_two_states_in_one_page() -> None:
    state = build.state("state", [[4096], [8, 128, 128]], ["bfloat16", "bfloat16"])
    _, recurrent = kvpage.plan(build.request(state, num_blocks=9720)).layers["state"].tensors
    assert recurrent.shape == (9720, 8, 128, 128)
    assert [stride // 2 for stride in recurrent.strides_bytes] == [135_168, 16_384, 128, 1]
    assert recurrent.offset_bytes == 4096 * 2


def test_p33_planes_of_unequal_blocks_do_not_share_memory() -> None:
    """Rows of 512 elements, blocks of 1,536 and 128 tokens, K and V of all blocks apart: scaled to one block, or no."""
    planes = {"shape": [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]}
    full = build.full("full", heads=1, size=512, block_size=1536, backend=planes)
    window = build.sliding("window", heads=1, size=512, block_size=128, backend=planes)
    plan = kvpage.plan(build.request(full, window, num_blocks=100))
    assert plan.layers["window"].block_size == 1536
    assert plan.layers["window"].tensors == plan.layers["full"].tensors
    other = window | {"num_kv_heads": 2, "head_size": 256}
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(full, other, num_blocks=100))


# --- P10, P26, P47: packing -----------------------------------------------------------------------


def test_p10_a_kernel_that_counts_rows_gets_no_foreign_pages_in_between() -> None:
    latent = {"size": 512, "dtype": "uint8", "kv_quant": "fp8_ds_mla"}
    window: Json = {"kind": "sliding_window_mla", "sliding_window": 128, "block_size": 64}
    shape = ["num_blocks", "block_size", "row_size"]
    for backend, packed in ((build.pads(shape), True), (build.dense(shape), False)):
        layers = [build.mla("c.{i}", block_size=256, compress_ratio=4, count=2, backend=backend, **latent)]
        layers.append(build.mla("w.{i}", count=2, backend=backend, **latent) | window)
        plan = kvpage.plan(build.request(*layers, num_blocks=200))
        strides = {layer.tensors[0].strides_bytes[0] for layer in plan.layers.values()}
        assert strides == ({2 * 64 * 584} if packed else {64 * 584})


def test_p26_a_row_of_the_indexer_is_as_long_as_its_format() -> None:
    fp8 = build.mla("fp8", size=132, block_size=64, dtype="uint8")
    mxfp4 = build.mla("mxfp4", size=128, block_size=64, dtype="uint8", kv_quant="mxfp4")
    mxfp4["backend"] = build.pads(["num_blocks", "block_size", "row_size"])
    plan = kvpage.plan(build.request(fp8, mxfp4))
    assert [layer.real_page_size_bytes // 64 for layer in plan.layers.values()] == [132, 68]


@pytest.mark.parametrize(
    ("gib", "stride", "blocks"),
    [(26.46, 1_308_672, 21_709), (26.46, 1_228_800, 23_120), (26.09, 1_473_408, 19_015), (26.09, 1_315_008, 21_306)],
)
def test_p26_blocks_are_memory_over_the_block_stride(gib: float, stride: int, blocks: int) -> None:
    """The four published counts, of memory printed to 0.01 GiB."""
    layer = build.state("s", [[stride]], ["int8"])
    plan = kvpage.plan(build.request(layer, memory_bytes=int(gib * 2**30)))
    assert abs(plan.num_blocks - blocks) <= 5


@pytest.mark.parametrize(("stride", "first"), [(276_480, 7768), (1_039_680, 2066)])
def test_p47_offsets_are_exact_where_32_bits_would_wrap(stride: int, first: int) -> None:
    """Offsets are Python integers, of any length. A limit for kernels with 32 bits is not part of a request yet."""
    assert (first - 1) * stride < 2**31 <= first * stride
    layers = [build.state(f"s.{i}", [[stride]], ["int8"]) for i in range(2)]
    plan = kvpage.plan(build.request(*layers, num_blocks=first + 1))
    assert plan.layers["s.1"].tensors[0].offset_bytes == (first + 1) * stride > 2**31
    assert plan.buffer_size_bytes == 2 * (first + 1) * stride


# --- P23, P27, P36, P40: capacity -----------------------------------------------------------------


def test_p23_the_indexer_counts() -> None:
    rows = build.mla("mla.{i}", count=61, size=656, block_size=64, dtype="uint8")
    indexer = build.mla("index.{i}", count=61, size=132, block_size=64, dtype="uint8")
    plan = kvpage.plan(build.request(rows, indexer, memory_bytes=int(43.67 * 2**30)))
    assert plan.bytes_per_block == 3_076_352 == 64 * 48_068
    assert abs(plan.num_blocks - 975_424 // 64) <= 2
    assert (len(plan.groups), plan.waste.padding_bytes) == (1, 0)
    assert {layer.page_size_bytes for layer in plan.layers.values()} == {41_984, 8448}


@pytest.mark.parametrize(
    ("window", "block", "in_flight", "blocks"),
    [(8, 4, 16_384, 4099), (128, 8, 16_384, 2065), (8, 4, 1, 3), (128, 8, 1, 17)],
)
def test_p27_what_is_in_flight_is_charged_to_each_request(window: int, block: int, in_flight: int, blocks: int) -> None:
    """With one token at once that is the steady state."""
    layer = build.sliding(window=window, block_size=block)
    request = build.request(layer, max_model_len=1 << 20, max_num_batched_tokens=in_flight)
    assert kvpage.plan(request).capacity.blocks_per_request == (blocks,)


def test_p36_blocks_are_counted_by_the_padded_page() -> None:
    layer = build.full("full", heads=2, size=516, dtype="int8", page_size_padded=66_560)
    plan = kvpage.plan(build.request(layer, memory_bytes=1 << 30))
    assert (plan.num_blocks, plan.groups[0].block_stride_bytes) == (16_131, 66_560)
    assert plan.layers["full"].real_page_size_bytes == 33_024


@pytest.mark.parametrize("num_blocks", [1, 127])
def test_p40_too_few_blocks_for_one_request(num_blocks: int) -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        kvpage.plan(build.request(build.full(), num_blocks=num_blocks, max_model_len=2048))
    assert "128" in caught.value.message
    kvpage.plan(build.request(build.full(), num_blocks=128, max_model_len=2048))


# --- P37, P49, P52, P54: what fits together -------------------------------------------------------


def test_p37_equal_pages_are_enough() -> None:
    """16 tokens of 4,096 bytes and 64 of 1,024: one page, whatever the tokens. One plane beside two: no."""
    shape = [2, "num_blocks", "block_size", "num_kv_heads", "head_size"]
    one = build.full("one", heads=8, size=256, block_size=16, backend=build.dense(build.KV_SHAPE))
    two = build.sliding("two", heads=8, size=64, block_size=64, backend=build.dense(build.KV_SHAPE))
    plan = kvpage.plan(build.request(one, two))
    assert {layer.page_size_bytes for layer in plan.layers.values()} == {2 * 65_536}
    assert {layer.decision for layer in plan.layers.values()} == {"keep"}
    with pytest.raises(LayoutUnsupported):
        kvpage.plan(build.request(one | {"backend": {"shape": shape}}, two))


def test_p49_windows_in_bf16_beside_full_layers_in_fp8() -> None:
    full = build.full("full", heads=8, size=64, dtype="float8_e4m3fn")
    plan = kvpage.plan(build.request(full, build.sliding("window", heads=8, size=64)))
    assert {layer.page_size_bytes for layer in plan.layers.values()} == {32_768}
    assert (plan.layers["full"].block_size, plan.layers["window"].block_size) == (32, 16)


@pytest.mark.parametrize(("block", "fits"), [(1, False), (2, True), (16, True)])
def test_p52_blocks_smaller_than_what_a_kernel_packs(block: int, fits: bool) -> None:
    """Rows of bf16 are packed in pairs."""
    layer = build.mla("mla", block_size=block, kernel_block_sizes=[{"multiple_of": 2}])
    if fits:
        assert kvpage.plan(build.request(layer)).layers["mla"].block_size == block
        return
    with pytest.raises(LayoutUnsupported) as caught:
        kvpage.plan(build.request(layer))
    assert "use 2" in caught.value.message


@pytest.mark.parametrize(("quant", "size"), [("nvfp4", 514), ("mxfp4", 528), ("int4", 511)])
def test_p54_widths_that_share_no_whole_scales_are_refused(quant: str, size: int) -> None:
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(build.full(size=size, dtype="uint8", kv_quant=quant, backend="BLHNC")))
    assert str(size) in caught.value.message


def test_p11_three_part_rows_beside_a_state() -> None:
    """388 bytes a row and head: alignment pads the state by 3,456 bytes and gives attention 16,304 tokens."""
    row = build.full("full", heads=2, size=194, dtype="int8")
    state = build.state("state", [[12_648_448]], ["int8"])
    plan = kvpage.plan(build.request(row, state, memory_bytes=1 << 32, align_hybrid=True))
    assert (plan.layers["full"].block_size, plan.layers["state"].page_size_bytes) == (16_304, 12_651_904)
