"""Latent rows: their formats and compression, and sliding windows beside them (DeepSeek V4)."""

from __future__ import annotations

from typing import Any

import pytest

import kvpage
from kvpage.errors import CannotUnify, LayoutUnsupported, NotEnoughMemory, SpecInvalid
from planner import build, comparison, view_oracle

Json = dict[str, Any]
ROWS = ["num_blocks", "block_size", "row_size"]


def rows(name: str, size: int = 512, block_size: int = 256, ratio: int = 1, **more: Any) -> Json:
    layer = build.mla(name, size=size, block_size=block_size, backend=build.pads(ROWS))
    return layer | {"compress_ratio": ratio} | more


def window(name: str, size: int = 512, block_size: int = 64, tokens: int = 128, **more: Any) -> Json:
    return rows(name, size, block_size) | {"kind": "sliding_window_mla", "sliding_window": tokens} | more


# --- rows -----------------------------------------------------------------------------------------

# tokens of a block, head size, dtype, format, tokens of a row, alignment -> bytes of the rows, page
PAGES = [
    (64, 512, "uint8", "fp8_ds_mla", 1, None, 37_376, 37_376),
    (64, 512, "uint8", "fp8_ds_mla", 1, 576, 37_376, 37_440),
    (256, 512, "uint8", "fp8_ds_mla", 4, 576, 37_376, 37_440),
    (256, 512, "uint8", "fp8_ds_mla", 128, 576, 1168, 1728),
    (256, 512, "uint8", "fp8_ds_mla", 128, None, 1168, 1168),
    (64, 576, "uint8", "fp8_ds_mla", 1, None, 41_984, 41_984),
    (64, 576, "uint8", "fp8_ds_mla", 1, 576, 41_984, 42048),
    (128, 576, "uint8", "fp8_ds_mla", 2, None, 41_984, 41_984),
    (256, 132, "uint8", None, 4, 576, 8448, 8640),
    (256, 132, "uint8", None, 4, None, 8448, 8448),
    (256, 68, "uint8", None, 4, 576, 4352, 4608),
    (256, 128, "uint8", "mxfp4", 4, 576, 4352, 4608),
    (256, 128, "uint8", "mxfp4", 1, None, 17_408, 17_408),
    (256, 128, "uint8", "int4", 4, None, 4096, 4096),
    (256, 128, "uint8", "nvfp4", 4, None, 4608, 4608),
    (64, 512, "bfloat16", None, 1, 576, 65_536, 65_664),
    (64, 512, "bfloat16", None, 32, 576, 2048, 2304),
    (4, 1024, "float32", None, 1, 576, 16_384, 16_704),
    (4, 2048, "float32", None, 1, None, 32_768, 32_768),
    (8, 1024, "float32", None, 1, 576, 32_768, 32_832),
    (8, 512, "bfloat16", None, 8, None, 1024, 1024),
    (16, 576, "bfloat16", None, 16, 4096, 1152, 4096),
    (48, 320, "float16", None, 3, None, 10_240, 10_240),
    (1, 512, "uint8", "fp8_ds_mla", 1, 576, 584, 1152),
]


@pytest.mark.parametrize("kind", ["mla_attention", "sliding_window_mla"])
@pytest.mark.parametrize(("tokens", "size", "dtype", "quant", "ratio", "alignment", "data", "page"), PAGES)
def test_a_page_holds_the_stored_rows(
    kind: str,
    tokens: int,
    size: int,
    dtype: str,
    quant: str | None,
    ratio: int,
    alignment: int | None,
    data: int,
    page: int,
) -> None:
    layer = rows("rows", size, tokens, ratio, dtype=dtype, kv_quant=quant, page_alignment_bytes=alignment)
    if kind == "sliding_window_mla":
        layer |= {"kind": kind, "sliding_window": 8}
    request = build.request(layer, num_blocks=64, max_model_len=1)
    plan = kvpage.plan(request)
    got = plan.layers["rows"]
    assert (got.real_page_size_bytes, got.page_size_bytes, got.block_size) == (data, page, tokens)
    (view,) = got.tensors
    assert view.shape[:2] == (64, tokens // ratio)
    assert view.strides_bytes[0] == page
    assert view.strides_bytes[1] * (tokens // ratio) == data
    comparison.compare(request)


def test_the_view_of_compressed_rows_ends_in_the_buffer() -> None:
    """256 tokens at 128 to a row are 2 rows of 584 bytes in pages of 1,728; 256 rows would be 128 times the buffer."""
    layer = rows("rows", 512, 256, 128, dtype="uint8", kv_quant="fp8_ds_mla", page_alignment_bytes=576)
    plan = kvpage.plan(build.request(layer, memory_bytes=53_255_232))
    (view,) = plan.layers["rows"].tensors
    assert (view.shape, view.strides_bytes) == ((30_819, 2, 584), (1728, 584, 1))
    assert 30_818 * 1728 + 2 * 584 == 53_254_672 <= plan.buffer_size_bytes == 30_819 * 1728


@pytest.mark.parametrize(
    "faulty",
    [
        {"compress_ratio": 3},
        {"compress_ratio": 512},
        {"kv_quant": "fp8_ds_mla"},
        {"kv_quant": "fp8_ds_mla", "dtype": "uint8", "head_size": 640},
        {"kv_quant": "mxfp4", "dtype": "uint8", "head_size": 528},
        {"kv_quant": "int4", "dtype": "uint8", "head_size": 511},
        {"kv_quant": "nvfp4", "dtype": "uint8", "head_size": 520},
        {"compress_ratio": 4, "block_size": None},
    ],
)
@pytest.mark.parametrize("kind", [rows, window])
def test_rows_that_cannot_be_are_refused(kind: Any, faulty: Json) -> None:
    layer = {key: value for key, value in (kind("rows", block_size=256) | faulty).items() if value is not None}
    with pytest.raises(SpecInvalid) as caught:
        kvpage.plan(build.request(layer))
    assert caught.value.errors[0].pointer == "/layers/0"


# --- how many blocks a window holds ---------------------------------------------------------------

# tokens of a block, window, tokens at once, longest request -> most blocks
DEMAND = [
    (64, 128, 8192, 16384, 131),
    (64, 128, 8192, 100, 3),
    (64, 128, 2048, 1048576, 35),
    (64, 128, 1, 1048576, 3),
    (64, 1, 1, 1000, 2),
    (64, 1, 64, 1000, 2),
    (64, 2, 64, 1000, 3),
    (4, 8, 16384, 131072, 4099),
    (8, 128, 16384, 131072, 2065),
    (4, 8, 1, 131072, 3),
    (4, 8, 1, 8, 3),
    (4, 8, 1, 7, 3),
    (4, 8, 2048, 1, 2),
    (256, 1024, 8192, 16384, 37),
    (256, 1024, 8192, 9000, 37),
    (2, 4, 4, 4, 3),
    (2, 4, 4, 8, 5),
    (32, 1000, 64, 4096, 35),
    (32, 1000, 25, 4096, 33),
    (32, 1000, 26, 4096, 34),
    (16, 512, 512, 1023, 65),
    (16, 512, 512, 1024, 65),
    (1, 128, 128, 1000, 256),
]


@pytest.mark.parametrize(("tokens", "wide", "batched", "length", "blocks"), DEMAND)
def test_a_window_of_latent_rows_holds_as_many_blocks(
    tokens: int, wide: int, batched: int, length: int, blocks: int
) -> None:
    layer = window("w", block_size=tokens, tokens=wide)
    request = build.request(layer, num_blocks=blocks, max_model_len=length, max_num_batched_tokens=batched)
    assert kvpage.plan(request).capacity.blocks_per_request == (blocks,)
    with pytest.raises(NotEnoughMemory) as caught:
        kvpage.plan(request | {"num_blocks": blocks - 1})
    assert str(blocks) in caught.value.message
    comparison.compare(request)


# --- windows beside whole rows --------------------------------------------------------------------

# DeepSeek V4, much reduced. Pages: a row for 4 tokens 37,440, a row for 128 tokens 1,728, the indexer 8,640.
V4: Json = {"dtype": "uint8", "page_alignment_bytes": 576}
COMPRESSED_4 = rows("c4.{i}", 512, 256, 4, kv_quant="fp8_ds_mla", count=2, **V4)
INDEXER = rows("index.{i}", 132, 256, 4, count=2, **V4)
COMPRESSED_128 = rows("c128.{i}", 512, 256, 128, kv_quant="fp8_ds_mla", count=2, **V4)
WINDOW = window("w.{i}", 512, 64, 128, kv_quant="fp8_ds_mla", **V4)  # 37,440
SMALL = window("s.{i}", 512, 4, 8, dtype="float32", page_alignment_bytes=576)  # 8,192 data, 8,640
TINY = window("t.{i}", 128, 2, 4, dtype="float32", page_alignment_bytes=576)  # 1,024 data, 1,152 -> 1,728


def test_a_reduced_deepseek_v4() -> None:
    """Five windows beside tuples of two: widths 2 to 5 add 1, 1 + 1, 2 + 3 and 3; the least is that of 2."""
    layers = [COMPRESSED_4, INDEXER, COMPRESSED_128, WINDOW | {"count": 5}]
    request = build.request(*layers, num_blocks=200, max_model_len=1000)
    plan = kvpage.plan(request)
    assert [group.layers for group in plan.groups] == [
        ("c4.0", "c4.1", "index.0", "index.1", "c128.0", "c128.1"),
        ("w.0", "w.3"),
        ("w.1", "w.4"),
        ("w.2",),
    ]
    assert plan.bytes_per_block == 2 * (37_440 + 8640 + 1728) == 95_616
    offsets = {name: layer.tensors[0].offset_bytes for name, layer in plan.layers.items()}
    assert offsets == {
        "c4.0": 0,
        "c4.1": 37_440,
        "index.0": 74_880,
        "index.1": 83_520,
        "c128.0": 92_160,
        "c128.1": 93_888,
        "w.0": 0,
        "w.1": 0,
        "w.2": 0,
        "w.3": 37_440,
        "w.4": 37_440,
    }
    assert {layer.tensors[0].strides_bytes[0] for layer in plan.layers.values()} == {95_616}
    # 1,000 tokens: 4 blocks of 256, and min(127 + 2048, 1000) = 1,000 tokens in 16 + 1 blocks of 64.
    assert plan.capacity.blocks_per_request == (4, 17, 17, 17)
    assert plan.capacity.request_bytes == 55 * 95_616
    comparison.compare(request)


def test_windows_are_padded_to_the_next_larger_page() -> None:
    layers = [COMPRESSED_4, INDEXER, COMPRESSED_128, SMALL | {"count": 2}, TINY | {"count": 2}]
    plan = kvpage.plan(build.request(*layers, num_blocks=800, max_model_len=1000))
    small, tiny = plan.layers["s.0"], plan.layers["t.0"]
    assert (small.decision, small.page_size_bytes, small.page_size_padded) == ("co_group", 8640, None)
    assert (tiny.decision, tiny.page_size_bytes, tiny.page_size_padded) == ("pad", 1728, 1728)
    assert [plan.layers[f"s.{i}"].tensors[0].offset_bytes for i in (0, 1)] == [74_880, 83_520]
    assert [plan.layers[f"t.{i}"].tensors[0].offset_bytes for i in (0, 1)] == [92_160, 93_888]


# Tuples of whole rows; windows of each sort -> width. Rounding all of these up to it adds least; of two the larger.
WIDTHS = [
    (2, [5], 2),
    (2, [4], 2),
    (3, [4], 4),
    (3, [7], 4),
    (1, [1], 1),
    (1, [7], 1),
    (10, [3], 10),
    (10, [21], 11),
    (11, [21], 11),
    (20, [41], 21),
    (21, [41], 21),
    (10, [10, 10], 10),
    (10, [20, 20], 10),
    (10, [11, 22], 11),
    (4, [6, 9], 6),
    (3, [10, 10], 5),
    (5, [7, 9, 11], 5),
    (30, [61], 31),
    (2, [3, 5, 7], 2),
    (6, [43, 43], 11),
]


@pytest.mark.parametrize(("tuples", "windows", "groups_wide"), WIDTHS)
def test_how_many_windows_lie_side_by_side(tuples: int, windows: list[int], groups_wide: int) -> None:
    """Each sort of window is dealt into ceil(count / width) groups."""
    layers = [rows("whole.{i}", 512, 64, count=tuples)]
    layers += [window(f"w{sort}.{{i}}", 512, 64, 2 ** (sort + 5), count=n) for sort, n in enumerate(windows)]
    request = build.request(*layers, memory_bytes=1 << 34, max_model_len=1000)
    plan = kvpage.plan(request)
    assert len(plan.groups) == 1 + sum(-(-count // groups_wide) for count in windows)
    comparison.compare(request)


DENSE: Json = {"backend": build.dense(ROWS)}
REFUSED: list[tuple[str, list[Json], type[Exception]]] = [
    ("no whole rows", [window("a"), window("b", tokens=8)], LayoutUnsupported),
    ("whole rows of two block sizes", [rows("a"), rows("b", block_size=128), window("w")], LayoutUnsupported),
    ("a window wider than any page", [rows("a", block_size=16), window("w")], CannotUnify),
    ("a page that cannot be padded", [rows("a"), window("w", **DENSE)], CannotUnify),
    ("a kind that vLLM forgets", [rows("a"), window("w"), build.full()], LayoutUnsupported),
    ("a state that vLLM forgets", [rows("a"), window("w"), build.state("s", [[4]], ["int8"])], LayoutUnsupported),
    ("a plain window that vLLM forgets", [rows("a"), window("w"), build.sliding()], LayoutUnsupported),
    (
        "tuples that are not full",
        [rows("a"), rows("b", 132), window("w", 512, 256), window("v", 132, 256), window("u", 132, 256)],
        LayoutUnsupported,
    ),
    (
        "blocks a kernel would split",
        [rows("a", backend="flashmla", size=576, block_size=128), window("w", backend="flashmla", size=576)],
        LayoutUnsupported,
    ),
]


@pytest.mark.parametrize(("why", "layers", "error"), REFUSED, ids=[case[0] for case in REFUSED])
def test_windows_that_have_no_plan(why: str, layers: list[Json], error: type[Exception]) -> None:
    request = build.request(*layers)
    with pytest.raises(error) as caught:
        kvpage.plan(request)
    assert type(caught.value) is error
    assert isinstance(caught.value, CannotUnify | LayoutUnsupported)
    assert caught.value.errors[0].pointer.startswith("/layers/")
    comparison.compare(request)


def test_windows_of_one_size_alone_are_one_group() -> None:
    request = build.request(window("a"), window("b", 576), num_blocks=200)
    plan = kvpage.plan(request)
    assert [group.layers for group in plan.groups] == [("a", "b")]
    assert plan.layers["b"].tensors[0].offset_bytes == 200 * 65_536
    comparison.compare(request)


def test_rows_that_kernels_count_through_are_not_packed() -> None:
    """A kernel that goes by row number must find the next block right behind: regions, with as many blocks."""
    pages: Json = {"block_size": 64, "size": 576, "dtype": "uint8", "kv_quant": "fp8_ds_mla"}
    layers = [rows("a.{i}", count=2, **pages), window("w.{i}", count=2, **pages)]
    packed = kvpage.plan(build.request(*layers, memory_bytes=1 << 28))
    apart = build.request(*(layer | {"backend": "flashmla_sparse"} for layer in layers), memory_bytes=1 << 28)
    regions = kvpage.plan(apart)
    assert packed.layers["w.1"].tensors[0].strides_bytes[0] == 2 * 41_984
    assert regions.layers["w.1"].tensors[0].strides_bytes[0] == 41_984 == 64 * 656
    assert regions.layers["w.1"].tensors[0].offset_bytes == 41_984 * regions.num_blocks
    assert packed.num_blocks == regions.num_blocks
    assert packed.capacity == regions.capacity
    comparison.compare(apart)


def test_a_small_plan_byte_by_byte() -> None:
    small: Json = {"size": 4, "dtype": "int8"}
    layers = [
        rows("a.{i}", block_size=8, ratio=2, count=2, **small),
        rows("b.{i}", block_size=8, count=2, **small),
        window("w.{i}", block_size=4, count=3, **small),
        window("v.{i}", block_size=2, tokens=4, count=3, **small),
    ]
    request = build.request(*layers, num_blocks=40, max_model_len=4)
    plan = kvpage.plan(request)
    assert plan.bytes_per_block == 2 * 16 + 2 * 32 + 16  # three windows side by side need a third page of 16
    assert view_oracle.faults(plan, comparison.block_axes(request)) == set()
    comparison.compare(request)


def test_pages_whose_items_do_not_fit_are_refused_or_planned_soundly() -> None:
    """bf16 windows of 128 bytes beside whole rows of 577: no page of 577 bytes holds whole items at every block."""
    whole = rows("a", 577, 1, dtype="uint8", **DENSE)
    request = build.request(whole, window("w", 64, 1), num_blocks=5000, max_model_len=1)
    with pytest.raises(CannotUnify):
        kvpage.plan(request)
