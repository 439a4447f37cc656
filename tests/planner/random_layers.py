"""Random layers of plan requests: every kind, registered, written-out and named backends, row formats, padding.

Everything is drawn from the `random.Random` passed in, so a seed names a layer (and hypothesis can shrink one).
"""

from __future__ import annotations

import random
from typing import Any

from planner import layouts
from planner.one_layer import data_bytes, expand
from planner.rows import ITEM_SIZE_BYTES, is_latent

Json = dict[str, Any]

FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
KINDS = (
    *(("full_attention",) * 4),
    *(("sliding_window",) * 3),
    *(("mla_attention",) * 2),
    *(("mamba",) * 3),
    *("chunked_local_attention", "encoder_only_attention", "cross_attention", "cross_attention"),
)
SAME_WIDTH_BACKENDS = (
    "flash_attn",
    "triton_attn",
    "flex_attention",
    "flashinfer",
    "rocm_attn",
    "rocm_aiter_unified_attn",
)
TWO_WIDTH_BACKENDS = ("flash_attn_diffkv", "triton_attn_diffkv", "cpu_attn")
PACKED_LAYOUTS = ("BLHNC", "BLNHC")
REGION_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC")
MLA_BACKENDS = ("triton_mla", "rocm_aiter_mla", "flashmla", "flashinfer_mla", "cutlass_mla", "flash_attn_mla")


def random_layer(rng: random.Random, name: str, align: bool) -> Json:
    kind = rng.choice(KINDS)
    layer: Json = {"name": name, "kind": kind, "block_size": rng.choice((16, 16, 16, 32, 32, 64, 128))}
    if kind == "encoder_only_attention":
        return layer | {"num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
    make = {"mamba": random_state, "mla_attention": random_mla}.get(kind, random_attention)
    layer |= make(rng, kind)
    if align and layer.pop("compress_ratio", None):
        layer["backend"] = written_mla(rng)
    if not align and rng.random() < 0.12:
        layer["page_size_padded"] = random_padding(rng, layer)
    if rng.random() < 0.1 and kind != "mamba":
        layer["draft"] = True
    return layer


def random_state(rng: random.Random, kind: str) -> Json:
    if rng.random() < 0.4:  # a power of two: often a divisor of the largest page
        shapes = [[1 << rng.randint(3, 8), 1 << rng.randint(3, 8)] for _ in range(rng.randint(1, 3))]
    else:
        shapes = [
            [3, rng.choice((512, 2048, 8192))],
            [rng.choice((16, 32)), rng.choice((64, 128)), rng.choice((64, 128))],
        ]
    dtypes = [rng.choice(("bfloat16", "float32", "float16")) for _ in shapes]
    layer: Json = {"shapes": shapes, "dtypes": dtypes}
    if rng.random() < 0.3:
        layer["num_speculative_blocks"] = rng.randint(0, 4)
    return layer


def random_mla(rng: random.Random, kind: str) -> Json:
    head_size = rng.choice((576, 512, 320, 132, 656))
    layer: Json = {"head_size": head_size, "dtype": "uint8" if head_size in (132, 656) else rng.choice(FLOATS)}
    layer["backend"] = rng.choice(MLA_BACKENDS) if rng.random() < 0.4 else written_mla(rng)
    if rng.random() < 0.2 and head_size in (512, 576):
        layer |= {"dtype": "uint8", "kv_quant": rng.choice(("fp8_ds_mla", "int4", "mxfp4"))}
        layer["backend"] = written_mla(rng)
        if layer["kv_quant"] == "fp8_ds_mla" and rng.random() < 0.4:
            layer["backend"] = rng.choice(("flashmla_sparse", "flashinfer_mla_sparse_sm120"))
    if rng.random() < 0.15:
        layer["compress_ratio"] = rng.choice((2, 4, 16, 48))
    if rng.random() < 0.25:
        layer["page_alignment_bytes"] = rng.choice((576, 1024, 2048, 4096, 73_728))
    return layer


def random_latent_window(rng: random.Random, name: str) -> Json:
    """A window over latent rows, as DeepSeek V4 has them."""
    tokens, window, width, dtype = rng.choice(
        (
            *((64, 128, 512, "uint8"), (64, 128, 512, "bfloat16"), (4, 8, 1024, "float32"), (8, 128, 512, "float32")),
            *((4, 8, 512, "bfloat16"), (32, 1000, 132, "uint8"), (64, 7, 576, "bfloat16")),
        )
    )
    layer: Json = {"name": name, "kind": "sliding_window_mla", "block_size": tokens, "sliding_window": window}
    layer |= {"head_size": width, "dtype": dtype, "backend": written_mla(rng)}
    if dtype == "uint8" and width == 512:
        layer["kv_quant"] = "fp8_ds_mla"
    return layer


def random_latent_rows(rng: random.Random, name: str, tokens: int) -> Json:
    """Latent rows of every token, compressed or not, beside which windows are planned."""
    width, dtype, ratio = rng.choice(
        ((512, "uint8", 4), (512, "uint8", 64), (132, "uint8", 4), (512, "bfloat16", 4), (576, "bfloat16", 1))
    )
    layer: Json = {"name": name, "kind": "mla_attention", "block_size": tokens, "head_size": width, "dtype": dtype}
    if dtype == "uint8" and width == 512:
        layer["kv_quant"] = rng.choice(("fp8_ds_mla", "fp8_ds_mla", "mxfp4"))
    return layer | {"compress_ratio": ratio, "backend": written_mla(rng)}


def random_attention(rng: random.Random, kind: str) -> Json:
    layer: Json = {
        "num_kv_heads": rng.choice((1, 2, 4, 5, 8, 16)),
        "head_size": rng.choice((64, 80, 96, 128, 192, 256)),
    }
    layer["dtype"] = rng.choice(FLOATS)
    if rng.random() < 0.15:
        quantise(rng, layer)
    else:
        if kind not in ("chunked_local_attention", "cross_attention") and rng.random() < 0.3:
            layer["head_size_v"] = rng.choice((64, 128, 192))
        layer["backend"] = attention_backend(rng, layer)
    if kind == "cross_attention":
        return layer
    if kind == "sliding_window" or (kind == "full_attention" and rng.random() < 0.1):
        layer["sliding_window"] = rng.choice((1, 128, 512, 1000, 4096))
    elif kind == "chunked_local_attention" or (kind == "full_attention" and rng.random() < 0.1):
        layer["attention_chunk_size"] = rng.choice((1024, 8192))
    return layer


def quantise(rng: random.Random, layer: Json) -> None:
    quant, dtype, backend = rng.choice(
        (
            ("int8_per_token_head", "int8", "triton_attn"),
            ("fp8_per_token_head", "float8_e4m3fn", "triton_attn"),
            ("nvfp4", "uint8", "flashinfer"),
            ("int4", "uint8", None),
            ("mxfp4", "uint8", None),
        )
    )
    shape: list[str | int] = ["num_blocks", "block_size", "num_kv_heads", "row_size + row_size_v"]
    layer |= {"kv_quant": quant, "dtype": dtype, "backend": backend or with_orders(rng, shape, [0, 1, 2, 3])}
    if quant == "mxfp4":
        layer["head_size"] = rng.choice((64, 96, 128))  # 32 values share a scale


def attention_backend(rng: random.Random, layer: Json) -> str | Json:
    same_width = layer.get("head_size_v", layer["head_size"]) == layer["head_size"]
    if rng.random() < 0.4:
        return rng.choice(SAME_WIDTH_BACKENDS if same_width else TWO_WIDTH_BACKENDS)
    shape: list[str | int] = ["num_blocks", "block_size", "num_kv_heads", "head_size + head_size_v"]
    if same_width and rng.random() < 0.5:
        shape = ["num_blocks", 2, "block_size", "num_kv_heads", "head_size"]
    if rng.random() < 0.25:
        return {"shape": shape}
    inner = list(range(1, len(shape)))
    rng.shuffle(inner)
    return with_orders(rng, shape, [0, *inner])


def written_mla(rng: random.Random) -> Json:
    shape: list[str | int] = ["num_blocks", "block_size", "row_size"]
    return {"shape": shape} if rng.random() < 0.4 else with_orders(rng, shape, [0, 1, 2])


def with_orders(rng: random.Random, shape: list[str | int], order: list[int]) -> Json:
    """Both stride orders; the layers axis is outermost (padding refused) or anywhere further in (padding fine)."""
    layered = [axis + 1 for axis in order]
    layered.insert(0 if rng.random() < 0.2 else rng.randint(1, len(layered)), 0)
    return {"shape": shape, "stride_order": order, "layered_stride_order": layered}


def random_padding(rng: random.Random, layer: Json) -> int:
    """Mostly a legal padded page; now and then one byte short or not a multiple of the item size."""
    if layer.get("page_alignment_bytes"):
        del layer["page_alignment_bytes"]
    (expanded,) = expand({"layers": [layer]})
    page = data_bytes(expanded)
    item = max(ITEM_SIZE_BYTES[dtype] for dtype in layer.get("dtypes", [layer.get("dtype", "float32")]))
    choice = rng.random()
    if choice < 0.1:
        return page - 1
    if choice < 0.2:
        return page + rng.randint(1, 3)
    return int(page + item * rng.choice((0, 1, 16, 512, page // item, 3 * page // item)))


def name_layouts(rng: random.Random, families: list[Json]) -> None:
    """Give all layers named layouts: mostly such as can live together."""
    choices = rng.choice((PACKED_LAYOUTS, REGION_LAYOUTS, ("LHBNC",), ("BHLNC",), layouts.NAMED))
    for family in families:
        if "backend" not in family or rng.random() < 0.05:
            continue
        family["backend"] = rng.choice(choices)
        if is_latent(family) and rng.random() < 0.2:
            family["num_kv_heads"] = 2
